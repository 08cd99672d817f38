"""Imports run one way; some libraries are imported in named places only."""

import ast
import itertools
from pathlib import Path

import flray

PACKAGE = Path(flray.__file__).parent

# Each layer may import those before it, and itself.
LAYERS = [
    ["errors", "imports", "randomness", "values", "wording", "columns", "cores", "files"],
    ["data"],
    ["models"],
    ["engines"],
    ["client"],
    ["execution"],
    ["clustering"],
    ["algorithms"],
    ["measures"],
    ["config"],
    ["records"],
    ["server"],
    ["tracking"],
    ["runs"],
    ["forecast"],
    ["sweeps"],
    ["reports"],
    ["result"],
    ["cli"],
]
HEIGHT = {name: level for level, names in enumerate(LAYERS) for name in names}

# Library -> the only places that may import it.
CONFINED = {
    "ray": ("execution/", "server/actor.py", "sweeps/"),
    "wandb": ("tracking/loggers.py",),
    "mlflow": ("tracking/loggers.py",),
    "tensorboardX": ("tracking/loggers.py",),
    "matplotlib": ("reports/", "result.py"),
    "seaborn": ("reports/",),
    "rich": ("reports/", "cli/"),
    "click": ("cli/",),
}


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def layering_faults(name: str, modules: set[str]) -> list[str]:
    """What is wrong with the imports of the file `name`, relative to the package."""
    own = name.split("/")[0].removesuffix(".py")
    faults = []
    for module in sorted(modules):
        top, _, rest = module.partition(".")
        if top == "flray" and rest and own in HEIGHT:
            target = rest.split(".")[0]
            if HEIGHT[target] > HEIGHT[own]:
                faults.append(f"{name} ({own}) imports {module} ({target}), which lies above it")
        if top in CONFINED and not name.startswith(CONFINED[top]):
            faults.append(f"{name} imports {top}, which belongs in {', '.join(CONFINED[top])}")
    return faults


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_a_layer() -> None:
    top = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in FILES}
    assert len(FILES) > 20
    assert top - {"__init__", "__main__"} <= set(HEIGHT)


def test_imports_run_one_way() -> None:
    faults = [
        layering_faults(str(path.relative_to(PACKAGE)), imported_modules(path)) for path in FILES
    ]
    assert list(itertools.chain(*faults)) == []


def test_a_wrong_import_is_seen() -> None:
    assert layering_faults("data/iid.py", {"flray.server.loop"})
    assert layering_faults("engines/loop.py", {"ray.util"})
    assert not layering_faults("server/loop.py", {"flray.data.split", "numpy"})


def imported_at_start(*names: str) -> dict[str, str]:
    """What importing these modules of flray imports: each library, and a module that does."""
    waiting, seen, found = list(names), set(), {}
    while waiting:
        name = waiting.pop()
        base = PACKAGE.parent.joinpath(*name.split("."))
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for node in ast.parse(path.read_text()).body:  # not what stands in functions
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {module.partition(".")[0]: name for module in modules}
            waiting += [module for module in modules if module.startswith("flray.")]
    return found


def test_a_run_imports_no_tables_no_figures_and_no_ray_before_its_first_round() -> None:
    """pandas and seaborn are a tenth of a start, imported at its end; Ray only where it is used."""
    found = imported_at_start("flray.cli.running", "flray.runs.keeper", "flray.server.loop")
    assert {"torch", "pyarrow", "rich"} <= found.keys()
    late = {"pandas", "seaborn", "matplotlib", "sklearn", "umap", "wandb", "ray"}
    assert {library: found[library] for library in late & found.keys()} == {}
    assert imported_at_start("flray.cli.concluding").keys() >= {"pandas", "seaborn"}
