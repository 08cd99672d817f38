"""Source files of the package, parsed: classes, assigned names, imports and comments.

torch and Lightning take seconds to import. Whatever answers at once (`flray keys`, `flray list`)
reads the source instead.
"""

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, eq=False)
class Source:
    """One parsed file of the package.

    >>> source = source_of("flray.engines.training")
    >>> type(source.defined["Training"]).__name__, source.find("Tensor") is None
    ('ClassDef', True)
    """

    module: str
    text: str
    tree: ast.Module

    @cached_property
    def defined(self) -> dict[str, ast.ClassDef | ast.expr]:
        """Classes and assigned values at the top level by name."""
        defined: dict[str, ast.ClassDef | ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                defined[node.name] = node
            elif isinstance(node, ast.Assign):
                defined[ast.unparse(node.targets[0])] = node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                defined[ast.unparse(node.target)] = node.value
        return defined

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Module and name there of what comes from other files of the package, by name here."""
        return {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flray")
            for alias in node.names
        }

    @cached_property
    def _comments(self) -> dict[int, tuple[int, str]]:
        """Column and text of the comment of each line that has one."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = (token for token in tokens if token.type == tokenize.COMMENT)
        return {c.start[0]: (c.start[1], c.string.lstrip("# ").strip()) for c in comments}

    def find(self, name: str) -> "Definition | None":
        """The definition that a name stands for here; None if it comes from elsewhere."""
        if name in self.defined:
            return Definition(self, name)
        if name not in self.imported:
            return None
        module, name_there = self.imported[name]
        return source_of(module).find(name_there)

    def comment(self, node: ast.AnnAssign | ast.arg) -> str:
        """The comment at the end of a field's line, or those on lines of their own above it."""
        for line in (node.end_lineno or node.lineno, node.lineno):
            if line in self._comments:
                return self._comments[line][1]
        lines: list[str] = []
        line = node.lineno - 1
        while line in self._comments and self._comments[line][0] == node.col_offset:
            lines.insert(0, self._comments[line][1])
            line -= 1
        text = " ".join(lines)
        return "" if text.startswith("Any:") else text


@dataclass(frozen=True)
class Definition:
    """A class or an assigned value of the package, and the file that defines it."""

    source: Source
    name: str

    @property
    def node(self) -> ast.ClassDef | ast.expr:
        """The class, or the value that is assigned."""
        return self.source.defined[self.name]

    @property
    def class_node(self) -> ast.ClassDef:
        """The class; only for definitions of classes."""
        assert isinstance(self.node, ast.ClassDef), self.name
        return self.node


@cache
def source_of(module: str) -> Source:
    """The source of a module of the package, by its dotted name."""
    path = _ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    return Source(module, text, ast.parse(text))


def definition(target: str) -> Definition:
    """The definition at `package.module:Name`, followed through imports.

    >>> definition("flray.algorithms:FedProx").source.module
    'flray.algorithms.fedprox'
    """
    module, _, name = target.partition(":")
    target_definition = source_of(module).find(name)
    if target_definition is None:
        raise LookupError(f"{module} defines no {name}")
    return target_definition
