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

# Keys stay on one line.
STYLE = "<style>td:first-child code { white-space: nowrap; }</style>\n"


def on_files(files, config):
    """Add the generated pages to those of the folder."""
    pages = {"reference/keys.md": keys_page(), "notebook.md": notebook_page()}
    methods = components("algorithm")
    pages["methods/index.md"] = methods_page(methods)
    pages |= {f"methods/{method.name}.md": method_page(method) for method in methods}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_config(config):
    """Add the page of each method to the navigation."""
    for section in config.nav:
        if isinstance(section, dict) and "Methods" in section:
            methods = components("algorithm")
            section["Methods"] += [f"methods/{method.name}.md" for method in methods]
    return config


def on_page_markdown(markdown, page, **_):
    """Name the page of a table without a heading by the first sentence of its caption."""
    if not page.file.src_uri.endswith("/table.md") or markdown.startswith("#"):
        return markdown
    caption = markdown.strip("*").partition("**")[0]
    return f"# {caption.partition('. ')[0]}\n\n{markdown}"


def keys_page() -> str:
    """Every key of an experiment, of each component, of an encoder and of a space."""
    parts = [
        "# All keys\n",
        STYLE,
        "This page is for authors of experiments: every key with its values and default, read from "
        "the classes that it configures. `flray keys` shows the same.\n",
    ]
    parts += ["## An experiment\n", key_table(experiment_keys())]
    for kind in REGISTRIES:
        parts.append(f"## {kind}\n")
        for component in components(kind):
            parts.append(f"### {kind} `{component.name}`\n\n{escaped(component.purpose)}.\n")
            if component.keys:
                parts.append(key_table(component_keys(component)))
    parts += ["## The file of an encoder\n", key_table(keys(ENCODER))]
    parts += [
        "## A space, beside `experiment`, `space`, `except` and `baseline`\n",
        key_table(keys(OPTIONS)),
    ]
    return "\n".join(parts)


def key_table(rows: list[Key] | tuple[Key, ...]) -> str:
    lines = ["| key | values | default | what it is |", "|---|---|---|---|"]
    for key in rows:
        default = "**required**" if key.default is None else f"`{key.default}`"
        lines.append(f"| `{key.name}` | {escaped(key.values)} | {default} | {escaped(key.note)} |")
    return "\n".join(lines) + "\n"


def methods_page(methods) -> str:
    lines = [
        "# Methods\n",
        "This page is for users who choose a method; each has a page with its paper and keys.\n",
        "| name | what it is |",
        "|---|---|",
    ]
    lines += [f"| [`{m.name}`]({m.name}.md) | {escaped(m.purpose)} |" for m in methods]
    return "\n".join(lines) + "\n"


def method_page(method) -> str:
    """Paper, equations as the code cites them, YAML, keys, and what its experiments found."""
    source = (ROOT / "flray" / "algorithms" / f"{method.name}.py").read_text(encoding="utf-8")
    first, _, rest = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    title, _, what = first.replace("\n", " ").partition(": ")
    parts = [f"# {title}\n", f"{what[:1].upper()}{what[1:]}\n", f"{escaped(rest)}\n"]
    if citations := equations(source):
        parts += [
            "## Equations, as the code cites them\n",
            "\n".join(f"- `{line}`" for line in citations) + "\n",
        ]
    parts += ["## An experiment to start from\n", f"`flray init {method.name}` writes\n"]
    parts.append(f"```yaml\n{experiment_text(method, Path(f'{method.name}.yaml'))}```\n")
    if method.keys:
        parts += [STYLE, "## Keys\n", key_table(component_keys(method))]
    if comments := expectations(method.name):
        parts += ["## What to expect\n", "The head of each shipped experiment:\n", comments]
    return "\n".join(parts)


def equations(source: str) -> list[str]:
    matches = (CITED.search(line) for line in source.splitlines())
    return [match[1] for match in matches if match]


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
