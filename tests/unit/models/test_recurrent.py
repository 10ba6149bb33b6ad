"""Recurrent models: resets, dropout, facts about parameters, and what they reject."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.errors import ConfigError
from tests.outputs import outputs, predict
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.models import Model, Start, Stored
from trainer.models.codecs import codec_of
from trainer.models.families import bilm, lstm
from trainer.models.recurrent.lstm_layers import RecurrentLayer, drop, resets
from trainer.models.recurrent.model import RecurrentConfig
from trainer.models.stack import Context, LayerPlace
from trainer.training.compute.compiled import compile_units

SHAPE: dict[str, Any] = {"vocab_size": 60, "layers": 2, "hidden_size": 16, "embedding_width": 16}
CLASSES: dict[str, Any] = {"head": "classification", "labels": ("no", "maybe", "yes")}
LSTM = lstm.Config(**SHAPE)
BILM = bilm.Config(**SHAPE, proj_size=0)
KEYS = torch.tensor([5, -6, 2**31 - 1], dtype=torch.int32)


def make(config: RecurrentConfig) -> Any:
    model = config.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(model, name))
    return model


def initial(model: Model, name: str, seed: int = 0) -> Tensor:
    shape = model.get_parameter(name).shape
    return model.initial_values(name, 0, shape.numel(), seed).view(shape)


def batch(**changes: Tensor) -> dict[str, Tensor]:
    tokens = torch.randint(0, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[1] * 4 + [2] * 5, [1] * 6 + [0] * 3, [1] * 9])
    return {"tokens": tokens, "segments": segments, "dropout_key": KEYS, **changes}


def test_the_state_is_reset_before_each_sequence_but_not_before_padding() -> None:
    segments = torch.tensor([[1, 1, 2, 2, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 2, 2, 0]])
    expected = torch.tensor([[0, 1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
    assert torch.equal(resets(segments), expected.bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("proj_size", [0, 8])
@torch.no_grad()
def test_closed_gates_leave_nothing_of_a_state(dtype: torch.dtype, proj_size: int) -> None:
    """Whatever the weights are, also in 16 bits and with a projection."""
    layer = RecurrentLayer(16, 24, proj_size)
    for parameter in layer.parameters():
        parameter.copy_(
            5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        )
    hidden = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    other = hidden.clone()
    other[:, :4] = 3
    columns = {"resets": torch.arange(7).expand(2, -1) == 3}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        one, two = (layer(each, None, None, Context(columns=columns)) for each in (hidden, other))
    assert one.dtype == dtype
    assert not one[:, 3].any()
    assert not torch.equal(one[:, 2], two[:, 2])
    assert torch.equal(one[:, 4:], two[:, 4:])


@pytest.mark.parametrize("proj_size", [0, 8])
def test_the_loop_that_clips_is_the_kernel_if_nothing_is_clipped(proj_size: int) -> None:
    """States, also after resets, and gradients; where it does clip, it changes them."""
    kernel, wide, narrow = (
        RecurrentLayer(16, 24, proj_size, clip=clip) for clip in (None, 99, 0.1)
    )
    for layer in (kernel, wide, narrow):
        generator = torch.Generator().manual_seed(0)
        for parameter in layer.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)
    hidden = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    columns = {"resets": torch.arange(7).expand(2, -1) == 3}
    expected, own, other = (
        layer(hidden, None, None, Context(columns=columns)) for layer in (kernel, wide, narrow)
    )
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert (other - expected).abs().max() > 0.1
    for output in (expected, own):
        output.square().sum().backward()
    for parameter, reference in zip(wide.parameters(), kernel.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [LSTM, BILM], ids=["lstm", "bilm"])
def test_dropout_of_a_row_depends_on_its_key_only(config: RecurrentConfig) -> None:
    model = make(config).train()
    whole = predict(model, **batch())
    assert not torch.equal(whole, predict(model, **batch(dropout_key=KEYS.flip(0))))
    reversed_rows = predict(model, **{name: column.flip(0) for name, column in batch().items()})
    torch.testing.assert_close(reversed_rows.flip(0), whole, rtol=1e-5, atol=1e-6)
    evaluated = predict(model.eval(), **batch())
    assert torch.equal(evaluated, predict(model, **{**batch(), "dropout_key": None}))
    assert (evaluated - whole).abs().max() > 1e-3


def test_directions_and_layers_drop_other_elements() -> None:
    model = make(BILM).train()
    seen: list[Tensor] = []
    for stack in model.stacks:
        for layer in stack:
            layer.register_forward_pre_hook(lambda _, given: seen.append(given[3].keys))
    predict(model, **batch())
    outputs(model, "previous_tokens", **batch())
    assert len(seen) == 4
    assert len({tuple(keys.flatten().tolist()) for keys in seen}) == 4


@pytest.mark.parametrize("config", [LSTM, BILM], ids=["lstm", "bilm"])
def test_a_classifier_of_a_row_depends_on_its_key_only(config: RecurrentConfig) -> None:
    """With a key that no layer has."""
    model = make(replace(config, **CLASSES)).train()
    keys: list[Tensor] = []
    modules = [*model.sharding_units(), model.head]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given: keys.append(given[1] if len(given) == 2 else given[3].keys.flatten())
        )
        for module in modules
    ]
    given = batch(segments=torch.tensor([[1] * 4 + [0] * 5, [1] * 6 + [0] * 3, [1] * 9]))
    whole = predict(model, **given)
    assert whole.shape == (3, 1, 3)
    assert len(torch.cat(keys).unique()) == torch.cat(keys).numel() == 3 * len(modules)
    for hook in hooks:
        hook.remove()
    reversed_rows = predict(model, **{name: column.flip(0) for name, column in given.items()})
    torch.testing.assert_close(reversed_rows.flip(0), whole, rtol=1e-5, atol=1e-6)
    evaluated = predict(model.eval(), **given)
    assert torch.equal(evaluated, predict(model, **{**given, "dropout_key": None}))
    assert (evaluated - whole).abs().max() > 1e-3


def test_recurrent_weights_are_dropped_for_the_step_and_not_for_a_row() -> None:
    """The keys of rows change nothing, another step's key does, and a row may stand alone."""
    model = make(replace(LSTM, dropout=0.0, weight_dropout=0.5)).train()

    def predicted(step_key: int, rows: slice = slice(None), **changes: Tensor) -> Tensor:
        given = {name: column[rows] for name, column in batch(**changes).items()}
        key = torch.full((len(given["tokens"]),), step_key, dtype=torch.int32)
        return predict(model, **given, extra={"step_key": key})

    whole = predicted(7)
    assert torch.equal(whole, predicted(7, dropout_key=KEYS.flip(0)))
    torch.testing.assert_close(predicted(7, slice(1, 2)), whole[1:2], rtol=1e-5, atol=1e-6)
    assert (predicted(8) - whole).abs().max() > 1e-3
    model.eval()
    assert (predicted(7) - whole).abs().max() > 1e-3
    assert torch.equal(predicted(7), predict(model, **batch()))


