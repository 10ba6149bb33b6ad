from itertools import pairwise

import pytest
import torch

from trainer.models.initialization import initial_values

NAME = "layers.0.ffn.up.weight"


def test_values_never_change():
    golden = [-0.021439461, 0.00320993527, 0.00777327083, 0.00100651989]
    assert initial_values(NAME, 0, 4, seed=7, std=0.02).tolist() == pytest.approx(golden, rel=1e-6)


@pytest.mark.parametrize(
    "cuts", [[0, 1, 5, 5, 1000], [0, 2**18 - 3, 2**18 + 3, 300_000], [0, 150_000, 300_000]]
)
def test_any_partition_holds_its_part_of_the_whole(cuts: list[int]):
    whole = initial_values(NAME, 0, cuts[-1], seed=3, std=0.02)
    parts = [initial_values(NAME, a, b, seed=3, std=0.02) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_truncated_normal():
    values = initial_values(NAME, 0, 1_000_000, seed=0, std=0.02).double()
    assert values.abs().max() <= 0.04
    assert abs(values.mean()) < 5 * 0.0176 / 1000
    assert (
        abs(values.std() / 0.02 - 0.8796) < 0.003
    )  # of a normal truncated at two standard deviations
    inside = (values.abs() < 0.02).double().mean()
    assert abs(inside - 0.6827 / 0.9545) < 0.003


def test_names_and_seeds_give_unrelated_values():
    base = initial_values(NAME, 0, 100_000, seed=0, std=1.0)
    others = [("layers.1.ffn.up.weight", 0), (NAME, 1)]
    for name, seed in others:
        other = initial_values(name, 0, 100_000, seed=seed, std=1.0)
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head.bias", 0),
        ("layers.3.attention.qkv.bias", 0),
        ("layers.3.ffn_norm.bias", 0),
        ("embeddings.norm.weight", 1),
        ("layers.3.attention_norm.weight", 1),
        ("final_norm.weight", 1),
    ],
)
def test_biases_are_zero_and_norm_weights_one(name: str, value: int):
    assert initial_values(name, 2, 6, seed=0, std=0.02).tolist() == [value] * 4
