"""What README, tutorial and guides show works as it stands there, in order, on fewer clients."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from flray import columns
from flray.algorithms import ALGORITHMS
from flray.cli import cli, concluding
from flray.server.summary import summary_names

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# (\S+\.(?:yaml|py))\n")
# What is shown and makes a run short.
SMALLER = {
    "dataset: digits": "dataset: {name: digits, size: 8}",
    "rounds: 20": "rounds: 4",
    "rounds_before: 5": "rounds_before: 2",
    "clients: 20": "clients: 8",
    "epochs: 3": "epochs: 1",
    "rounds=25": "rounds=5",
    "rounds=30": "rounds=7",
    "rounds=40": "rounds=8",
    "seeds=3": "seeds=2",
}
# The demo has a test of its own; these need Ray, a cluster, MNIST, or what only a user has.
NEED_MORE = ("s3://", "executor=ray", "cluster.yaml", "flray sweep", "runs/sweep", "runs/flhc/...")


def shortened(text: str) -> str:
    for shown, smaller in SMALLER.items():
        text = text.replace(shown, smaller)
    return text


def commands(block: str) -> list[list[str]]:
    """The arguments of every `flray` command of a block that a test can run."""
    lines = [line.split("  #")[0].strip() for line in block.splitlines()]
    lines = [line for line in lines if line.startswith("flray ")]
    usable = [line for line in lines if not any(word in line for word in NEED_MORE)]
    return [shlex.split(shortened(line))[1:] for line in usable if line != "flray run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "least"),
    [
        ("README.md", 12),
        pytest.param("docs/tutorial.md", 9, marks=pytest.mark.long),
        ("docs/adding_a_dataset.md", 2),
        ("docs/own_data.md", 3),
    ],
)
@pytest.mark.usefixtures("no_figures")
def test_a_guide_in_order(guide, least, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(concluding, "write_figures", lambda *_: [])
    done = 0
    for language, text in BLOCK.findall((ROOT / guide).read_text(encoding="utf-8")):
        named = NAMED.match(text)
        if language in ("yaml", "python") and named:
            Path(named[1]).write_text(shortened(text))
            if named[1].startswith("make_"):  # data for what follows
                runpy.run_path(named[1])
        if language:
            continue
        for arguments in commands(text):
            result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
            assert result.exit_code == 0, (arguments, result.output)
            done += 1
            if arguments[0] == "init":
                for file in Path().glob("*.yaml"):
                    file.write_text(shortened(file.read_text()))
    assert done >= least


@pytest.mark.slow
def test_the_tour_in_python(tmp_path, monkeypatch) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    (tour,) = [text for language, text in blocks if language == "python"]
    monkeypatch.chdir(tmp_path)
    Path("python_tour.py").write_text(tour)
    found = runpy.run_path("python_tour.py", run_name="__main__")
    assert found["result"].summary["accuracy_mean"] > 0.9
    assert Path("accuracy.png").exists()


@pytest.mark.slow
def test_the_lstm_of_ones_own(tmp_path, monkeypatch) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"))
    (text,) = [text for language, text in blocks if text.startswith("# meters.py")]
    monkeypatch.chdir(tmp_path)
    Path("meters.py").write_text(text.replace("rounds=10", "rounds=2"))
    losses = runpy.run_path("meters.py", run_name="__main__")["losses"]
    assert sorted(losses) == ["fedavg", "ifca"]
    assert all(0 < loss < 1 for loss in losses.values())


@pytest.mark.long
def test_the_notebook(tmp_path, monkeypatch) -> None:
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    monkeypatch.chdir(tmp_path)
    Path("notebook.py").write_text("\n".join(code).replace("ROUNDS = 12", "ROUNDS = 4"))
    found = runpy.run_path("notebook.py")
    assert found["flhc"].clusters.nunique() > 1
    assert Path("page.html").exists()
    assert Path("client3.ckpt").exists()


def test_the_readme_names_every_method() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in ALGORITHMS if f"`{name}`" not in text] == []


def test_every_recorded_column_is_explained() -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    prefixes = [prefix for prefix, _, _ in columns.EVALUATED]
    assert [prefix for prefix in prefixes if prefix and f"`{prefix}`" not in text] == []
    constants = {v for k, v in vars(columns).items() if k.isupper() and isinstance(v, str)}
    names = {name for name in constants | set(summary_names()) if not re.search("^_|_$", name)}
    starts = "|".join(prefixes)
    plain = {re.sub(f"^(?:{starts})(accuracy|clients_r|loss)", r"\1", name) for name in names}
    assert len(plain) > 60
    forms = {name: (f"`{name}`", f"`clustering_{name}`", f"`{name}_KIND`") for name in plain}
    assert {n for n, shown in forms.items() if not any(form in text for form in shown)} == set()


@pytest.mark.slow
def test_the_documentation_builds_strictly(tmp_path) -> None:
    pytest.importorskip("mkdocstrings")
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert "rounds_before" in (tmp_path / "methods" / "flhc" / "index.html").read_text()
    assert "participation" in (tmp_path / "reference" / "keys" / "index.html").read_text()
    api = (tmp_path / "reference" / "api" / "index.html").read_text()
    documented = ("flray.run", "flray.sweep", "flray.report", "flray.load", "flray.from_tensors")
    documented += ("flray.from_clients", "flray.from_frame")
    documented += ("flray.result.Result", "flray.result.Results")
    assert [name for name in documented if f'<h2 id="{name}"' not in api] == []
    assert not list(tmp_path.rglob("__pycache__"))
    pages = [page.read_text() for page in tmp_path.rglob("index.html")]
    titles = [title for page in pages for title in re.findall(r"<h1[^>]*>(.*?)<", page)]
    assert len(titles) > 20
    assert sorted(titles) == sorted(set(titles))


def test_links_between_pages_lead_to_files() -> None:
    """But for those to pages that are made when the site is built."""
    made = ("methods/", "reference/keys.md", "notebook.md")
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 50
    missing = [
        (str(page.relative_to(ROOT)), link)
        for page, link in links
        if not any(name in link for name in made) and not (page.parent / link).exists()
    ]
    assert missing == []
