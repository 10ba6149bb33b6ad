import math

import pytest
import torch

from trainer.models.layers.relative import RelativeBias, _bounds


def bucket(distance: int, bidirectional: bool, count: int = 32, farthest: int = 128) -> int:
    """Section 2.1 of the paper, for one distance."""
    first = 0
    if bidirectional:
        count //= 2
        first = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    far = exact + int(
        math.log(distance / exact) / math.log(farthest / exact) * (count - exact) + 1e-6
    )
    return first + min(far, count - 1)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((8, 16, 128), [12, 16, 23, 32, 46, 64, 91]),
        ((2, 4, 9), [5]),  # 2 * sqrt(4.5) = 4.24
        ((1, 2, 128), []),
    ],
)
def test_buckets_begin_at_exact_distances(bounds: tuple[int, int, int], expected: list[int]):
    assert list(_bounds(*bounds)) == expected


@pytest.fixture(params=[False, True])
def bias(request: pytest.FixtureRequest) -> RelativeBias:
    bias = RelativeBias(32, 128, 3, bidirectional=request.param)
    torch.nn.init.normal_(bias.weight, generator=torch.Generator().manual_seed(0))
    return bias


def test_each_pair_of_cells_gets_the_bias_of_its_distance(bias: RelativeBias):
    values = bias(150, 300, None)
    assert values.shape == (1, 3, 150, 300)
    expected = torch.tensor(
        [[bucket(key - query, bias.bidirectional) for key in range(300)] for query in range(150)]
    )
    assert torch.equal(values[0], bias.weight[expected].permute(2, 0, 1))


def test_a_later_query_gets_its_row_of_the_whole(bias: RelativeBias):
    whole = bias(40, 40, None)
    assert torch.equal(bias(1, 20, None, before=19), whole[:, :, 19:20, :20])
    assert torch.equal(bias(3, 40, None, before=37), whole[:, :, 37:])


def test_masked_cells_get_minus_infinity_and_no_gradient(bias: RelativeBias):
    mask = torch.rand(2, 1, 6, 6) < 0.5
    values = bias(6, 6, mask)
    assert torch.equal(values == float("-inf"), ~mask.expand(2, 3, 6, 6))
    values.masked_fill(~mask, 0).sum().backward()
    distances = mask.nonzero()[:, 3] - mask.nonzero()[:, 2]
    counts = torch.bincount(
        torch.tensor([bucket(d, bias.bidirectional) for d in distances.tolist()]), minlength=32
    )
    assert torch.equal(bias.weight.grad, counts[:, None].expand(32, 3).float())


def test_it_is_in_the_precision_of_matrix_products(bias: RelativeBias):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bias(4, 4, torch.ones(4, 4, dtype=torch.bool)).dtype == torch.bfloat16
