"""What a decoder keeps of the tokens so far, so that it computes each new one alone."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Memory(NamedTuple):
    """What a decoder attends to besides its own cells.

    Attributes:
        hidden: [B, S, D], the encoder's output.
        mask: bool, broadcasts to [B, 1, T, S]: which of its cells each cell of the decoder may
            attend to; None: all.
    """

    hidden: Tensor
    mask: Tensor | None


class LayerCache:
    """The keys and values of one layer.

    Attributes:
        length: cells so far.
        memory: keys and values of the encoder's output, [B, H, S, K] each; None until they are
            first needed.
    """

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self.memory: tuple[Tensor, Tensor] | None = None
        self._capacity = capacity
        self._cells: tuple[Tensor, Tensor] | None = None  # keys and values, [B, H, capacity, K]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds cells, [B, H, S, K]; returns the keys and values of all so far."""
        if self._cells is None:
            shape = (*key.shape[:2], self._capacity, key.shape[3])
            self._cells = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._cells
        end = self.length + key.shape[2]
        assert end <= self._capacity, f"the cache has room for {self._capacity} cells"
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def select(self, rows: Tensor, sources: Tensor | slice) -> None:
        """As `Cache.select`."""
        if self._cells is not None:
            keys, values = self._cells
            self._cells = (self._selected(keys, rows), self._selected(values, rows))
        if self.memory is not None:
            keys, values = self.memory
            self.memory = (keys[sources], values[sources])

    def _selected(self, cells: Tensor, rows: Tensor) -> Tensor:
        """Copies what is filled, of these rows."""
        selected = cells.new_empty(len(rows), *cells.shape[1:])
        selected[:, :, : self.length] = cells[:, :, : self.length].index_select(0, rows)
        return selected


class Cache:
    """What a model keeps of B unfinished sequences: made by its `start`, grown by its `step`.

    Attributes:
        layers: the caches of its layers.
        is_text: bool [B, capacity], False in the padding before a sequence.
        memory: the encoder's output, if there is one.
    """

    def __init__(
        self, layers: int, capacity: int, is_text: Tensor, memory: Memory | None = None
    ) -> None:
        """Makes an empty cache for `capacity` cells.

        Is_text: bool [B, S], of those that come first.
        """
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self.is_text = F.pad(is_text, (0, capacity - is_text.shape[1]), value=True)
        self.memory = memory

    @property
    def length(self) -> int:
        """Cells so far, the same in all sequences."""
        return self.layers[0].length

    def mask(self) -> Tensor:
        """Which cells the next token attends to: bool [B, 1, 1, length + 1]."""
        return self.is_text[:, None, None, : self.length + 1]

    def positions(self) -> Tensor:
        """Those of the next tokens: int64 [B]."""
        return self.is_text[:, : self.length].sum(1)

    def select(self, rows: Tensor, sources: Tensor | slice | None = None) -> None:
        """Goes on with some rows, perhaps several times with one and with others not at all.

        Args:
            rows: int64 [B'], of the decoder.
            sources: of the encoder, int64 [B''] or `slice(None)` for all as they are, where B' is a
                multiple of B'': each has as many rows, one after the other, which share its keys
                and values. None: one row each.
        """
        sources = rows if sources is None else sources
        for layer in self.layers:
            layer.select(rows, sources)
        self.is_text = self.is_text[rows]
        if self.memory is not None:
            hidden, mask = self.memory
            self.memory = Memory(hidden[sources], None if mask is None else mask[sources])
