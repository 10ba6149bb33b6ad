"""Dropout whose masks are a pure function of a key per row, so that they do not depend on how a
batch is split.

A 32-bit integer hash decides about each element: the same bits on every device, eager or compiled.
The mixer is Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/). int32 products wrap
around; where a right shift must be logical, its sign bits are masked off.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - 2**32
_GOLDEN = 0x9E3779B9 - 2**32


def _mix(x: Tensor) -> Tensor:
    """Scrambles each int32; a bijection."""
    x = x ^ (_shift(x, 16) & 0xFFFF)
    x = x * _MIX_1
    x = x ^ (_shift(x, 15) & 0x1FFFF)
    x = x * _MIX_2
    return x ^ (_shift(x, 16) & 0xFFFF)


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits, which torch-xla 2.9 takes for a division, and so rounds towards 0."""
    return torch.bitwise_right_shift(x, torch.tensor(bits, dtype=torch.int32))


def split_key(key: Tensor, count: int) -> Tensor:
    """Derives keys for `count` places of use from the key of each row.

    Args:
        key: int32 [B].

    Returns:
        int32 [count, B].
    """
    places = torch.arange(count, dtype=torch.int32, device=key.device)
    return _mix(_mix(key) ^ (places[:, None] * _GOLDEN))


def dropout(x: Tensor, p: float, key: Tensor | None, cells: Tensor | None = None) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1 / (1 - p) (Srivastava et
    al. 2014).

    Args:
        x: [B, ...], at most 2**31 elements a row.
        p: in [0, 1), rounded to a multiple of 2**-32.
        key: int32 [B], from `split_key`; row b's mask depends on key[b] and the position in the row
            only. None: no dropout.
        cells: int [B, P], where x is [B, P, D], taken from these cells of a larger [B, S, D]: each
            element is treated as it would have been there. None: x is whole.
    """
    threshold = round(p * 2**32) - 2**31
    if key is None or threshold == -(2**31):
        return x
    if cells is None:
        place = torch.arange(x.shape[1:].numel(), dtype=torch.int32, device=x.device)
    else:
        width = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        place = (cells.int()[..., None] * x.shape[-1] + width).flatten(1)
    # Places are hashed once for all rows; with both inputs well mixed, half the mixer does for each
    # element: the comparison looks at the high bits first, which the last product leaves best
    # mixed.
    bits = _mix(place) ^ key[:, None]
    bits *= _MIX_1
    bits ^= _shift(bits, 15).bitwise_and_(0x1FFFF)
    bits *= _MIX_2
    # 1 where bits >= threshold, else 0, by arithmetic: comparisons and masked_fill are several
    # times slower on CPUs.
    keep = bits.clamp_(threshold - 1, threshold).sub_(threshold - 1)
    return (x * keep.view(x.shape).to(x.dtype)).mul_(1 / (1 - p))