def test_dropout_of_embeddings_and_of_the_last_output_have_rates_of_their_own() -> None:
    config = replace(LSTM, layers=3, dropout=0.3, embedding_dropout=0.6, output_dropout=0.1)
    model = config.build()
    assert model.embeddings.dropout == 0.6
    assert [layer.rates.output for layer in model.layers] == [0.3, 0.3, 0.1]
    model = replace(config, embedding_dropout=None, output_dropout=None).build()
    assert model.embeddings.dropout == 0.3
    assert [layer.rates.output for layer in model.layers] == [0.3, 0.3, 0.3]


def test_a_classifier_drops_pooled_states_and_hidden_units() -> None:
    head = make(replace(LSTM, **CLASSES, head_width=400, head_dropout=(0.6, 0.25))).head
    seen: list[Tensor] = []
    for linear in head.children():
        linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] == 0))
    pooled = torch.ones(3, 48)
    head(pooled)
    without = [zeros.float().mean().item() for zeros in seen]
    seen.clear()
    head(pooled, KEYS)
    assert without[0] == 0
    assert seen[0].float().mean() == pytest.approx(0.6, abs=0.1)
    # ReLU leaves about half of the units, of which a quarter are dropped.
    assert (~seen[1]).float().mean() == pytest.approx(0.75 * (1 - without[1]), abs=0.1)
    assert not torch.equal(seen[0][0], seen[0][1])


