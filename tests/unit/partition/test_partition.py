"""Parts of tensors, and norms of whole ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainer.partition import (
    Segment,
    SegmentParameter,
    block_bounds,
    flat_start,
    local_parts,
    local_rectangles,
    rectangles,
    whole_norms,
    whole_shape,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One process, alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_norms_are_exact_for_millions_of_elements() -> None:
    """They must not depend on how a tensor is split; adding up squares in fp32 gives 1e-4 here."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((8192, 768), (50_000,), (3, 5, 7), (0, 4), (5_000_001,))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors.append(torch.tensor(-2.0))
    exact = torch.stack([tensor.double().square().sum().sqrt() for tensor in tensors])
    torch.testing.assert_close(whole_norms(tensors, tensors[0]), exact, rtol=1e-8, atol=0)
    assert (
        abs(float(torch._foreach_norm(tensors[:1])[0]) / float(exact[0]) - 1) > 1e-5
    )  # why there is this function


@pytest.mark.parametrize("dimensions", range(5))
def test_rectangles_tile_any_flat_range(dimensions: int) -> None:
    numbers = np.random.default_rng(dimensions)
    for _ in range(100):
        shape = tuple(numbers.integers(1, 6, dimensions).tolist())
        whole = torch.arange(int(np.prod(shape))).view(shape)
        start, stop = sorted(numbers.integers(0, whole.numel() + 1, 2).tolist())
        part = whole.flatten()[start:stop]
        found = rectangles(part, start, shape)
        assert len(found) <= max(1, 2 * dimensions - 1)
        for view, offset in found:
            assert view.numel() > 0
            place = tuple(
                slice(first, first + length)
                for first, length in zip(offset, view.shape, strict=True)
            )
            assert torch.equal(view, whole[place])
        assert [int(each) for view, _ in found for each in view.flatten()] == list(
            range(start, stop)
        )
        for view, _ in found:
            view.fill_(-1)
        assert (part == -1).all(), "they are views"


def test_rows_that_do_not_lie_together_are_cut_in_place() -> None:
    whole = torch.zeros(7, 6).T  # as a matrix [6, 7] of two blocks
    for view, (block, row, column) in rectangles(whole[1:5], 7, (2, 3, 7)):
        view += 10 * block + row + column
    assert whole[:, 0].tolist() == [0, 1, 1, 10, 10, 0], "where each rectangle starts"


def test_a_segment_says_where_it_lies(group: dist.ProcessGroup) -> None:
    memory = torch.arange(12.0)
    parameter = SegmentParameter(memory[3:8], Segment((4, 3), 5, group))
    assert (whole_shape(parameter), flat_start(parameter), parameter.shape) == ((4, 3), 5, (5,))
    places = [(tuple(part.shape), offset) for part, offset in local_rectangles(parameter.detach())]
    assert places == [((1, 1), (1, 2)), ((1, 3), (2, 0)), ((1, 1), (3, 0))]
    (part,) = local_parts([parameter])
    assert type(part) is torch.Tensor
    with torch.no_grad():
        part += 1
    assert memory[3:8].tolist() == parameter.tolist() == [4, 5, 6, 7, 8], "it shares the memory"
    assert block_bounds(parameter, 2) == [0, 1, 5]
    assert block_bounds(parameter, 4) == [0, 0, 1, 4, 5]
    empty = SegmentParameter(memory[:0], Segment((4, 3), 12, group))
    assert local_rectangles(empty) == []
    assert block_bounds(empty, 2) == [0, 0, 0]
    with pytest.raises(AssertionError, match="3 elements do not fit"):
        SegmentParameter(memory[:3], Segment((4, 3), 10, group))
