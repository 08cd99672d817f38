"""Pages that mkdocs makes from the code: keys, methods, and the notebook."""

import ast
import json
import re
from pathlib import Path

from mkdocs.structure.files import File

from flray.cli.starting import experiment_text
from flray.config.reference import (
    ENCODER,
    OPTIONS,
    REGISTRIES,
    Key,
    component_keys,
    components,
    experiment_keys,
    keys,
)
from flray.config.shipped import EXPERIMENTS, find_file, names

ROOT = Path(__file__).parents[1]
# A comment at the line of an equation: it names the algorithm, equation or line of the paper.
CITED = re.compile(r"#\s*(.*\b(?:Alg\.|Eq\.|l\. \d|Section|Sec\.).*)$")


def on_files(files, config):
    """Add the generated pages to those of the folder."""
    pages = {"reference/keys.md": keys_page(), "notebook.md": notebook_page()}
    methods = components("algorithm")
    pages["methods/index.md"] = methods_page(methods)
    pages |= {f"methods/{each.name}.md": method_page(each) for each in methods}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config):
    """Every method has its place in the navigation."""
    for section in config.nav:
        if isinstance(section, dict) and "Methods" in section:
            section["Methods"] += [f"methods/{each.name}.md" for each in components("algorithm")]
    return config


def keys_page() -> str:
    """Every key of an experiment, of each component, of an encoder and of a space."""
    parts = [
        "# All keys\n",
        "Read from the classes that the loader binds them to; `flray keys` shows the same.\n",
    ]
    parts += ["## An experiment\n", key_table(experiment_keys())]
    for kind in REGISTRIES:
        parts.append(f"## {kind}\n")
        for each in components(kind):
            parts.append(f"### {kind} `{each.name}`\n\n{escaped(each.purpose)}.\n")
            if each.keys:
                parts.append(key_table(component_keys(each)))
    parts += ["## The file of an encoder\n", key_table(keys(ENCODER))]
    parts += [
        "## A space, beside `experiment`, `space`, `except` and `baseline`\n",
        key_table(keys(OPTIONS)),
    ]
    return "\n".join(parts)


def key_table(found: list[Key] | tuple[Key, ...]) -> str:
    lines = ["| key | values | default | what it is |", "|---|---|---|---|"]
    for key in found:
        default = "**required**" if key.default is None else f"`{key.default}`"
        lines.append(f"| `{key.name}` | {escaped(key.values)} | {default} | {escaped(key.note)} |")
    return "\n".join(lines) + "\n"


def methods_page(methods) -> str:
    lines = ["# Methods\n", "| name | what it is |", "|---|---|"]
    lines += [f"| [`{m.name}`]({m.name}.md) | {escaped(m.purpose)} |" for m in methods]
    return "\n".join(lines) + "\n"


def method_page(method) -> str:
    """Paper, equations as the code cites them, YAML, keys, and what its experiments found."""
    source = (ROOT / "flray" / "algorithms" / f"{method.name}.py").read_text(encoding="utf-8")
    first, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    title, _, what = first.replace("\n", " ").partition(": ")
    parts = [f"# {title}\n", f"{what[:1].upper()}{what[1:]}\n", f"{escaped(rest)}\n"]
    if cited := equations(source):
        parts += [
            "## Equations, as the code cites them\n",
            "\n".join(f"- `{line}`" for line in cited) + "\n",
        ]
    parts += ["## An experiment to start from\n", f"`flray init {method.name}` writes\n"]
    parts.append(f"```yaml\n{experiment_text(method, Path(f'{method.name}.yaml'))}```\n")
    if method.keys:
        parts += ["## Keys\n", key_table(component_keys(method))]
    if found := expectations(method.name):
        parts += ["## What to expect\n", "What the shipped experiments say of themselves:\n", found]
    return "\n".join(parts)


def equations(source: str) -> list[str]:
    found = (CITED.search(line) for line in source.splitlines())
    return [match[1] for match in found if match]


def expectations(method: str) -> str:
    """The head comments of the experiments of a method: command, hardware, numbers."""
    parts = []
    for name in names(EXPERIMENTS):
        text = find_file(name).read_text(encoding="utf-8")
        if re.search(rf"^algorithm:(?: | \{{name: |\n  name: ){method}\b", text, re.MULTILINE):
            head = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
            parts.append(f"`{name}`\n\n> " + escaped("\n> ".join(head)) + "\n")
    return "\n".join(parts)


def notebook_page() -> str:
    """The notebook's cells as a page."""
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
