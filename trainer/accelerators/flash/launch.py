"""Launches of the attention kernels, from tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from trainer.accelerators.flash.kernels import (
    bias_gradient_kernel,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from trainer.accelerators.flash.ranges import range_kernel
from trainer.accelerators.flash.tiles import Blocks, Plan, choose_plan, generation_of


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the operator `samestep::attention`, and its launches."""

    query: Tensor
    key: Tensor
    value: Tensor
    segments: Tensor | None
    key_segments: Tensor | None
    prefix: Tensor | None
    bias: Tensor | None
    dropout_key: Tensor | None
    causal: bool
    window: int
    scale: float
    dropout: float
    dropout_version: int

    def forward(self, out: Tensor, normalizer: Tensor) -> None:
        """Fills `out` and `normalizer`."""
        blocks = self._plan().forward
        self._launch(
            forward_kernel,
            blocks,
            triton.cdiv(self.query.shape[2], blocks.queries),
            {
                "out": out,
                "normalizer": normalizer,
                "ranges": segment_ranges(self.segments, self.key_segments, blocks.queries),
            },
        )

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        normalizer: Tensor,
        query_grad: Tensor,
        key_grad: Tensor,
        value_grad: Tensor,
        bias_grad: Tensor,
    ) -> None:
        """Fills the gradients; `bias_grad` unless it is empty."""
        batch, heads, queries, _ = self.query.shape
        keys = self.key.shape[2]
        _, of_queries, of_keys = self._plan()
        query_blocks = triton.cdiv(queries, of_queries.queries)
        trains_bias = bias_grad.numel() > 0
        partial = None
        if trains_bias:
            # Blocks of keys that no query of a block may attend to are skipped and stay 0.
            places = triton.cdiv(keys, of_queries.keys) + 1
            shape = (batch, heads, query_blocks, places, of_queries.keys)
            partial = grad.new_zeros(shape, dtype=torch.float32)
        ranges = segment_ranges(self.segments, self.key_segments, of_queries.queries)
        key_ranges = ranges
        if self.segments is not self.key_segments or of_queries.queries != of_keys.keys:
            key_ranges = segment_ranges(self.key_segments, self.segments, of_keys.keys)
        shared: dict[str, Any] = {
            "normalizer": normalizer,
            "grad": grad,
            "delta": torch.empty_like(normalizer),
            "dropout_rows": torch.empty_like(normalizer, dtype=torch.int32),
            **_strides("grad", "bht", grad),
        }
        self._launch(
            query_gradient_kernel,
            of_queries,
            query_blocks,
            shared
            | {"out": out, "query_grad": query_grad, "bias_partial": partial, "ranges": ranges},
            BIAS_GRADIENT=trains_bias,
        )
        self._launch(
            key_gradient_kernel,
            of_keys,
            triton.cdiv(keys, of_keys.keys),
            shared | {"key_grad": key_grad, "value_grad": value_grad, "ranges": key_ranges},
        )
        if trains_bias:
            columns = 64
            grid = (triton.cdiv(queries + keys - 1, columns), heads)
            bias_gradient_kernel[grid](
                partial, bias_grad, batch, heads, queries, keys,
                BLOCK=of_queries.keys, ROWS=16, COLUMNS=columns, num_warps=4,
            )  # fmt: skip

    def _plan(self) -> Plan:
        width, dtype = self.query.shape[-1], self.query.dtype
        return choose_plan(width, dtype, generation_of(self.query.device))

    def _launch(
        self, kernel: Any, blocks: Blocks, programs: int, tensors: dict[str, Any], **options: Any
    ) -> None:
        batch, heads, queries, width = self.query.shape
        # As in `dropout`: the comparison with an int32 keeps a share of 1 - p.
        threshold = round(self.dropout * 2**32) - 2**31
        drops = self.dropout_key is not None and threshold > -(2**31)
        if blocks.registers is not None:
            options["maxnreg"] = blocks.registers
        kernel[(programs * batch * heads,)](
            query=self.query,
            key=self.key,
            value=self.value,
            segments=self.segments,
            key_segments=self.key_segments,
            prefix=self.prefix,
            bias=self.bias,
            dropout_key=self.dropout_key,
            **tensors,
            **_strides("query", "bht", self.query),
            **_strides("key", "bhs", self.key),
            **_strides("value", "bhs", self.value),
            heads=heads,
            queries=queries,
            keys=self.key.shape[2],
            window=self.window,
            scale=self.scale,
            threshold=threshold,
            keep_scale=1 / (1 - self.dropout) if drops else 1.0,
            SEGMENTS=self.segments is not None,
            CAUSAL=self.causal,
            PREFIX=self.prefix is not None,
            LOCAL=self.window >= 0,
            BIAS=self.bias is not None,
            DROPOUT=self.dropout_version if drops else 0,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            PRECISION=_precision(),
            BLOCK_T=blocks.queries,
            BLOCK_S=blocks.keys,
            EVEN_T=queries % blocks.queries == 0,
            EVEN_S=self.key.shape[2] % blocks.keys == 0,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            **options,
        )


def segment_ranges(
    segments: Tensor | None, key_segments: Tensor | None, block: int
) -> Tensor | None:
    """The keys of the segments of each block of queries; see `range_kernel`.

    Args:
        segments: int32 [B, T] of those that the kernel owns, queries or keys.
        key_segments: int32 [B, S] of the others.

    Returns:
        int32 [B, T / block, 4], computed on the device, so the host waits for nothing; None
        without segments.
    """
    if segments is None or key_segments is None:
        return None
    (batch, queries), keys = segments.shape, key_segments.shape[1]
    blocks = triton.cdiv(queries, block)
    ranges = segments.new_empty(batch, blocks, 4)
    step = min(triton.next_power_of_2(keys), 4096)
    range_kernel[(batch * blocks,)](
        segments, key_segments, ranges, queries, keys, BLOCK=block, STEP=step, num_warps=4
    )
    return ranges


def _strides(name: str, dimensions: str, x: Tensor) -> dict[str, int]:
    """Strides of a tensor by the names of the kernels' arguments, without the last one, 1."""
    return {f"{name}_{d}": x.stride(n) for n, d in enumerate(dimensions)}


def _precision() -> str:
    """The precision of fp32 products, which torch.set_float32_matmul_precision chooses."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
