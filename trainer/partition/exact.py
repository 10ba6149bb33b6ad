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

from trainer.accelerators import kernels

GRADIENT_BOUND = 2.0**16
"""The largest magnitude of a gradient's element in a unit. With a larger one, its block is NaN."""
MOST_UNITS = 2**13
"""The most units of a step. With it, gradients are rounded to multiples of 2^-64, 5e-20."""

METRIC_BOUND, MOST_METRICS = 2.0**40, 2**20
"""The same limits of losses and their weights, rounded to multiples of 2^-26, 1.5e-8."""

_BITS = 53  # of fp64's mantissa
_NEAR = 1.5 * 2.0**52


def split(x: Tensor, bound: Tensor | float, terms: int) -> Tensor:
    """Rounds the terms of a sum to words, which can be added in any order.

    Args:
        x: the terms, any shape.
        bound: a power of two that no term exceeds in magnitude. If one does, or is not finite, all
            words are NaN.
        terms: the largest number of terms of the sum, over all processes.

    Returns:
        fp64 [2, *x.shape], high and low words; see `total`.
    """
    # `terms` numbers of at most 2^bits steps have a sum of at most 2^53 steps.
    bits = _BITS - max(2, (terms - 1).bit_length())
    words = torch.empty(2, *x.shape, dtype=torch.float64, device=x.device)
    if not x.numel():
        return words
    high, low = words
    # Near 1.5 * 2^52 steps, the numbers of fp64 are the multiples of a step. So adding that and
    # subtracting it again rounds to a step, and only the first addition rounds.
    step = 2.0**-bits
    # Filled in on the device: a copy of a number from the host would wait for the device.
    near = bound * step * _NEAR
    to_high = near if isinstance(near, Tensor) else low.new_full((), near)
    low.copy_(x)
    to_high = torch.where(largest(low) <= bound, to_high, torch.nan)
    torch.add(low, to_high, out=high).sub_(to_high)
    low.sub_(high).add_(to_high * step).sub_(to_high * step)
    return words


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor's elements; 0 if it has none."""
    return torch.maximum(x.amax(), -x.amin()) if x.numel() else x.new_zeros(())


def blocks(x: Tensor) -> Sequence[Tensor]:
    """A tensor's elements in flat blocks, whose words fit into a CPU's cache."""
    return torch.split(x.reshape(-1), kernels.block_size(x.device) or max(1, x.numel()))


def add_gradient(sums: Tensor, gradient: Tensor) -> None:
    """Adds a unit's gradient to sums of words, fp64 [2, *gradient.shape], in place."""
    high, low = map(blocks, sums)
    for each, to_high, to_low in zip(blocks(gradient), high, low, strict=True):
        words = split(each, GRADIENT_BOUND, MOST_UNITS)
        to_high.add_(words[0])
        to_low.add_(words[1])


def add_squares(x: Tensor, bound: Tensor, terms: int) -> Tensor:
    """Words of the sum of squares of a tensor's elements: fp64 [2].

    Args:
        bound, terms: of the squares; see `split`.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=x.device)
    for each in blocks(x):
        sums += split(each.double().square_(), bound, terms).sum(1)
    return sums


def total(words: Tensor | Sequence[Tensor]) -> Tensor:
    """The sums from words that have been added up: [2, ...] -> [...], fp64."""
    # The last summand makes 0 of -0, which sums of different grouping may be.
    return words[0] + words[1] + 0.0


def bound_of(magnitudes: Tensor) -> Tensor:
    """The smallest power of two above each magnitude, fp64; 1 for 0, infinity and NaN."""
    magnitudes = magnitudes.double()
    _, exponent = torch.frexp(magnitudes)
    usable = (magnitudes > 0) & magnitudes.isfinite()
    return torch.where(usable, torch.ldexp(torch.ones_like(magnitudes), exponent), 1.0)


def split_metric(values: Tensor) -> Tensor:
    """The words of a unit's losses or weights; see `split`."""
    return split(values, METRIC_BOUND, MOST_METRICS)
