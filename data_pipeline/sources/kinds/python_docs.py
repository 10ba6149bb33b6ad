"""Python's own documentation: docstrings of the standard library and the topics of `help()`.

It is about two megabytes of English that every machine has. Modules are parsed, never imported.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from data_pipeline.sources import Record, Source

# Installed packages, and tests: their docstrings are few and say little.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "turtledemo",
}
_TOPICS = "pydoc_data/topics.py"
_Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Config:
    """Nothing to set: it reads the library of the Python that runs."""

    def build(self) -> PythonDocs:
        """Lists the modules of the standard library."""
        folder = library()
        paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
        chosen = (str(path) for path in paths if _SKIPPED_FOLDERS.isdisjoint(path.parts))
        return PythonDocs(tuple(sorted(chosen)))


@dataclass(frozen=True)
class PythonDocs(Source):
    """A document for each module docstring, top-level definition (with its inner ones) and topic.

    The names in `files` are relative to the standard library.
    """

    def records(self) -> Iterator[Record]:
        for index, name in enumerate(self.files):
            read = (index + 1) / len(self.files)
            # Templates and test data in the library need not be valid Python.
            try:
                module = ast.parse((library() / name).read_bytes())
            except (OSError, SyntaxError, ValueError):
                yield Record(index, 1, b"", read, "invalid Python")
                continue
            documents = _topics(module) if name == _TOPICS else _docstrings(module)
            for line, text in documents:
                # Half a surrogate pair passes here, and the workers reject the document.
                yield Record(index, line, text.encode("utf-8", "surrogatepass"), read)


def library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    if text := ast.get_docstring(module):
        yield 1, text
    for statement in module.body:
        # A class and its methods are one document.
        texts = map(ast.get_docstring, _definitions(statement))
        if text := "\n\n".join(filter(None, texts)):
            yield statement.lineno, text


def _definitions(statement: ast.stmt) -> Iterator[_Definition]:
    """Yields a class or function, and the definitions inside a class."""
    if isinstance(statement, _Definition):
        yield statement
    if isinstance(statement, ast.ClassDef):
        for inner in statement.body:
            yield from _definitions(inner)


def _topics(module: ast.Module) -> Iterator[tuple[int, str]]:
    # The module is one assignment of a dictionary, topic -> text. A text's line is the line of its
    # literal.
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            yield from ((text.lineno, ast.literal_eval(text)) for text in statement.value.values)
