"""Back-ends are imported where they are driven, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {"deepspeed", "jax", "libtpu", "torch_tpu", "torch_xla", "triton"}
IN_TORCH = {"cuda", "cudnn", "mps", "xla", "xpu"}
INSIDE = ("trainer/accelerators/", "trainer/strategies/", "trainer/inspect/doctor/")
DEVICE_QUESTIONS = {"is_cpu", "is_cuda", "is_xla"}


def uses(code: str) -> Iterator[str]:
    """The back-ends that code imports, reads from torch, or asks a tensor for."""
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                names = [f"{module}.{alias.name}" for alias in aliases]
            case ast.Attribute(
                value=ast.Name(id="torch") | ast.Attribute(value=ast.Name(id="torch")), attr=name
            ):
                names = [f"torch.{name}"]
            case ast.Attribute(attr=name) if name in DEVICE_QUESTIONS:
                yield name
            case ast.Attribute(
                value=ast.Name(id="device") | ast.Attribute(attr="device"), attr="type"
            ):
                yield "device.type"
        for name in names:
            top, *parts = name.split(".")
            if top in PACKAGES or (top == "torch" and not IN_TORCH.isdisjoint(parts)):
                yield name


def test_back_ends_are_imported_by_accelerators_and_strategies_alone() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for package in ("samestep", "trainer", "data_pipeline", "launch")
        for path in sorted(ROOT.glob(f"{package}/**/*.py"))
        for name in uses(path.read_text(encoding="utf-8"))
    }
    assert sorted(each for each in found if not each[0].startswith(INSIDE)) == [], (
        "ask the Accelerator, the Strategy or trainer/accelerators/kernels.py"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if parts[0].is_cuda: pass", ["is_cuda"]),
        ("torch.cuda.synchronize()", ["torch.cuda"]),
        ("torch.backends.cuda.matmul", ["torch.cuda"]),
        ("kind = groups[0].device.type", ["device.type"]),
        ("kind = device.type", ["device.type"]),
        ("import torch_xla.runtime as xr", ["torch_xla.runtime"]),
        ("from torch import cuda", ["torch.cuda"]),
        ("def f():\n    import deepspeed", ["deepspeed"]),
        ("dist.new_group(backend='gloo')  # a name in a text is none", []),
        ("output = input_type = argument.type", []),
    ],
)
def test_what_uses_a_back_end(code: str, expected: list[str]) -> None:
    assert sorted(uses(code)) == sorted(expected)
