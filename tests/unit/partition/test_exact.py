"""Sums that do not depend on the order or the grouping of their terms."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainer.optim import Structure
from trainer.optim.kinds import adamw
from trainer.partition import exact, exact_sums, whole_norms
from trainer.strategies.exact import GradientSums


def split_gradient(gradient: Tensor) -> Tensor:
    return exact.split(gradient, exact.GRADIENT_BOUND, exact.MOST_UNITS)


def terms(count: int, shape: tuple[int, ...] = (50,)) -> Tensor:
    """Numbers of very different magnitude and both signs."""
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randn(count, *shape, generator=generator)
    exponents = torch.randint(-40, 10, numbers.shape, generator=generator)
    return torch.ldexp(numbers, exponents)


def grouped(numbers: Tensor, groups: int, words: bool) -> Tensor:
    """The sum of the sums of groups."""
    parts = torch.chunk(numbers[torch.randperm(len(numbers))], groups)
    if not words:
        return torch.stack([part.sum(0) for part in parts]).sum(0)
    return exact.total(torch.stack([split_gradient(part).sum(1) for part in parts]).sum(0))


def test_order_and_grouping_do_not_matter() -> None:
    numbers = terms(1000)
    expected = grouped(numbers, 1, words=True)
    for groups in (1, 2, 3, 7, 100):
        assert torch.equal(grouped(numbers, groups, words=True), expected)
    correct = [math.fsum(column) for column in numbers.T.double().tolist()]
    torch.testing.assert_close(
        expected, torch.tensor(correct, dtype=torch.float64), rtol=0, atol=1e-16
    )


def test_ordinary_sums_depend_on_the_grouping() -> None:
    numbers = terms(1000)
    sums = [grouped(numbers, groups, words=False) for groups in (1, 2, 3, 7, 100)]
    assert not all(torch.equal(each, sums[0]) for each in sums)


def test_a_flipped_bit_changes_the_sum() -> None:
    numbers = terms(100)
    flipped = numbers.clone()
    flipped[3, 5] = torch.nextafter(flipped[3, 5], torch.tensor(torch.inf))
    assert not torch.equal(grouped(numbers, 1, words=True), grouped(flipped, 1, words=True))


def test_most_terms_at_the_bound_are_exact() -> None:
    units = torch.full((exact.MOST_UNITS,), exact.GRADIENT_BOUND)
    tiny = torch.full_like(units, exact.GRADIENT_BOUND - 2.0**-7)
    for numbers in (units, tiny, -tiny):
        total = exact.total(split_gradient(numbers).sum(1))
        assert total == math.fsum(numbers.tolist())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0 * exact.GRADIENT_BOUND])
def test_other_numbers_become_nan(value: float) -> None:
    words = split_gradient(torch.tensor([1.0, value]))
    assert exact.total(words).isnan().all()
    assert exact.total(words.sum(1)).isnan()


def test_zero_has_one_sign() -> None:
    words = split_gradient(torch.tensor([-0.0, -1e-30]))
    assert not exact.total(words).signbit().any()


@pytest.mark.parametrize(
    ("largest", "bound"),
    [(0.0, 1.0), (1.0, 2.0), (0.75, 1.0), (3e-39, 2.0**-127), (torch.inf, 1.0)],
)
def test_bounds_are_powers_of_two(largest: float, bound: float) -> None:
    assert exact.bound_of(torch.tensor([largest])).item() == bound


def test_norms_do_not_depend_on_the_partition() -> None:
    numbers = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 60, (999,), generator=numbers)
    whole = torch.ldexp(torch.randn(999, generator=numbers), exponents)
    expected = whole_norms([whole], whole, is_exact=True)
    torch.testing.assert_close(expected, whole.double().norm()[None], rtol=1e-9, atol=0.0)
    bound = exact.bound_of(whole.abs().max()) ** 2
    for cut in (1, 100, 998):
        parts = [
            exact.split(part.double() ** 2, bound, 2**33).sum(1)
            for part in (whole[:cut], whole[cut:])
        ]
        assert torch.equal(exact.total(parts[0] + parts[1]).sqrt(), expected[0])


def test_norms_of_nothing_and_of_what_is_not_finite() -> None:
    like = torch.zeros(3)
    found = whole_norms(
        [torch.zeros(3), torch.zeros(0), torch.tensor([1.0, torch.inf])], like, is_exact=True
    )
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2].isnan()


def test_sums_of_rows_keep_small_rows() -> None:
    """As of rare tokens in a table of embeddings."""
    matrix = torch.full((30_000, 64), 1e-2)
    matrix[7] = 3e-14

    def row_sums(_: int, squares: Tensor, bound: Tensor) -> Tensor:
        return exact.split(squares, bound, 64).sum(2)

    (words,) = exact_sums([matrix], matrix, row_sums)
    correct = matrix.double().square().sum(1)
    torch.testing.assert_close(exact.total(words), correct, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(
    "config", [adamw.Config(lr=0.1), adamw.Config(lr=0.1, bias_correction=False)]
)
def test_updates_do_not_depend_on_the_place_of_an_element(config: adamw.Config) -> None:
    """The vectorized loops of CPUs compute the last elements of a tensor by other instructions."""
    numbers = torch.Generator().manual_seed(1)
    weights, *gradients = (torch.randn(500, generator=numbers) for _ in range(6))
    cuts = (0, 3, 64, 127, 200, 401, 500)

    def updated(bounds: tuple[int, ...]) -> Tensor:
        parts = [torch.nn.Parameter(weights[a:b].clone()) for a, b in pairwise(bounds)]
        named = [(f"part{number}", part) for number, part in enumerate(parts)]
        optimizer = config.build(named, Structure(exact=True))
        for gradient in gradients:
            for part, (a, b) in zip(parts, pairwise(bounds), strict=True):
                part.grad = gradient[a:b].clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    assert torch.equal(updated((0, 500)), updated(cuts))


def test_blocks_of_a_gradient_are_added_in_place() -> None:
    gradient = torch.randn(3, 50_000)
    sums = torch.zeros(2, *gradient.shape, dtype=torch.float64)
    exact.add_gradient(sums, gradient)
    exact.add_gradient(sums, gradient)
    assert torch.equal(sums, 2 * split_gradient(gradient))


def test_a_failed_unit_leaves_nothing_behind() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    sums = GradientSums(None)

    def add(value: float, last: bool) -> None:
        with sums.unit([parameter], last):
            parameter.grad = torch.full((3,), value)

    add(1.0, last=False)
    with pytest.raises(RuntimeError), sums.unit([parameter], True):
        raise RuntimeError
    add(1.0, last=False)
    add(1.0, last=True)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_no_number_is_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would wait for each copy: once for each gradient of a unit."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("torch.tensor and torch.as_tensor copy a number from the host")

    numbers = terms(3)
    sums = torch.zeros(2, *numbers.shape, dtype=torch.float64)
    expected = whole_norms([numbers], numbers, is_exact=True)
    for name in ("as_tensor", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    exact.add_gradient(sums, numbers)
    assert (exact.total(sums) - numbers).abs().max() <= 2.0**-64
    assert torch.equal(whole_norms([numbers], numbers, is_exact=True), expected)
    exact.split_metric(numbers)
