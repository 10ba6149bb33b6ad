"""docs/api.md names all that programs and plug-ins use; their docstrings have shapes and errors."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import samestep

ROOT = Path(__file__).parents[3]
NAMES = re.findall(
    r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
)
CONTRACTS = {
    "trainer.optim.Config",
    "data_pipeline.sources.Source",
    "trainer.training.observers.Observer",
    "trainer.strategies.Strategy",
    "launch.job.Cluster",
}


ARRAYS = r"\b(Tensor|NDArray|Bools|Float32|Int32|Int64)\b"


def functions(name: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """The function of this name, or the public methods and properties that a class defines."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value):
        for attribute, member in vars(value).items():
            plain = member.fget if isinstance(member, property) else member
            plain = getattr(plain, "__func__", plain)  # of a class method
            if inspect.isfunction(plain) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", plain


ALL = dict(pair for name in NAMES for pair in functions(name))


def test_the_page_has_every_name():
    assert len(NAMES) == len(set(NAMES))
    assert {f"samestep.{name}" for name in samestep.__all__} - {"samestep.__version__"} <= set(
        NAMES
    )
    assert set(NAMES) >= CONTRACTS
    assert len(ALL) > 150


@pytest.mark.parametrize("name", ALL)
def test_docstrings_have_shapes_and_errors(name: str):
    function = ALL[name]
    text = inspect.getdoc(function) or ""
    assert text, "no docstring"
    returned = str(inspect.signature(function).return_annotation)
    if re.search(ARRAYS, returned) and not returned.startswith(("Callable", "dict[Tensor")):
        assert re.search(r"\[(\w|\.\.\.)|\b(scalar|shapes?)\b", text), f"no shape of {returned}"
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    errors = {
        ast.unparse(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc
    }
    named = {error.partition("(")[0] for error in errors if re.match(r"[A-Z]", error)}
    assert [error for error in named if error not in text] == []
