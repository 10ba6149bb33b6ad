"""Where heads attend: the previous and the next token, special tokens, the same token elsewhere.

As in Clark et al. 2019, "What does BERT look at?", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.table import Table

from data_pipeline.format.shards import Tokens

NAMES = ("previous", "next", "itself", "first special", "last special", "same token")
"""The patterns: neighbors, the position itself, [CLS], [SEP], and equal tokens elsewhere."""

_MOSTLY = 0.5  # a head follows a pattern if so much of its attention is there

_Bools = npt.NDArray[np.bool_]
_Floats = npt.NDArray[np.float64]


class Patterns:
    """The mean attention of each head to the positions of each pattern.

    The mean is over all tokens of all texts that are not special. Texts without such tokens are
    skipped.

    Args:
        layers, heads: L, H, of the arrays to come.
        before, after: number of special tokens at the beginning and at the end of a text.
        sees_all: whether tokens attend to later ones.
    """

    def __init__(self, layers: int, heads: int, before: int, after: int, sees_all: bool) -> None:
        self._before, self._after, self._sees_all = before, after, sees_all
        self._sums = np.zeros((len(NAMES), layers, heads))
        self._uniform = np.zeros(len(NAMES))
        self._count = 0

    def add(self, attention: npt.NDArray[np.float32], tokens: Tokens) -> None:
        """Adds a text.

        Args:
            attention: probabilities [L, H, S, S], for queries and keys.
            tokens: [S], special ones included.
        """
        length = len(tokens)
        queries = slice(self._before, length - self._after)
        masks = self._masks(tokens)[:, queries]
        visible = np.ones((length, length), dtype=bool)
        if not self._sees_all:
            visible = np.tril(visible)
        shares = masks / visible[queries].sum(-1, keepdims=True)
        self._sums += np.einsum("lhqk,pqk->plh", attention[:, :, queries], masks, dtype=np.float64)
        self._uniform += (shares * visible[queries]).sum((1, 2))
        self._count += masks.shape[1]

    @property
    def heads(self) -> _Floats:
        """The mean attention of each head: [patterns, L, H]."""
        return self._sums / max(1, self._count)

    @property
    def uniform(self) -> _Floats:
        """The values of a head that attends to all visible positions alike: [patterns]."""
        return self._uniform / max(1, self._count)

    def table(self, layers: Sequence[int]) -> Table:
        """The mean of each layer in percent, and its highest head; then two lines for all heads.

        Args:
            layers: their numbers.
        """
        table = Table("layer", *NAMES)
        for number, of_layer in zip(layers, self.heads.swapaxes(0, 1), strict=True):
            texts = (f"{100 * each.mean():.0f} ({100 * each.max():.0f})" for each in of_layer)
            table.add_row(str(number), *texts)
        table.add_section()
        table.add_row("uniform", *(f"{100 * share:.0f}" for share in self.uniform))
        followed = (self.heads > _MOSTLY).sum((1, 2))
        count = self.heads[0].size
        table.add_row("heads above 50", *(f"{number} of {count}" for number in followed))
        return table

    def _masks(self, tokens: Tokens) -> _Bools:
        """Which positions belong to each pattern, for each query: [patterns, S, S]."""
        place = np.arange(len(tokens))
        distance = place - place[:, None]
        first = np.broadcast_to(place < self._before, distance.shape)
        last = np.broadcast_to(place >= len(tokens) - self._after, distance.shape)
        same = (tokens == tokens[:, None]) & (distance != 0)
        return np.stack([distance == -1, distance == 1, distance == 0, first, last, same])
