import pytest
import torch

from trainer.models.layers.dropout import attention_dropout, dropout, split_key

P = 0.1
KEYS = split_key(torch.tensor([1234567], dtype=torch.int32), 64)[:, 0]


def kept(keys: torch.Tensor, positions: int, p: float = P) -> torch.Tensor:
    return dropout(torch.ones(len(keys), positions), p, keys) != 0


def mix(x: int) -> int:
    """lowbias32 on unbounded integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def test_masks_never_change():
    # Other bits would change every run that is continued with this version.
    keys = [mix(mix(1234567) ^ (place * 0x9E3779B9 % 2**32)) for place in range(64)]
    assert KEYS.tolist() == [signed(key) for key in keys]
    mask = kept(KEYS[:16], 200)
    for row, key in enumerate(keys[:16]):
        for position in range(200):
            bits = (mix(position) ^ key) * 0x7FEB352D % 2**32
            bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
            assert mask[row, position] == (signed(bits) + 2**31 >= round(P * 2**32))


def test_kept_elements_are_scaled_and_gradients_follow_the_mask():
    x = torch.randn(3, 5, 7, requires_grad=True)
    y = dropout(x, 0.25, KEYS[:3])
    mask = kept(KEYS[:3], 35, 0.25).view_as(x)
    torch.testing.assert_close(y, x * mask / 0.75)
    y.sum().backward()
    torch.testing.assert_close(x.grad, mask / 0.75)


@pytest.mark.parametrize(("p", "key"), [(0.0, KEYS[:2]), (0.5, None)])
def test_nothing_is_dropped_without_probability_or_key(p: float, key: torch.Tensor | None):
    x = torch.randn(2, 3)
    assert dropout(x, p, key) is x


def test_a_rows_mask_depends_on_its_key_only():
    whole = kept(KEYS, 300)
    assert torch.equal(whole[10:11], kept(KEYS[10:11], 300))
    assert torch.equal(whole.flip(0), kept(KEYS.flip(0), 300))
    assert torch.equal(whole.view(64, 3, 100), dropout(torch.ones(64, 3, 100), P, KEYS) != 0)


def test_cells_taken_from_a_row_are_dropped_out_as_in_it():
    x, positions = torch.randn(64, 50, 8), torch.randint(0, 50, (64, 7))
    taken = x.take_along_dim(positions[..., None], dim=1)
    whole = dropout(x, P, KEYS).take_along_dim(positions[..., None], dim=1)
    assert torch.equal(dropout(taken, P, KEYS, positions), whole)


def test_precision_of_the_input_does_not_change_the_mask():
    assert torch.equal(
        dropout(torch.ones(64, 100, dtype=torch.bfloat16), P, KEYS) != 0, kept(KEYS, 100)
    )


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate(p: float):
    drops = (~kept(KEYS, 50_000, p)).sum(1).double()
    sigma = (50_000 * p * (1 - p)) ** 0.5
    assert ((drops - 50_000 * p).abs() < 5 * sigma).all()
    assert abs(drops.sum() - 64 * 50_000 * p) < 4 * 8 * sigma


def test_columns_are_uniform():
    keys = split_key(torch.tensor([99], dtype=torch.int32), 20_000)[:, 0]
    drops = (~kept(keys, 512)).sum(0).double()
    variance = 20_000 * P * (1 - P)
    chi_squared = ((drops - 20_000 * P) ** 2 / variance).sum()
    assert abs(chi_squared - 512) < 5 * (2 * 512) ** 0.5


@pytest.mark.parametrize(
    "keys",
    [
        KEYS,  # places of one row
        split_key(torch.arange(64, dtype=torch.int32), 3)[
            2
        ],  # rows with neighboring keys, at one place
        split_key(torch.arange(64, dtype=torch.int32) << 24, 3)[2],
    ],
)
def test_rows_are_independent(keys: torch.Tensor):
    positions, pairs = 100_000, 64 * 63
    drops = (~kept(keys, positions)).double() - P
    correlation = (drops @ drops.T / (positions * P * (1 - P))).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / positions**0.5
    assert (correlation**2).sum() / pairs * positions == pytest.approx(
        1, abs=5 * (4 / pairs) ** 0.5
    )


def test_neighboring_cells_are_independent():
    drops = (~kept(KEYS, 40_000)).double() - P
    for lag in (1, 2, 64, 768, 1024):
        correlation = (drops[:, lag:] * drops[:, :-lag]).mean() / (P * (1 - P))
        assert abs(correlation) < 5 / (64 * 40_000) ** 0.5, lag


def test_places_of_a_row_get_different_keys():
    keys = split_key(torch.arange(-50, 50, dtype=torch.int32), 73)
    assert keys.shape == (73, 100)
    assert keys.unique().numel() == keys.numel()


def kept_scores(keys: torch.Tensor, heads: int, queries: int, columns: int, p: float = P):
    """[B, H, T, S]: True where attention dropout keeps a probability."""
    return attention_dropout(torch.ones(len(keys), heads, queries, columns), p, keys) != 0


def test_masks_of_attention_never_change():
    mask = kept_scores(KEYS[:4], 2, 5, 40)
    for b, key in enumerate(KEYS[:4].tolist()):
        for row in range(10):
            of_row = mix(mix(row) ^ (key % 2**32))
            for column in range(40):
                bits = (of_row + column * 0x9E3779B9 * 0x7FEB352D) % 2**32
                bits = (bits ^ (bits >> 15)) * 0x846CA68B % 2**32
                expected = signed(bits) + 2**31 >= round(P * 2**32)
                assert mask[b, row // 5, row % 5, column] == expected


def test_attention_keeps_and_scales_as_other_dropout():
    x = torch.rand(3, 2, 5, 7)
    y = attention_dropout(x, 0.25, KEYS[:3])
    torch.testing.assert_close(y, x * kept_scores(KEYS[:3], 2, 5, 7, 0.25) / 0.75)
    assert attention_dropout(x, 0.25, None) is x
    assert attention_dropout(x, 0.0, KEYS[:3]) is x


def chi_squared(found: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations above its mean."""
    freedom = len(found) - 1
    return float((((found - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_rate_of_attention_dropout(p: float):
    drops = (~kept_scores(KEYS, 4, 64, 512, p)).double()
    for sums, positions in (
        (drops.sum(3), 512),
        (drops.sum((1, 2)), 256),
        (drops.sum((1, 2, 3)), 2**17),
    ):
        # A variance of 1 in units of the binomial distribution's.
        z = (sums - positions * p) / (positions * p * (1 - p)) ** 0.5
        assert abs(z.mean()) < 5 / z.numel() ** 0.5
        assert z.var() == pytest.approx(1, abs=7 * (2 / z.numel()) ** 0.5)


@pytest.mark.long
@pytest.mark.parametrize(
    "apart", [1, *(pytest.param(apart, marks=pytest.mark.long) for apart in (3, 8)), 64]
)
@pytest.mark.parametrize("axis", [2, 3])
def test_neighboring_scores_are_independent(axis: int, apart: int):
    # Every pattern of dropped and kept among four in a row, in a column.
    drops = (~kept_scores(KEYS, 8, 256, 256)).movedim(axis, -1)
    length = 256 - 3 * apart
    code = sum(drops[..., n * apart : n * apart + length].int() << n for n in range(4))
    # Patterns overlap; every fourth block of columns of this width does not.
    code = code[..., torch.arange(length) % (4 * apart) < apart]
    found = torch.bincount(code.flatten(), minlength=16).double()
    ones = torch.tensor([bin(number).count("1") for number in range(16)])
    expected = code.numel() * P**ones * (1 - P) ** (4 - ones)
    assert abs(chi_squared(found, expected)) < 5


def test_rectangles_of_scores_are_independent():
    # Of four scores in two rows and two columns, the rows' and columns' numbers cancel.
    z = (~kept_scores(KEYS, 2, 64, 64)).double().flatten(1, 2).sub(P) / (P * (1 - P)) ** 0.5
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randint(0, n, (2, 40_000), generator=generator) for n in (128, 64))
    different = (rows[0] != rows[1]) & (columns[0] != columns[1])
    (a, b), (c, d) = rows[:, different], columns[:, different]
    products = z[:, a, c] * z[:, a, d] * z[:, b, c] * z[:, b, d]
    assert abs(products.mean()) < 5 * (1 / products.numel()) ** 0.5


def test_columns_any_distance_apart_are_independent():
    # Over all rows: a weak step from column to column would show at some distance.
    drops = (~kept_scores(KEYS[:4], 16, 512, 1024)).flatten(0, 2).float() - P
    correlation = drops[:, 0] @ drops[:, 1:] / (len(drops) * P * (1 - P))
    z = correlation * len(drops) ** 0.5
    assert z.abs().max() < 5
    assert z.var() == pytest.approx(1, abs=0.2)
