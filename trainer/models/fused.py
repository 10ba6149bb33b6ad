"""Attention by a fused kernel, which never holds the scores [T, S] in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys each query attends to, as vectors from which a kernel computes the matrix [T, S].

    Attributes:
        segments: int [B, T], of the queries: these attend to keys of their own segment. Padding is
            a segment like any other. None: there is one segment.
        key_segments: int [B, S]; None: queries and keys are the same positions.
        causal: forbids later positions, except those in `prefix`.
        prefix: bool [B, S]; None: no exceptions.
        window: forbids positions further away in the row; None: there is no window.
    """

    segments: Tensor | None = None
    key_segments: Tensor | None = None
    causal: bool = False
    prefix: Tensor | None = None
    window: int | None = None


class FusedAttention(Protocol):
    """The kernel. A query without any key gives zeros."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        segments: Tensor | None,
        key_segments: Tensor | None,
        causal: bool,
        prefix: Tensor | None,
        window: int | None,
        bias: Tensor | None,
        scale: float,
        dropout: float,
        dropout_key: Tensor | None,
        dropout_version: int,
    ) -> Tensor:
        """Query [B, H, T, K], key and value [B, H, S, K] -> [B, H, T, K].

        Args:
            segments, key_segments, causal, prefix, window: see `Mask`; segments come in pairs.
            bias: float [H, T + S - 1], added to the scores: element j - i + T - 1 to the
                score of query i and key j.
            dropout: rate for probabilities.
            dropout_key: int32 [B]; None: no dropout.
            dropout_version: 1: masks of `models.dropout.dropout`; 2: of `attention_dropout`.
        """
        ...