def test_a_new_classifier_is_initialized_and_the_old_head_left_out() -> None:
    def started(before: RecurrentConfig, now: RecurrentConfig) -> tuple[Start, list[str]]:
        shapes = {name: tuple(each.shape) for name, each in before.build().named_parameters()}
        found = now.build().start_from(Stored(before, shapes))
        return found, [name for name, source in found.sources.items() if source is None]

    classes = replace(LSTM, **CLASSES)
    found, new = started(LSTM, classes)
    assert new == [
        f"head.{layer}.{kind}" for layer in ("dense", "classifier") for kind in ("weight", "bias")
    ]
    assert found.unused == {"head.bias"}
    assert found.reason == "model.head is classification"
    assert started(classes, classes)[1] == []
    assert started(LSTM, LSTM)[0].unused == frozenset()
    other = replace(classes, labels=("no", "yes", "maybe"))
    assert started(classes, other)[1] == ["head.classifier.weight", "head.classifier.bias"]


def test_variational_dropout_has_one_mask_for_all_positions() -> None:
    x = torch.ones(3, 9, 200)
    dropped = drop(x, 0.25, KEYS, variational=True)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert {round(value, 4) for value in dropped.unique().tolist()} == {0.0, 1.3333}
    assert dropped.mean() == pytest.approx(1, abs=0.1)
    assert not torch.equal(dropped[0], dropped[1])
    every = drop(x, 0.25, KEYS, variational=False)
    assert not torch.equal(every, every[:, :1].expand_as(every))
    assert drop(x, 0.25, None, variational=True) is x


def test_dropped_tokens_are_dropped_wherever_they_occur_in_a_row() -> None:
    config = lstm.Config(**SHAPE, dropout=0.0, token_dropout=0.3)
    embeddings = make(config).embeddings
    tokens = torch.arange(60).repeat(3, 2)
    hidden, matrix = embeddings(tokens, KEYS, KEYS)
    kept = hidden[:, :60].any(-1)
    assert torch.equal(hidden[:, :60], hidden[:, 60:])
    torch.testing.assert_close(hidden[:, :60], matrix * kept[..., None] / 0.7, rtol=1e-5, atol=1e-6)
    assert 0.5 < kept.float().mean() < 0.9
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("config", [LSTM, BILM], ids=["lstm", "bilm"])
def test_recomputed_activations_have_the_same_gradients(config: RecurrentConfig) -> None:
    """With dropout, packed rows and a residual connection."""
    gradients = []
    for recomputes in (False, True):
        settings = {"residual": True, "dropout": 0.2, "norm": True, "weight_dropout": 0.3}
        model = make(replace(config, **settings)).train()
        model.activation_checkpointing = recomputes
        assert model.activation_checkpointing == recomputes
        names = sorted(model.trains)
        extra = {"step_key": torch.full((3,), 5, dtype=torch.int32)}
        found = outputs(model, *names, **batch(), extra=extra)
        sum(each.square().sum() for each in found).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert all(gradient.any() for gradient in gradients[0].values())


@pytest.mark.parametrize("config", [LSTM, BILM], ids=["lstm", "bilm"])
def test_facts_about_parameters(config: RecurrentConfig) -> None:
    model = make(replace(config, norm=True, proj_size=8, tied=False))
    first = "layers.0" if config is LSTM else "forward_layers.0"
    roles = {name: tuple(model.role(name)) for name, _ in model.named_parameters()}
    assert roles["embeddings.tokens.weight"] == ("embedding", "weight")
    assert roles["head.decoder.weight"] == ("head", "weight")
    assert roles["head.bias"] == ("head", "bias")
    assert roles[f"{first}.weight_hh"] == roles[f"{first}.weight_hr"] == ("layer", "weight")
    assert roles[f"{first}.bias"] == ("layer", "bias")
    assert roles[f"{first}.norm.weight"] == roles[f"{first}.norm.bias"] == ("layer", "norm")
    stack = first.partition(".")[0]
    assert model.layer_of(f"{first}.bias") == LayerPlace(stack, 0, 2, "bias")
    assert model.layer_of("head.bias") is None
    counts = {name: 4 for name in roles if name.endswith(("weight_ih", "weight_hh", ".bias"))}
    counts = {name: 4 for name in counts if "layers" in name and "norm" not in name}
    assert model.stacked() == counts
    units = model.sharding_units()
    assert len(units) == (2 if config is LSTM else 4)
    assert not model.scan_groups()


