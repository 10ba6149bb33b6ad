"""Initial weights as a pure function of (seed, parameter name, element index).

Each process computes only its own partition, with the same values at any world size.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from samestep.hashing import combine, name_key, uniform

# Elements at a time: bounds the memory of the 64-bit intermediates, and keeps them in the cache.
_BLOCK = 2**18


def initial_values(
    name: str, start: int, stop: int, *, seed: int, std: float, bound: float = 2.0
) -> Tensor:
    """Elements [start, stop) of a flattened parameter: fp32 [stop - start].

    Biases are 0 and norm weights 1. Other parameters are normally distributed with standard
    deviation `std`, truncated at `bound` standard deviations: 2 in BERT
    (`truncated_normal_initializer`).
    """
    module, _, kind = name.rpartition(".")
    if kind.endswith("bias"):  # "query_bias", too
        return torch.zeros(stop - start)
    if module.endswith("norm"):
        return torch.ones(stop - start)
    values = torch.empty(stop - start)
    inside = math.erf(bound / math.sqrt(2))
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        u = torch.from_numpy(uniform(combine(seed, name_key(name), np.arange(first, last))))
        # Inverse transform sampling in fp64: rounding to fp32 hides differences between libraries
        # in the last bits.
        values[first - start : last - start] = torch.erfinv((2 * u - 1) * inside) * (
            math.sqrt(2) * std
        )
    return values
