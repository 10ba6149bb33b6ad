"""Differences between arms, paired by seed, with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.studies.row_scores import Floats, RowScore

_SAMPLES = 1000  # of the bootstrap over rows
_CONFIDENCE = 0.975  # quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: of the values; NaN if one of them is.
        deviation: their standard deviation; None for one seed, or a mean of NaN.
        low, high: 95 % interval of the mean; None in the same cases.
    """

    mean: float
    deviation: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether neither seeds nor held-out rows change it, as the size of a model."""
        return self.low is not None and self.low == self.high

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval is on one side of zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def estimate(values: Sequence[float], rows_variance: float = 0.0) -> Estimate:
    """Returns the mean over seeds and its interval.

    Two things vary: the seeds, and the held-out rows that happened to be chosen. Their variances
    add up. The quantile is Student's (1908), with the degrees of freedom of Satterthwaite (1946):
    the variance over a few seeds is uncertain, the one over rows hardly. The interval is at least
    as wide as the seeds alone make it. A bootstrap over seeds would be too narrow: with three, it
    excludes zero whenever the three have the same sign, which happens by chance in one of four
    cases.

    Args:
        values: one for each seed.
        rows_variance: of the mean, over samples of held-out rows.
    """
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2 or math.isnan(mean):
        return Estimate(mean)
    # Of equal values it is 0, which sums of floats can miss: 1.7e-17 for three times 0.1.
    deviation = float(np.std(values, ddof=1)) if len(set(values)) > 1 else 0.0
    of_seeds = deviation**2 / count
    total = of_seeds + rows_variance
    if not total:  # all seeds agree to the last bit
        return Estimate(mean, deviation, mean, mean)
    half = _quantile(of_seeds, total, count) * math.sqrt(total)
    # Alone, this interval would exclude the true mean in up to 8 % of studies of 3 seeds whose
    # rows vary less than their seeds, as more degrees of freedom make it narrower.
    seeds_alone = _quantile(of_seeds, of_seeds, count) * math.sqrt(of_seeds)
    half = max(half, seeds_alone)
    return Estimate(mean, deviation, mean - half, mean + half)


def _quantile(of_seeds: float, total: float, count: int) -> float:
    from scipy.stats import norm, t

    if not of_seeds:
        return float(norm.ppf(_CONFIDENCE))
    # Example: 3 seeds and no variance over rows leave 2 degrees of freedom, a quantile of 4.30.
    return float(t.ppf(_CONFIDENCE, (count - 1) * (total / of_seeds) ** 2))


def rows_variance(pairs: Sequence[tuple[RowScore, RowScore | None]]) -> float:
    """Variance, over samples of held-out rows, of the mean difference between two arms.

    By the bootstrap (Efron 1979): all seeds and both arms get the same samples of rows, since they
    were scored on the same rows.

    Args:
        pairs: for each seed, the score of an arm and of the arm to subtract, or None.
    """
    count = len(pairs[0][0].rows)
    generator = np.random.Generator(np.random.PCG64(0))
    weights: Floats = generator.multinomial(count, np.full(count, 1 / count), _SAMPLES).astype(
        float
    )
    means = np.zeros(_SAMPLES)
    for one, other in pairs:
        means += one.resampled(weights)
        if other is not None:
            means -= other.resampled(weights)
    return float(np.var(means / len(pairs), ddof=1))


def unpaired_deviation(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Standard deviation of a difference between two arms if their seeds had nothing in common.

    Returns:
        The root of the sum of both variances; None for a single seed.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    return math.sqrt(float(np.var(ours, ddof=1)) + float(np.var(theirs, ddof=1)))


@dataclass(frozen=True)
class Share:
    """How many of a number of cases, with the 95 % interval of Clopper and Pearson (1934)."""

    count: int
    cases: int
    low: float
    high: float


def share(found: Sequence[bool]) -> Share:
    """Returns the share of the cases that are true."""
    from scipy.stats import binomtest

    interval = binomtest(sum(found), len(found)).proportion_ci(2 * _CONFIDENCE - 1)
    return Share(sum(found), len(found), float(interval.low), float(interval.high))


def detectable(deviation: float, seeds: int) -> float:
    """Smallest true difference that a study finds in 80 of 100 cases, at a level of 5 %.

    Args:
        deviation: standard deviation of the paired difference over seeds.
        seeds: number of pairs.
    """
    from scipy.stats import nct, t

    critical = t.ppf(_CONFIDENCE, seeds - 1)

    def power(noncentrality: float) -> float:
        return float(1 - nct.cdf(critical, seeds - 1, noncentrality))

    low, high = 0.0, 1.0
    while power(high) < 0.8:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < 0.8 else (low, middle)
    return high * deviation / math.sqrt(seeds)
