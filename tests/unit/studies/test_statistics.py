"""Intervals against textbook formulas, and how often they are wrong by chance."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.studies.row_scores import RowScore
from trainer.studies.statistics import (
    detectable,
    estimate,
    rows_variance,
    share,
    unpaired_deviation,
)


def test_without_rows_it_is_the_paired_t_test() -> None:
    from scipy import stats

    one, other = [0.81, 0.84, 0.79, 0.86], [0.80, 0.80, 0.78, 0.83]
    found = estimate([a - b for a, b in zip(one, other, strict=True)])
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.low == pytest.approx(interval.low)
    assert found.high == pytest.approx(interval.high)
    assert not found.excludes_zero


def test_variance_over_rows_has_many_degrees_of_freedom() -> None:
    from scipy import stats

    values = [0.1, 0.2, 0.3]  # variance of the mean: 0.01 / 3
    seeds, both = estimate(values), estimate(values, rows_variance=0.09 / 3)
    assert seeds.high == pytest.approx(0.2 + stats.t.ppf(0.975, 2) * np.sqrt(0.01 / 3))
    # Satterthwaite: ten times the variance, of which nine parts are known, has 2 * 10^2 degrees.
    assert both.high == pytest.approx(0.2 + stats.t.ppf(0.975, 200) * np.sqrt(0.1 / 3))


def test_variance_over_rows_never_narrows_the_interval() -> None:
    """Twice the variance has 8 degrees of freedom, and 2.31 sqrt(2) is less than 4.30."""
    values = [0.1, 0.2, 0.3]
    assert estimate(values, rows_variance=0.01 / 3) == estimate(values)


def test_one_seed_has_no_interval_and_equal_seeds_an_empty_one() -> None:
    assert estimate([0.5]).low is None
    assert not estimate([0.5]).excludes_zero
    same = estimate([0.0, 0.0, 0.0])
    assert (same.low, same.high, same.excludes_zero) == (0.0, 0.0, False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows_variance", "seeds"),
    [
        *[(0.0, 5), (0.1, 3), (1.0, 2)],
        *(
            pytest.param(variance, seeds, marks=pytest.mark.long)
            for variance, seeds in ((0.0, 2), (0.0, 3), (0.1, 2), (0.1, 5), (1.0, 3), (1.0, 5))
        ),
    ],
)
def test_five_of_a_hundred_intervals_miss_a_true_difference_of_zero(
    seeds: int, rows_variance: float
) -> None:
    """`rows_variance`, of the mean, as a multiple of the seeds'."""
    generator = np.random.Generator(np.random.PCG64(seeds))
    draws = generator.normal(size=(4000, seeds))
    of_rows = rows_variance / seeds
    moved = draws + generator.normal(size=(4000, 1)) * np.sqrt(of_rows)
    wrong = np.mean([estimate(list(values), of_rows).excludes_zero for values in moved])
    # 4000 trials: a standard error of 0.35 %. Where both vary alike, fewer than 5 % are wrong.
    assert (0.025 if rows_variance == 1.0 else 0.035) < wrong < 0.065


def test_bootstrap_over_rows_has_the_binomial_variance() -> None:
    right = (np.arange(400) % 10 < 7).astype(float)  # 70 %
    score = RowScore(np.stack([right, np.ones(400)], 1), lambda sums: sums[..., 0] / sums[..., 1])
    assert rows_variance([(score, None)]) == pytest.approx(0.7 * 0.3 / 400, rel=0.15)
    # The same rows for all seeds: three equal seeds vary as one does. Equal arms do not differ.
    assert rows_variance([(score, None)] * 3) == pytest.approx(0.7 * 0.3 / 400, rel=0.15)
    assert rows_variance([(score, score)] * 3) == 0


def test_a_detectable_difference_is_found_in_80_of_100_studies() -> None:
    smallest = detectable(0.02, seeds=4)
    draws = np.random.Generator(np.random.PCG64(0)).normal(smallest, 0.02, size=(2000, 4))
    found = np.mean([(estimate(list(values)).low or 0) > 0 for values in draws])
    assert found == pytest.approx(0.8, abs=0.03)


def test_pairing_takes_out_what_both_arms_share() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    shared, own = generator.normal(size=2000), generator.normal(size=(2, 2000))
    one, other = shared + 0.1 * own[0], shared + 0.1 * own[1]
    assert unpaired_deviation(list(one), list(other)) == pytest.approx(np.sqrt(2.02), rel=0.05)
    paired = estimate([a - b for a, b in zip(one, other, strict=True)]).deviation
    assert paired == pytest.approx(0.1 * np.sqrt(2), rel=0.05)
    assert unpaired_deviation([0.5], [0.5]) is None


def test_the_interval_of_a_share_is_that_of_the_tables() -> None:
    found = share([True] * 2 + [False] * 38)
    # Clopper and Pearson (1934): 0 of 40 ends at 1 - 0.025^(1/40); 2 of 40 is in tables.
    assert (found.count, found.cases) == (2, 40)
    assert (found.low, found.high) == (
        pytest.approx(0.0061, abs=1e-4),
        pytest.approx(0.1692, abs=1e-4),
    )
    assert share([False] * 40).high == pytest.approx(1 - 0.025 ** (1 / 40))


def test_equal_values_are_exact_and_an_interval_that_is_no_number_excludes_nothing() -> None:
    found = estimate([0.1] * 3)  # whose deviation is 1.7e-17 in floats
    assert found.is_exact
    assert found.deviation == 0
    assert not estimate([0.1, float("nan"), 0.2]).excludes_zero
