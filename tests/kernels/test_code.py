"""The code of the attention kernels for each generation of GPUs: registers, spills, tensor cores.

Compiled without a GPU; says nothing of speed. `make test-kernels-all` compiles every variant.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton")

from trainer.accelerators.flash import WIDTHS
from trainer.inspect.plan.fusion import HASHED

if TYPE_CHECKING:
    from tests.kernels.offline import Code

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
KERNELS = ("forward", "query_gradient", "key_gradient")
REGISTERS = {"gfx942": 512}
"""The most registers that a thread may have; 255 on NVIDIA's GPUs."""
SPILLED = 16
"""The most bytes in memory: ptxas moves a number or two there to fit one more program on a core."""
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""Kilobytes of shared memory that a program may have."""

MAIN = [
    *product(TARGETS, KERNELS, ["t5"]),
    *product(["sm_90"], KERNELS, ["plain", "packed"]),
]
OTHERS = [
    case
    for case in product(
        TARGETS, KERNELS, ["plain", "packed", "first dropout", "causal", "prefix", "local"]
    )
    if case not in MAIN
]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def compiled(
    target: str, kernel: str, variant: str, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Code:
    from tests.kernels import offline

    code = offline.compile_kernel(target, kernel, variant, width, dtype)
    assert code.registers <= REGISTERS.get(target, 255)
    assert code.shared <= SHARED[target] * 1024
    return code


@pytest.mark.parametrize(
    ("target", "kernel", "variant"),
    [*MAIN, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)],
)
def test_half_precision_has_tensor_cores_and_hardly_spills(
    target: str, kernel: str, variant: str
) -> None:
    code = compiled(target, kernel, variant)
    assert code.tensor_cores > 0
    assert code.spilled <= SPILLED
    # Products of Hopper are asynchronous unless the compiler has to wait for each.
    assert code.waits <= code.tensor_cores / 2


def test_two_programs_of_the_forward_pass_fit_on_a_multiprocessor_of_hopper() -> None:
    code = compiled("sm_90", "forward", "packed")
    assert 2 * code.registers * 256 <= 65_536
    assert 2 * code.shared <= 227 * 1024


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_without_masks_take_fewer_instructions(kernel: str) -> None:
    code = compiled("sm_90", kernel, "segments")
    assert code.full_loop.total() < 0.88 * code.loop.total()


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_takes_few_instructions(kernel: str) -> None:
    from tests.kernels import offline

    loops = {v: compiled("sm_90", kernel, v).loop for v in ("segments", "packed", "first dropout")}
    scores, without = offline.scores_of_thread("sm_90", kernel), loops["segments"]
    added = {
        variant: {op: (loop[op] - without[op]) / scores for op in loop | without}
        for variant, loop in loops.items()
    }
    assert sum(added["packed"].values()) < 8.5
    assert sum(added["first dropout"].values()) > 15
    # What samestep plan --throughput counts; products are on the units of floating point.
    integer = sum(
        added["packed"].get(op, 0) for op in ("ISETP", "LOP3", "SHF", "SEL", "FSEL", "PRMT")
    )
    assert integer == pytest.approx(HASHED, abs=0.7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [width for width in WIDTHS if width != 64])
@pytest.mark.parametrize(("target", "kernel"), [*product(TARGETS, KERNELS)])
def test_other_heads_have_them_too(target: str, kernel: str, width: int) -> None:
    for variant in ("plain", "t5"):
        code = compiled(target, kernel, variant, width)
        assert code.tensor_cores > 0
        assert code.spilled <= SPILLED


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("target", "kernel"), [*product(TARGETS, KERNELS)])
def test_fp32_compiles(target: str, kernel: str, width: int) -> None:
    for variant in ("packed", "t5"):
        assert compiled(target, kernel, variant, width, torch.float32).spilled <= 128


@pytest.mark.parametrize("target", TARGETS)
def test_the_sums_of_the_bias_compile(target: str) -> None:
    from tests.kernels import offline
    from trainer.accelerators.flash import kernels as flash

    constants = {"BLOCK": 64, "ROWS": 16, "COLUMNS": 64}
    source = offline.source(flash.bias_gradient_kernel, torch.float32, constants)
    assert offline.compile_source(target, source, warps=4, stages=3).spilled == 0
