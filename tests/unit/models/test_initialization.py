from itertools import pairwise

import pytest
import torch

from samestep.errors import ConfigError
from trainer.models.families import roberta
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
        ("layers.3.attention.query_bias", 0),
        ("embeddings.norm.weight", 1),
        ("layers.3.attention_norm.weight", 1),
        ("final_norm.weight", 1),
    ],
)
def test_biases_are_zero_and_norm_weights_one(name: str, value: int):
    assert initial_values(name, 2, 6, seed=0, std=0.02).tolist() == [value] * 4


def test_fairseq_initialization_is_not_truncated_and_has_a_row_of_zeros():
    shape = {"vocab_size": 3000, "layers": 1, "width": 64, "heads": 2, "ffn_width": 64}
    tables = ("embeddings.tokens.weight", "embeddings.positions.weight")
    usual = roberta.Config(**shape, max_positions=30).build()
    model = roberta.Config(**shape, max_positions=30, initialization="fairseq").build()
    values = model.initial_values(tables[0], 0, 3000 * 64, 0).double()
    others = torch.cat([values[:64], values[128:]])
    assert abs(others.std() / 0.02 - 1) < 0.005
    # 4.55 % of a normal distribution are beyond two standard deviations.
    assert abs((others.abs() > 0.04).double().mean() - 0.0455) < 0.002
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        found = model.initial_values(name, 0, count, 0).view_as(parameter)
        assert (name in tables) == (len(found) > 1 and parameter.ndim == 2 and not found[1].any())
        if not name.endswith("bias") and "norm" not in name:
            assert not torch.equal(found, usual.initial_values(name, 0, count, 0).view_as(found))
    # A partition may begin or end inside of the row.
    for edges in ([0, 70, 100, 128, 192000], [0, 64, 65, 127, 129, 192000]):
        parts = [model.initial_values(tables[0], a, b, 0) for a, b in pairwise(edges)]
        assert torch.equal(torch.cat(parts).double(), values)
    assert usual.initial_values(tables[0], 64, 128, 0).all()


def test_initialization_has_no_other_name():
    from samestep.config import decode

    with pytest.raises(ConfigError, match="initialization must be one of bert, fairseq"):
        decode(roberta.Config, {"initialization": "plain"}, "model")
