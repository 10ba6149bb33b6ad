"""The choice between fused and unfused attention at the start of a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.test_contract import BERT, SHAPE, meta
from tests.unit.models.test_fused_attention import attention
from trainer.accelerators.kinds import cpu
from trainer.models.config import TransformerConfig
from trainer.models.families import deberta
from trainer.training.compute.fused_attention import fuse_attention, largest_error


class WithKernel(cpu.CpuAccelerator):
    """A device with a kernel."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel

    def fused_attention(self, width: int, dtype: torch.dtype) -> Any:
        return self.kernel


def wrong_dropout(*args: Any, **settings: Any) -> Tensor:
    return attention(*args, **{**settings, "dropout_key": settings["dropout_key"] + 1})


def without_direction(*args: Any, **settings: Any) -> Tensor:
    return attention(*args, **{**settings, "causal": False})


def without_segments(*args: Any, **settings: Any) -> Tensor:
    return attention(*args, **{**settings, "segments": None})


def without_window(*args: Any, **settings: Any) -> Tensor:
    return attention(*args, **{**settings, "window": None})


def without_prefix(*args: Any, **settings: Any) -> Tensor:
    return attention(*args, **{**settings, "prefix": None})


def without_gradient_of_the_bias(*args: Any, **settings: Any) -> Tensor:
    if settings["bias"] is None:
        return attention(*args, **settings)
    detached = settings["bias"].detach() + 0 * settings["bias"]
    return attention(*args, **{**settings, "bias": detached})


def not_a_number(*args: Any, **settings: Any) -> Tensor:
    return attention(*args, **settings) * torch.nan


def broken(*args: Any, **settings: Any) -> Tensor:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    "kernel",
    [
        wrong_dropout,
        without_direction,
        without_segments,
        without_window,
        without_prefix,
        without_gradient_of_the_bias,
        not_a_number,
    ],
)
def test_finds_what_a_kernel_does_wrong(kernel: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert largest_error(attention, 64, torch.device("cpu"), dtype) < 2e-2
        assert largest_error(kernel, 64, torch.device("cpu"), dtype) > 0.1


@pytest.mark.parametrize(
    ("config", "kernel", "said"),
    [
        (BERT, attention, "fused, differs from unfused by"),
        (BERT, wrong_dropout, "unfused: the kernel's results differ by"),
        (BERT, broken, "unfused: the kernel does not run here: no such instruction"),
        (BERT, None, ""),
        (
            deberta.Config(**SHAPE, max_positions=24),
            attention,
            "unfused, as this model has another kind of attention",
        ),
    ],
    ids=["right", "wrong", "broken", "none", "another kind"],
)
def test_uses_a_kernel_that_is_right(
    config: TransformerConfig, kernel: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = meta(config)
    with caplog.at_level(logging.INFO):
        fuse_attention(model, WithKernel(kernel), "fp32")
    assert said in caplog.text
    assert model.fuses_attention == said.startswith("fused")
