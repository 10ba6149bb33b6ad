"""Dropout with masks that are a pure function of a key per row.

So masks do not depend on how a batch is split over devices. A 32-bit integer hash decides each
element, with the same bits on every device, eager or compiled. The mixer is Wellons' lowbias32
(https://nullprogram.com/blog/2018/07/31/). int32 products wrap around; logical right shifts mask
off the sign bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.accelerators.kernels import numbers

_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
_COLUMN = _GOLDEN * _MIX_1 % 2**32 - 2**32  # the product of both


def mix(x: Tensor) -> Tensor:
    """Scrambles each int32; a bijection."""
    x = x ^ (_shift(x, 16) & 0xFFFF)
    x = x * _MIX_1
    x = x ^ (_shift(x, 15) & 0x1FFFF)
    x = x * _MIX_2
    return x ^ (_shift(x, 16) & 0xFFFF)


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits; torch-xla 2.9 computes the operator as a division that rounds towards 0."""
    # A number instead of a tensor would be 64 bits wide in its scanned layers, which XLA rejects.
    return torch.bitwise_right_shift(x, torch.tensor(bits, dtype=torch.int32))


def split_key(key: Tensor, count: int) -> Tensor:
    """Derives `count` keys from the key of each row.

    Args:
        key: int32 [B].

    Returns:
        int32 [count, B].
    """
    places = torch.arange(count, dtype=torch.int32, device=key.device)
    return mix(mix(key) ^ (places[:, None] * _GOLDEN))


def dropout(x: Tensor, p: float, key: Tensor | None, positions: Tensor | None = None) -> Tensor:
    """Zeroes elements with probability p and scales the others (Srivastava et al. 2014).

    Args:
        x: [B, ...], at most 2**31 elements per row.
        p: in [0, 1), rounded to a multiple of 2**-32.
        key: int32 [B], from `split_key`; the mask of row b depends only on key[b] and the index in
            the row. None: no dropout.
        positions: int [B, P], if x is [B, P, D] selected from a larger [B, S, D]: elements get the
            mask they would have there. None: x is whole.
    """
    if key is None or _threshold(p) == -(2**31):
        return x
    if positions is None:
        place = numbers(x.shape[1:].numel(), x.device)
    else:
        width = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        place = (positions.int()[..., None] * x.shape[-1] + width).flatten(1)
    # Indices are hashed once for all rows. Both inputs are then well mixed, so half the mixer is
    # enough per element: the comparison depends mostly on the high bits, which the last product
    # mixes best.
    bits = mix(place) ^ key[:, None]
    bits *= _MIX_1
    return _drop(x, p, bits)


def attention_dropout(x: Tensor, p: float, key: Tensor | None, version: int = 2) -> Tensor:
    """Like `dropout`, with other masks, which a kernel computes in half as many operations.

    Elements of a row of x differ only in the column, so all but the last steps of the hash are
    done once a row, in place of once an element.

    Args:
        x: [B, H, T, S], attention probabilities.
        p, key: see `dropout`.
        version: 1 for the masks of `dropout`, which older runs have.
    """
    if version == 1:
        return dropout(x, p, key)
    if key is None or _threshold(p) == -(2**31):
        return x
    rows = torch.arange(x.shape[1:3].numel(), dtype=torch.int32, device=x.device)
    columns = torch.arange(x.shape[3], dtype=torch.int32, device=x.device)
    # The mixer's second half, of row + golden * column. Its first product is part of _COLUMN; the
    # numbers of rows do not need it, as they are mixed already.
    of_rows = mix(mix(rows) ^ key[:, None]).view(*x.shape[:3], 1)
    return _drop(x, p, of_rows + columns * _COLUMN)


def _threshold(p: float) -> int:
    """Elements with fewer bits, as an int32, are dropped."""
    return round(p * 2**32) - 2**31


def _drop(x: Tensor, p: float, bits: Tensor) -> Tensor:
    """Drops elements by int32 bits, of as many elements, which it mixes in place."""
    bits ^= _shift(bits, 15).bitwise_and_(0x1FFFF)
    bits *= _MIX_2
    threshold = _threshold(p)
    # 1 if bits >= threshold, else 0, computed by arithmetic: comparisons and masked_fill are
    # several times slower on CPUs.
    keep = bits.clamp_(threshold - 1, threshold).sub_(threshold - 1)
    return (x * keep.view(x.shape).to(x.dtype)).mul_(1 / (1 - p))
