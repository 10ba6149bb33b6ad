"""Exact search: the vectors with the highest products with each query, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import SamestepError

Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]
Blocks: TypeAlias = Iterator[tuple[int, Tensor]]
"""The number of the first row, and fp32 [N, D], in ascending order."""

_BLOCK = 4096
_WIDE = 1 << 24  # numbers of a block: 64 MB


def block_of(width: int) -> int:
    """The number of documents, with vectors of `width` numbers, that are compared at a time.

    4096 up to a width of 4096, and 549 of BERT's vocabulary of 30,522.
    """
    return max(1, min(_BLOCK, _WIDE // width))


def comparable(similarity: str, queries: Tensor, blocks: Blocks) -> tuple[Tensor, Blocks]:
    """Vectors with products that are the similarities of the given ones."""
    if similarity == "dot":
        return queries, blocks
    return F.normalize(queries), ((first, F.normalize(block)) for first, block in blocks)


def nearest(
    similarity: str, queries: Tensor, blocks: Blocks, names: Sequence[str], k: int
) -> list[list[str]]:
    """The names of the k rows that are most similar to each query; see `top`."""
    _, rows = top(*comparable(similarity, queries, blocks), k)
    return [[names[row] for row in of_query] for of_query in rows]


def top(queries: Tensor, blocks: Blocks, k: int) -> tuple[Float32, Int64]:
    """Finds the k rows with the highest products with each query.

    Of rows with equal products, the earlier one counts as higher, whatever the blocks.

    Args:
        queries: fp32 [Q, D], on the device that computes.

    Returns:
        The products [Q, k] and the rows [Q, k], from the highest on; fewer than k if there are
        fewer rows.

    Raises:
        SamestepError: a product is not finite.
    """
    best = torch.empty(len(queries), 0)
    rows = torch.empty(len(queries), 0, dtype=torch.int64)
    for first, block in blocks:
        products, places = _highest(queries @ block.to(queries.device).T, k)
        best = torch.cat((best, products.cpu()), 1)
        rows = torch.cat((rows, places.cpu() + first), 1)
        # Rows ascend among equal products, before and in the block, so a stable sort keeps that.
        order = best.argsort(dim=1, descending=True, stable=True)[:, :k]
        # So k candidates for each query are held, whatever the number of blocks.
        best, rows = best.gather(1, order), rows.gather(1, order)
    # NaN sorts as the highest number, so one anywhere in a row is found here.
    if not best.isfinite().all():
        raise SamestepError(
            "a similarity of two vectors is not finite, so the weights are useless. Use an earlier "
            "checkpoint; of a run, lower optimizer.lr."
        )
    return best.numpy(), rows.numpy()


def _highest(products: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row of [Q, N] and their places; the first places of equal ones."""
    k = min(k, products.shape[1])
    values, places = products.topk(k)
    # torch.topk takes any of those that equal the lowest one; a stable sort takes the first.
    # For k = 2 of 3 1 1, three products are at least 1, so the row is sorted again.
    tied = ((products >= values[:, -1:]).sum(1) > k).nonzero()[:, 0]
    if len(tied):
        again = products[tied].sort(dim=1, descending=True, stable=True)
        values[tied], places[tied] = again.values[:, :k], again.indices[:, :k]
    # Sorted by place first: the stable sort by value then keeps equal products in that order.
    order = places.argsort(1)
    values, places = values.gather(1, order), places.gather(1, order)
    order = values.argsort(dim=1, descending=True, stable=True)
    return values.gather(1, order), places.gather(1, order)
