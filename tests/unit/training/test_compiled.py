"""Options of torch.compile: those of the accelerator, and one share of the cores for each rank."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch._inductor.config as inductor
from torch import nn

from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.accelerators.kinds.tpu import TpuAccelerator
from trainer.models import Model
from trainer.training.compute.compiled import compile_units

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("kind", "many_widths", "expected"),
    [
        (CpuAccelerator, False, {"backend": "inductor", "dynamic": False}),
        (CpuAccelerator, True, {"backend": "inductor", "dynamic": None}),
        (TpuAccelerator, False, {"backend": "tpu", "dynamic": False}),
        (TpuAccelerator, True, {"backend": "tpu", "dynamic": False}),
    ],
)
def test_the_accelerator_says_what_compiles(
    kind: type, many_widths: bool, expected: dict[str, Any]
) -> None:
    asked: list[dict[str, Any]] = []

    class Unit(nn.Module):
        def compile(self, **options: Any) -> None:
            asked.append(options)
            self._compiled_call_impl = print

    model = cast(Model, SimpleNamespace(compiled_units=lambda: [Unit(), Unit()]))
    with inductor.patch(compile_threads=1):
        compile_units(model, object.__new__(kind), many_widths)
    assert asked == [expected] * 2


@pytest.mark.parametrize(
    ("ranks", "cores", "given", "expected"),
    [(8, 192, None, 24), (2, 192, None, 32), (8, 4, None, 1), (None, 6, None, 6), (8, 192, "3", 5)],
)
def test_ranks_share_the_cores_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int | None,
    cores: int,
    given: str | None,
    expected: int,
) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", ranks), (THREADS, given)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    unit = nn.Linear(2, 2)
    with inductor.patch(compile_threads=5):  # as torch has read it from `given`
        compile_units(cast(Model, SimpleNamespace(compiled_units=lambda: [unit])), CpuAccelerator())
        assert inductor.compile_threads == expected
