"""Initial weights as a pure function of (seed, parameter name, element).

Each process makes just its own partition.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trainer.hashing import combine, name_key, uniform

_BLOCK = (
    2**18
)  # elements at a time: bounds the memory of the 64-bit intermediates, and keeps them in cache


def initial_values(
    name: str, start: int, stop: int, *, seed: int, std: float, bound: float = 2.0
) -> Tensor:
    """Elements [start, stop) of a flattened parameter: fp32 [stop - start].

    Biases are 0 and the weights of norms 1. All else is drawn from a normal distribution of
    standard deviation `std` before it is truncated at `bound` of them: two as in BERT
    (`truncated_normal_initializer`), or many.
    """
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(stop - start)
    if module.endswith("norm"):
        return torch.ones(stop - start)
    values = torch.empty(stop - start)
    inside = math.erf(bound / math.sqrt(2))
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        u = torch.from_numpy(uniform(combine(seed, name_key(name), np.arange(first, last))))
        # The inverse of the truncated distribution; in fp64, so that rounding to fp32 hides
        # libraries' last bits.
        values[first - start : last - start] = torch.erfinv((2 * u - 1) * inside) * (
            math.sqrt(2) * std
        )
    return values
