"""LSTM layers below a task's head, beside `torch.nn.LSTM`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import ConfigError
from tests.outputs import outputs
from tests.unit.models.test_scalar_mix import FAMILIES, SHAPE, make
from trainer.models import Stored
from trainer.models.codecs import codec_of
from trainer.models.families import bert, xlnet
from trainer.models.peft.kinds import prompt

LAYERS = 2


def config(family: str = "bert", **changes: Any) -> Any:
    own = {"scalar_mix": False, "head": "tagging", "head_lstm": LAYERS, "crf": True}
    return replace(FAMILIES[family], **{**own, **changes})


def reference(model: Any) -> nn.LSTM:
    """PyTorch's LSTM with the head's weights; it adds two biases where the head has one."""
    width = model.config.width
    lstm = nn.LSTM(width, width // 2, LAYERS, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for suffix, stack in (("", "forward_layers"), ("_reverse", "backward_layers")):
            for index in range(LAYERS):
                layer = getattr(model.head_lstm, stack)[index]
                for ours, theirs in (("weight_ih", "weight_ih"), ("weight_hh", "weight_hh")):
                    getattr(lstm, f"{theirs}_l{index}{suffix}").copy_(getattr(layer, ours))
                getattr(lstm, f"bias_ih_l{index}{suffix}").copy_(layer.bias)
                getattr(lstm, f"bias_hh_l{index}{suffix}").zero_()
    return lstm


@pytest.mark.parametrize("family", FAMILIES)
def test_is_a_bidirectional_lstm(family: str) -> None:
    model = make(config(family))
    tokens = torch.randint(4, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    given = {"tokens": tokens, "positions": torch.arange(20).expand(2, -1)}
    (last,) = outputs(model, "layer.3", **given)
    hidden, logits, transitions = outputs(model, "hidden", "tagging", "tag_transitions", **given)
    expected, _ = reference(model)(last)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(logits, model.head(expected, None))
    assert torch.equal(transitions, model.tag_transitions)
    (logits.square().sum() + transitions.sum()).backward()
    trained = [*model.head_lstm.parameters(), model.tag_transitions]
    assert all(bool(each.grad.any()) for each in trained)


@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_dropout_of_the_lstm_and_of_the_head_are_independent(family: str) -> None:
    """Half of what half leaves is a quarter, of the forward and of the backward direction."""
    one = config(family, head="classification", head_lstm=1, crf=False, dropout=0.5)
    model = make(one).train()
    seen: list[torch.Tensor] = []
    model.head.pooler.register_forward_pre_hook(lambda _, given: seen.append(given[0] == 0))
    tokens = torch.randint(4, 60, (200, 6), generator=torch.Generator().manual_seed(0))
    keys = torch.arange(200, dtype=torch.int32)
    first = torch.zeros(200, 1, dtype=torch.long)
    positions = torch.arange(6).expand(200, -1)
    given = {"tokens": tokens, "positions": positions, "predicted": first, "dropout_key": keys}
    outputs(model, "classification", **given)
    for direction in seen[0].chunk(2, -1):
        assert 0.7 < direction.float().mean() < 0.8


def test_padding_counts_for_nothing() -> None:
    """Rows of a task hold one sequence and padding."""
    model = make(config())
    tokens = torch.randint(4, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    length = 13
    segments, positions = (torch.arange(20) < length).int()[None], torch.arange(20)[None]
    (padded,) = outputs(model, "tagging", tokens=tokens, segments=segments, positions=positions)
    (alone,) = outputs(model, "tagging", tokens=tokens[:, :length], positions=positions[:, :length])
    torch.testing.assert_close(padded[:, :length], alone)


def test_starts_from_a_model_without() -> None:
    before = replace(config(), head_lstm=0, crf=False, head="language_model", labels=())
    shapes = {name: tuple(each.shape) for name, each in before.build().named_parameters()}
    sources = config().build().start_from(Stored(before, shapes)).sources
    new = {name for name, source in sources.items() if source is None}
    assert {name.partition(".")[0] for name in new} == {"head", "head_lstm", "tag_transitions"}
    # Tags of another number have other transitions.
    tuned = config()
    shapes = {name: tuple(each.shape) for name, each in tuned.build().named_parameters()}
    other = replace(tuned, labels=("a", "b", "c")).build().start_from(Stored(tuned, shapes))
    assert other.sources["tag_transitions"] is None
    assert other.sources["head_lstm.forward_layers.0.bias"] is not None


def test_initial_weights_and_flops() -> None:
    model, without = make(config(width=64)), config(width=64, head_lstm=0).build()
    weight = model.head_lstm.forward_layers[0].weight_ih
    assert float(weight.std()) == pytest.approx(64**-0.5, rel=0.15)  # truncated
    assert model.stacked()["head_lstm.backward_layers.1.weight_hh"] == 4
    # 6 for each weight of 2 layers, 2 directions, 4 gates: 32 x (64 + 32).
    added = model.flops_per_token(20) - without.flops_per_token(20)
    assert added == 6 * 2 * 2 * 4 * 32 * (64 + 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "language_model", "labels": (), "crf": False}, "head_lstm is for a task's head"),
        ({"peft": prompt.Config(length=2)}, "head_lstm is for a task's head"),
        ({"head_lstm": -1}, "head_lstm is -1"),
        ({"head": "classification"}, "crf is true, but head is classification"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config(), **changes)


def test_other_families_and_exports_lack_it() -> None:
    with pytest.raises(ConfigError, match="transformers has no head with an LSTM"):
        codec_of(config()).to_huggingface()
    with pytest.raises(ConfigError, match="transformers has no conditional random field"):
        codec_of(config("modernbert", head_lstm=0)).to_huggingface()
    shape = {name: value for name, value in SHAPE.items() if name != "scalar_mix"}
    with pytest.raises(ConfigError, match="head_lstm is set, but XLNet has no such head"):
        xlnet.Config(**shape, head_lstm=1)
    assert bert.Config(**{**shape, "head": "tagging"}, crf=True).build().offers >= {
        "tag_transitions"
    }


def test_a_left_to_right_model_sees_both_sides_through_it() -> None:
    """Devlin et al. 2019, section 5.1: without the LSTM, later tokens change no earlier tag."""
    tokens = torch.randint(4, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, -1] = 3
    for layers in (0, 1):
        model = make(config(causal=True, head_lstm=layers))
        before, after = (
            outputs(model, "tagging", tokens=each, positions=torch.arange(12)[None])[0]
            for each in (tokens, changed)
        )
        assert torch.equal(before[:, :-1], after[:, :-1]) == (layers == 0)
    with pytest.raises(ConfigError, match="transformers has no left-to-right model"):
        codec_of(config(causal=True, head_lstm=0, crf=False)).to_huggingface()
