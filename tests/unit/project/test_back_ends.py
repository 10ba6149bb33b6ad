"""Back-ends are named where they are driven, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS = {"cuda", "cudnn", "cublas", "gloo", "libtpu", "nccl", "pallas", "pjrt", "tpu", "tpus"}
WORDS |= {"triton", "xla"}
# Beside the package launch, which asks clusters for devices.
INSIDE = ("trainer/accelerators/", "trainer/strategies/")
EXCEPTIONS: set[tuple[str, str]] = set()
"""(file, word) that the fence lets through, each with its reason."""


def words(text: str) -> set[str]:
    """The words of an identifier or a text: LocalTPUs, is_cuda -> local, tpus, is, cuda."""
    return {word.lower() for word in re.findall(r"[A-Z]+s?(?![a-z])|[A-Z]?[a-z]+", text)}


def named(code: str) -> Iterator[tuple[int, str]]:
    """Lines of code that speak of a back-end, and what they say; comments and docstrings may."""
    tree = ast.parse(code)
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # texts by themselves
    for node in ast.walk(tree):
        said: list[str | None] = []
        match node:
            case ast.Constant(value=str(text)) if id(node) not in texts:
                said = [text]
            case ast.Attribute(attr="is_cpu" | "is_cuda" | "is_xla" as attribute):
                yield node.lineno, attribute
            case ast.Attribute(
                value=ast.Name(id="device") | ast.Attribute(attr="device"), attr="type"
            ):
                yield node.lineno, "device.type"
            case (
                ast.Attribute(attr=name)
                | ast.Name(id=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=name)
            ):
                said = [name]
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                said = [name]
            case ast.alias(name=name, asname=other):
                said = [name, other]
            case ast.ImportFrom(module=module):
                said = [module]
        yield from (
            (node.lineno, text) for text in said if text is not None and words(text) & WORDS
        )


def test_back_ends_are_named_by_accelerators_strategies_and_launch_alone():
    found = set()
    for path in sorted([*ROOT.glob("trainer/**/*.py"), *ROOT.glob("data_pipeline/**/*.py")]):
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith(INSIDE):
            found |= {(file, said) for _, said in named(path.read_text(encoding="utf-8"))}
    assert sorted(found - EXCEPTIONS) == [], (
        "ask the Accelerator, the Strategy or trainer/accelerators/kernels.py"
    )
    assert sorted(EXCEPTIONS - found) == [], "exceptions that nobody needs any more"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if parts[0].is_cuda: pass", ["is_cuda"]),
        ("torch.cuda.synchronize()", ["cuda"]),
        ("kind = groups[0].device.type", ["device.type"]),
        ("kind = device.type", ["device.type"]),
        ("class XlaTrial: ...", ["XlaTrial"]),
        ("from trainer.strategies import fsdp, xla_spmd as spmd", ["xla_spmd"]),
        ("from trainer.strategies.xla import flash", ["trainer.strategies.xla"]),
        ("def count(tpus): return f'{tpus} TPUs'", ["tpus", "tpus", " TPUs"]),
        ("os.environ['CUDA_VISIBLE_DEVICES']", ["CUDA_VISIBLE_DEVICES"]),
        ("dist.new_group(backend='gloo')", ["gloo"]),
        ("def f():\n    'As on CUDA.'\n    x = 1  # XLA\n    'NCCL'", []),
        ("output = input_type = argument.type", []),
    ],
)
def test_what_names_a_back_end(code: str, expected: list[str]):
    assert sorted(said for _, said in named(code)) == sorted(expected)
