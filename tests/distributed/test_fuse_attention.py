"""Ranks agree on fused attention: all of them use it, or none."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.processes import run_ranks
from tests.unit.models.test_contract import BERT, meta
from tests.unit.models.test_fused_attention import attention
from tests.unit.training.test_fuse_attention import WithKernel, broken, wrong_dropout
from trainer.training.compute.fused_attention import fuse_attention

KERNELS = {"right": attention, "wrong": wrong_dropout, "broken": broken, "none": None}


def fuses(kernels: tuple[str, str]) -> bool:
    dist.init_process_group("gloo")
    model, kernel = meta(BERT), KERNELS[kernels[dist.get_rank()]]
    fuse_attention(model, WithKernel(kernel), "fp32", world_size=2)
    return model.fuses_attention


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (("right", "right"), True),
        (("right", "wrong"), False),
        (("broken", "right"), False),
        (("right", "none"), False),
    ],
)
def test_all_ranks_fuse_or_none(kernels: tuple[str, str], expected: bool) -> None:
    assert run_ranks(2, fuses, kernels) == [expected, expected]
