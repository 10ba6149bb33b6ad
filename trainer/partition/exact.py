"""Sums whose bits depend neither on the order nor on the grouping of their terms.

Floating-point addition rounds, so (a + b) + c and a + (b + c) differ in the last bits, and with
them the sums of one process and of two. Here each term is first rounded to two words, multiples of
two powers of two:

    term = high + low + (a rounding error of at most half a step of low)

The steps are so large that the sum of all high words has at most 53 bits, and so has the sum of
all low words. fp64 holds each partial sum without rounding then, in any order, in a tensor's sum or
in an all-reduce. (Demmel and Nguyen 2015, "Parallel Reproducible Summation", choose such steps for
each block of terms; these depend on a bound of the terms only.)

Example: with at most 4 terms of at most 1, a word has 51 bits. The steps are 2^-51 and 2^-102.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRADIENT_BOUND = 2.0**16
"""The largest magnitude of a gradient's element in a unit. Larger ones become NaN."""
MOST_UNITS = 2**13
"""The most units of a step. With it, gradients are rounded to multiples of 2^-64, 5e-20."""

METRIC_BOUND, MOST_METRICS = 2.0**40, 2**20
"""Like these, of losses and their weights, which are rounded to multiples of 2^-26, 1.5e-8."""

_BITS = 53  # of fp64's mantissa


def split(x: Tensor, bound: Tensor | float, terms: int) -> Tensor:
    """Rounds the terms of a sum to words, which can be added in any order.

    Args:
        x: the terms, any shape.
        bound: a power of two that no term exceeds in magnitude; one that does becomes NaN.
        terms: the largest number of terms of the sum, over all processes.

    Returns:
        fp64 [2, *x.shape], high and low words; see `total`.
    """
    # `terms` numbers of at most 2^bits steps have a sum of at most 2^53 steps.
    bits = _BITS - max(0, terms - 1).bit_length()
    high_step = bound * 2.0**-bits
    low_step = high_step * 2.0**-bits
    words = torch.empty(2, *x.shape, dtype=torch.float64, device=x.device)
    high, low = words
    low.copy_(x)
    low.masked_fill_(~(low.abs() <= bound), torch.nan)
    # Scaling by powers of two and the difference are exact; only `round_` rounds.
    torch.div(low, high_step, out=high).round_().mul_(high_step)
    low.sub_(high).div_(low_step).round_().mul_(low_step)
    return words


def total(words: Tensor | Sequence[Tensor]) -> Tensor:
    """The sums from words that have been added up: [2, ...] -> [...], fp64."""
    # The last summand makes 0 of -0, which sums of different grouping may be.
    return words[0] + words[1] + 0.0


def bound_of(largest: Tensor) -> Tensor:
    """The smallest power of two above each magnitude, fp64; 1 for 0, infinity and NaN."""
    largest = largest.double()
    _, exponent = torch.frexp(largest)
    usable = (largest > 0) & largest.isfinite()
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


def split_gradient(gradient: Tensor) -> Tensor:
    """The words of a unit's gradient; see `split`."""
    return split(gradient, GRADIENT_BOUND, MOST_UNITS)


def split_metric(values: Tensor) -> Tensor:
    """The words of a unit's losses or weights; see `split`."""
    return split(values, METRIC_BOUND, MOST_METRICS)
