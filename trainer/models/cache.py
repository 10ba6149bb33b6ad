"""The key-value cache of a decoder, which then computes each new token alone."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Memory(NamedTuple):
    """The source that a decoder attends to.

    Attributes:
        hidden: [B, S, D], the encoder's output.
        mask: bool, True where attention is allowed; broadcasts to [B, 1, T, S]. None: everywhere.
    """

    hidden: Tensor
    mask: Tensor | None


class LayerCache:
    """The keys and values of one layer.

    Attributes:
        length: number of cached positions.
        memory: keys and values of the encoder's output, [B, H, S, K] each; None until the first
            call.
    """

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self.memory: tuple[Tensor, Tensor] | None = None
        self._capacity = capacity
        self._pair: tuple[Tensor, Tensor] | None = None  # keys and values, [B, H, capacity, K]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends positions, [B, H, S, K] each; returns all keys and values so far."""
        if self._pair is None:
            # The memory is allocated once: growing it by concatenation would copy it every step.
            shape = (*key.shape[:2], self._capacity, key.shape[3])
            self._pair = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._pair
        end = self.length + key.shape[2]
        assert end <= self._capacity, f"the cache has room for {self._capacity} positions"
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def select(self, rows: Tensor, sources: Tensor | slice) -> None:
        """See `Cache.select`."""
        if self._pair is not None:
            keys, values = self._pair
            self._pair = (self._selected(keys, rows), self._selected(values, rows))
        if self.memory is not None:
            keys, values = self.memory
            self.memory = (keys[sources], values[sources])

    def _selected(self, cached: Tensor, rows: Tensor) -> Tensor:
        """Copies the filled positions of these rows."""
        selected = cached.new_empty(len(rows), *cached.shape[1:])
        selected[:, :, : self.length] = cached[:, :, : self.length].index_select(0, rows)
        return selected


class Cache:
    """The state of B unfinished sequences: made by a model's `start`, extended by its `step`.

    Attributes:
        layers: the caches of the layers.
        is_text: bool [B, capacity], False in the padding at the left of a sequence.
        memory: the encoder's output, if there is one.
    """

    def __init__(
        self, layers: int, capacity: int, is_text: Tensor, memory: Memory | None = None
    ) -> None:
        """Makes an empty cache for `capacity` positions; is_text: bool [B, S] of the first S."""
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self.is_text = F.pad(is_text, (0, capacity - is_text.shape[1]), value=True)
        self.memory = memory

    @property
    def length(self) -> int:
        """Number of cached positions, the same in all sequences."""
        return self.layers[0].length

    def mask(self) -> Tensor:
        """The positions that the next token attends to: bool [B, 1, 1, length + 1]."""
        return self.is_text[:, None, None, : self.length + 1]

    def positions(self) -> Tensor:
        """The position of the next token in each sequence, without padding: int64 [B]."""
        return self.is_text[:, : self.length].sum(1)

    def select(self, rows: Tensor, sources: Tensor | slice | None = None) -> None:
        """Continues with some rows; a row may be repeated or dropped.

        Args:
            rows: int64 [B'], rows of the decoder.
            sources: rows of the encoder, int64 [B''], or `slice(None)` to keep all. B' is a
                multiple of B'': each source serves B' / B'' consecutive rows, which share its keys
                and values. None: one source per row.
        """
        sources = rows if sources is None else sources
        for layer in self.layers:
            layer.select(rows, sources)
        self.is_text = self.is_text[rows]
        if self.memory is not None:
            hidden, mask = self.memory
            self.memory = Memory(hidden[sources], None if mask is None else mask[sources])
