"""When attention is left to `scaled_dot_product_attention`.

The kernel itself needs XLA and is in tests/xla.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.strategies.xla import flash


def tensors(positions: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, positions, 8, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("positions", "dtype"), [(100, torch.bfloat16), (128, torch.float32)])
def test_other_lengths_and_precisions_are_masked_by_segments(
    positions: int, dtype: torch.dtype, causal: bool
) -> None:
    query, key, value = tensors(positions, dtype)
    segments = (torch.arange(positions) // 40).expand(2, positions).int()
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    mask = mask.tril() if causal else mask
    found = flash.FlashAttention(0, 1)(
        query, key, value, attn_mask=segments, is_causal=causal, scale=0.5
    )
    assert torch.equal(
        found, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5)
    )


def test_masks_of_scores_are_left_as_they_are() -> None:
    query, key, value = tensors(128, torch.bfloat16)
    bias = torch.randn(1, 3, 128, 128).bfloat16()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    assert torch.equal(flash.FlashAttention(0, 1)(query, key, value, attn_mask=bias), expected)
    allowed = bias > 0
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    assert torch.equal(flash.FlashAttention(0, 1)(query, key, value, attn_mask=allowed), expected)


def test_it_takes_a_tpu_and_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    tpu, cpu = (SimpleNamespace(platform=name) for name in ("tpu", "cpu"))
    monkeypatch.setattr(flash, "version_of", {"jax": "0.7.1"}.get)
    assert flash.usable(tpu)  # type: ignore[arg-type]
    assert not flash.usable(cpu)  # type: ignore[arg-type]
    monkeypatch.setattr(flash, "version_of", {}.get)
    assert not flash.usable(tpu)  # type: ignore[arg-type]