def test_initial_values_are_a_function_of_the_element() -> None:
    model = LSTM.build()
    for name, parameter in model.named_parameters():
        whole = model.initial_values(name, 0, parameter.numel(), 0)
        for start, stop in ((0, 5), (3, 17), (14, 40), (20, parameter.numel())):
            part = model.initial_values(name, start, min(stop, parameter.numel()), 0)
            assert torch.equal(part, whole[start:stop])
    bias = initial(model, "layers.1.bias").view(4, 16)
    assert torch.equal(bias[1], torch.ones(16))
    assert not bias[[0, 2, 3]].any()
    weight = initial(lstm.Config(vocab_size=9, embedding_width=256).build(), "layers.0.weight_ih")
    assert weight.std() == pytest.approx(1 / math.sqrt(256), rel=0.02)
    assert not initial(model, "head.bias").any()


def test_work_of_a_position() -> None:
    """6 FLOPs per weight; a tied matrix counts in the head, and the head once a direction."""
    layer = 4 * 16 * (16 + 16)
    head = 60 * 16
    assert LSTM.build().flops_per_token(128, 0.5) == 6 * (2 * layer + 0.5 * head)
    assert BILM.build().flops_per_token(128, 0.5) == 6 * (4 * layer + 2 * 0.5 * head)
    classes = replace(BILM, **CLASSES, head_width=5).build()
    assert classes.flops_per_token(128, 1 / 128) == pytest.approx(
        6 * (4 * layer + (6 * 16 * 5 + 5 * 3) / 128)
    )
    projected = lstm.Config(**{**SHAPE, "embedding_width": 8}, proj_size=4, tied=True).build()
    first, second = 4 * 16 * (8 + 4) + 4 * 16, 4 * 16 * (4 + 4) + 4 * 16
    assert projected.flops_per_token(1) == 6 * (first + second + 4 * 8 + 60 * 8)


def test_outputs() -> None:
    hidden = {"hidden", "layer.0", "layer.1", "layer.2"}
    assert LSTM.build().offers == hidden | {"next_tokens"}
    assert BILM.build().offers == hidden | {"next_tokens", "previous_tokens"}
    pools = {"classification", "first_position", "last_position"}
    assert replace(LSTM, **CLASSES).build().offers == hidden | pools
    assert replace(BILM, **CLASSES).build().offers == hidden | pools
    narrow = lstm.Config(**{**SHAPE, "embedding_width": 8}).build()
    assert narrow.offers == (hidden - {"layer.0"}) | {"next_tokens"}
    narrow = replace(LSTM, last_hidden_size=8).build()
    assert narrow.offers == {"hidden", "layer.2", "next_tokens"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0. Use 1 or more."),
        ({"proj_size": 16}, "proj_size is 16. Use 0 for no projection, or a number below"),
        ({"dropout": 1.0}, r"dropout is 1.0. Use a number in \[0, 1\)."),
        ({"token_dropout": -0.1}, "token_dropout is -0.1"),
        ({"output_dropout": 1.0}, "output_dropout is 1.0"),
        ({"weight_dropout": -0.5}, "weight_dropout is -0.5"),
        ({"last_hidden_size": -1}, "last_hidden_size is -1. Use 0 or more"),
        ({"last_hidden_size": 8, "proj_size": 4}, "last_hidden_size is 8. Use 0 or more; with"),
        ({"last_hidden_size": 8, "residual": True}, "last_hidden_size is 8"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0. Use a number above 0."),
        ({"clip": 0.0}, "clip is 0.0. Use a number above 0, or null for no bound."),
        ({"head_width": 0}, "head_width is 0. Use 1 or more."),
        ({"head_dropout": (0.4, 1.0)}, r"head_dropout is \[0.4, 1.0\]. Use two numbers in \[0, 1"),
        ({"head": "classification"}, "labels has 0 names, but a classification head needs"),
        ({"labels": ("a", "b")}, "but a language_model head has none. Leave labels empty"),
    ],
)
def test_wrong_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lstm.Config(**{**SHAPE, **changes})


def test_what_recurrent_models_cannot_do_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"training\.compile is true, and this model has no layers"
    ):
        compile_units(LSTM.build(), CpuAccelerator())
    with pytest.raises(ConfigError, match="a model of kind lstm has no multiple_choice head"):
        LSTM.for_needs(frozenset({"multiple_choice"}))
    with pytest.raises(ConfigError, match="lstm has no Hugging Face format"):
        codec_of(LSTM).to_huggingface()
    with torch.device("meta"):
        model = LSTM.build()
        with pytest.raises(ConfigError, match="the graphs that meta compiles"):
            predict(model, tokens=torch.zeros(1, 3, dtype=torch.int64))
