"""What all models promise: inputs by name, outputs by name, and facts about their parameters."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.outputs import outputs, predict
from trainer.models import Model, Start, Stored
from trainer.models.config import TransformerConfig
from trainer.models.families import (
    albert,
    bart,
    bert,
    deberta,
    deberta_v3,
    distilbert,
    electra,
    gpt2,
    llama,
    modernbert,
    mpnet,
    neobert,
    openai_gpt,
    roberta,
    t5,
    xlnet,
)
from trainer.models.inputs import Inputs
from trainer.models.peft.kinds import adapters, lora, prefix, prompt
from trainer.models.stack import LayerPlace, Stack

SHAPE: dict[str, Any] = {"vocab_size": 60, "layers": 3, "width": 16, "heads": 2, "ffn_width": 24}
CLASSES: dict[str, Any] = {"head": "classification", "labels": ("a", "b", "c")}
BERT = bert.Config(**SHAPE, max_positions=24)
GPT2 = gpt2.Config(**SHAPE, max_positions=24)
LLAMA = llama.Config(**SHAPE, kv_heads=1, head_width=8, qk_norm=True, window=4)
T5 = t5.Config(**SHAPE, head_width=8)
BART = bart.Config(**SHAPE, max_positions=24, ffn_dropout=0.1)
MODELS: dict[str, TransformerConfig] = {
    "bert": BERT,
    "bert, pre": replace(BERT, norm="pre", activation="geglu"),
    "bert, classes": replace(BERT, **CLASSES),
    "bert, prompt": replace(BERT, peft=prompt.Config(3)),
    "roberta": roberta.Config(**SHAPE, max_positions=24),
    "gpt2": GPT2,
    "gpt2, classes": replace(GPT2, **CLASSES),
    "gpt2, prefix": replace(GPT2, peft=prefix.Config(3)),
    "openai_gpt": openai_gpt.Config(**SHAPE, max_positions=24),
    "llama": LLAMA,
    "llama, output norms": replace(LLAMA, qk_norm=False, joint_qk_norm=True, output_norm=True),
    "llama, two stacks": replace(
        LLAMA, qk_norm=False, causal=False, decoder_layers=2, start_token=1
    ),
    "llama, both ways": replace(LLAMA, causal=False, qkv_bias=True, tied=False, **CLASSES),
    "t5": replace(T5, decoder_layers=2),
    "t5, shared": replace(T5, architecture="shared_encoder_decoder"),
    "t5, left to right": replace(T5, architecture="language_model"),
    "t5, prefix": replace(T5, architecture="prefix_lm", activation="geglu_tanh", tied=False),
    "t5, classes": replace(T5, **CLASSES),
    "t5, tags": replace(T5, head="tagging", labels=("O", "B")),
    "t5, prompt": replace(T5, peft=prompt.Config(3)),
    "bart": replace(BART, decoder_layers=2),
    "bart, classes": replace(BART, **CLASSES),
    "bart, scaled, prompt": replace(BART, scale_embeddings=True, peft=prompt.Config(3)),
}


def meta(config: TransformerConfig) -> Any:
    with torch.device("meta"):
        return config.build()


def make(config: TransformerConfig) -> Any:
    model = config.build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                model.initial_values(name, 0, parameter.numel(), 0).view_as(parameter) * 3
            )
    return model


def columns(config: TransformerConfig) -> dict[str, Tensor]:
    """Two rows of 9 positions, of which the second has padding."""
    tokens = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    found = {"tokens": tokens, "segments": segments, "positions": torch.arange(9).expand(2, -1)}
    if config.predicts == "target_tokens":
        found |= {"target_tokens": tokens[:, :5], "target_segments": segments[:, :5]}
    if config.prefix_lm:
        found["prefix"] = (torch.arange(9) < 4).expand(2, -1)
    return found


def test_inputs_are_taken_out_of_a_batch() -> None:
    batch = {
        name: torch.full((2, 3), n)
        for n, name in enumerate(("tokens", "segments", "labels", "dropout_key"))
    }
    inputs = Inputs.of(batch)
    assert inputs.tokens is batch["tokens"]
    assert inputs.segments is batch["segments"]
    assert inputs.dropout_key is batch["dropout_key"]
    assert inputs.positions is inputs.predicted is inputs.target_tokens is None
    assert dict(inputs.extra) == {"labels": batch["labels"]}


def test_map_changes_all_columns_but_the_extra_ones() -> None:
    batch = {
        "tokens": torch.arange(6).view(2, 3),
        "prefix": torch.ones(2, 3),
        "image": torch.ones(2, 5),
    }
    mapped = Inputs.of(batch).map(lambda column: column[:1])
    assert mapped.tokens.tolist() == [[0, 1, 2]]
    assert mapped.prefix is not None
    assert mapped.prefix.shape == (1, 3)
    assert mapped.segments is None
    assert mapped.extra["image"] is batch["image"]


@dataclass(frozen=True)
class LocalAndGlobal(bert.Config):
    """A family whose every third layer sees all of a text, say: the layers have the same shapes."""

    def static(self, index: int) -> Hashable:
        return "global" if index % 3 == 2 else "local"


def bounds(model: Model) -> list[tuple[str, int, int]]:
    return [(group.name, group.start, group.stop) for group in model.scan_groups()]


class NoWaiting(TorchFunctionMode):
    """Rejects copies of the host's memory for which the host would wait.

    Tensors on the device `meta` reject whatever reads their values.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            assert torch.device(kwargs.get("device") or "cpu").type == "cpu", "a blocking copy"
        found = func(*args, **kwargs)
        if func is Tensor.to and args[0].device.type == "cpu" and found.device.type != "cpu":
            assert kwargs.get("non_blocking"), "a blocking copy"
            assert found.nbytes <= 2**16, "the driver may wait before it copies more"
        return found


OTHERS: dict[str, TransformerConfig] = {
    "albert": albert.Config(**SHAPE, embedding_width=8, max_positions=24),
    "deberta": deberta.Config(**SHAPE, max_positions=24),
    "deberta_v3": deberta_v3.Config(**SHAPE, max_positions=24, position_buckets=8),
    "distilbert": distilbert.Config(**SHAPE, max_positions=24),
    "electra": electra.Config(**SHAPE, embedding_width=8, max_positions=24),
    "modernbert": modernbert.Config(**SHAPE, max_positions=24),
    "mpnet": mpnet.Config(**SHAPE, max_positions=24),
    "neobert": neobert.Config(**SHAPE, max_positions=24),
    "xlnet": xlnet.Config(**SHAPE, max_positions=24),
}


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_passes_do_not_wait_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # it does not know `meta`
    config = {**MODELS, **OTHERS}[name]
    model = meta(config).train()
    batch = {**columns(config), "dropout_key": torch.zeros(2, dtype=torch.int32)}
    if name == "xlnet":
        batch |= {"predicted": torch.zeros(2, 3).long(), "rank": torch.zeros(2, 9).long()}
    inputs = Inputs.of({key: column.to("meta") for key, column in batch.items()})
    with NoWaiting():
        found = model(inputs, frozenset({config.predicts}))
        sum(each.float().sum() for each in found.values()).backward()


def test_layers_of_other_static_configuration_are_not_grouped() -> None:
    config = LocalAndGlobal(**SHAPE | {"layers": 7}, max_positions=24)
    model = meta(config)
    assert bounds(model) == [
        ("layers", 0, 2),
        ("layers", 2, 3),
        ("layers", 3, 5),
        ("layers", 5, 6),
        ("layers", 6, 7),
    ]
    shapes = [
        {name: each.shape for name, each in layer.named_parameters()} for layer in model.layers
    ]
    assert all(each == shapes[0] for each in shapes)
    assert all(group.stack is model.layers for group in model.scan_groups())
    assert bounds(meta(bert.Config(**SHAPE | {"layers": 7}))) == [("layers", 0, 7)]


def test_each_stack_has_groups_of_its_own() -> None:
    assert bounds(meta(replace(T5, decoder_layers=2))) == [("encoder", 0, 3), ("decoder", 0, 2)]
    assert bounds(meta(MODELS["t5, shared"])) == [("decoder", 0, 3)]
    assert bounds(meta(MODELS["t5, tags"])) == [("encoder", 0, 3)]


NORM, WEIGHT, BIAS, ADAPTER = "norm", "weight", "bias", "adapter"
PROJECTION = (
    r"(attention\.(qkv|qkv\.(query|kv)|out)|cross_attention\.(query|kv|out)|ffn\.(up|down))"
)
ROLES = {  # of parameters whose names these patterns match
    r"embeddings\.(tokens|positions|types)\.weight": ("embedding", WEIGHT),
    r"embeddings\.norm\.(weight|bias)": ("embedding", NORM),
    r"(encoder|decoder)_positions\.table\.weight": ("embedding", WEIGHT),
    r"(encoder|decoder)_positions\.norm\.(weight|bias)": ("embedding", NORM),
    r"prompt\.weight": ("embedding", ADAPTER),
    rf"(layers|encoder|decoder)\.\d\.{PROJECTION}\.weight": ("layer", WEIGHT),
    rf"(layers|encoder|decoder)\.\d\.{PROJECTION}\.bias": ("layer", BIAS),
    r"layers\.\d\.attention\.place_(query|key)\.weight": ("layer", WEIGHT),
    r"layers\.\d\.attention\.(place_query\.bias|query_bias|value_bias)": ("layer", BIAS),
    r"relative\.weight": ("shared", WEIGHT),
    r"(layers|encoder|decoder)\.\d\.(attention\.(query|key)|attention|cross_attention|ffn)"
    r"_norm\.(weight|bias)": (
        "layer",
        NORM,
    ),
    r".*\.(lora|adapter|prefix)\..*": ("layer", ADAPTER),
    r"(final|encoder|decoder)_norm\.(weight|bias)": ("shared", NORM),
    r"(relative|encoder|decoder)_bias\.weight": ("shared", WEIGHT),
    r"(nsp_)?head\.(dense|pooler|classifier|decoder)\.weight": ("head", WEIGHT),
    r"((nsp_)?head\.(dense|pooler|classifier)|head)\.bias": ("head", BIAS),
    r"head\.norm\.(weight|bias)": ("head", NORM),
}


@pytest.mark.parametrize(
    "config",
    [
        *MODELS.values(),
        deberta.Config(**SHAPE, max_positions=24),
        replace(BERT, nsp=True),
        replace(BERT, peft=lora.Config()),
        replace(GPT2, peft=adapters.Config(width=4)),
        replace(T5, peft=adapters.Config(width=4)),
        replace(BART, peft=prefix.Config(3)),
        replace(T5, peft=lora.Config(targets=("query", "cross_value"))),
    ],
)
def test_every_parameter_has_a_role(config: TransformerConfig) -> None:
    model = meta(config)
    for name, _ in model.named_parameters():
        (role,) = {role for pattern, role in ROLES.items() if re.fullmatch(pattern, name)}
        assert model.role(name) == role, name
        assert (model.layer_of(name) is not None) == (role[0] == "layer")


def test_the_place_of_a_parameter_in_its_stack() -> None:
    model = meta(replace(T5, decoder_layers=2))
    place = model.layer_of("decoder.1.cross_attention.kv.weight")
    assert place == LayerPlace("decoder", 1, 2, "cross_attention.kv.weight")
    assert place.at(0) == "decoder.0.cross_attention.kv.weight"
    assert model.layer_of("encoder.1.ffn_norm.weight") == ("encoder", 1, 3, "ffn_norm.weight")
    for name in ("embeddings.tokens.weight", "decoder_bias.weight", "decoder_norm.weight"):
        assert model.layer_of(name) is None
    assert meta(MODELS["t5, shared"]).layer_of("decoder.2.attention.out.weight") == LayerPlace(
        "decoder", 2, 3, "attention.out.weight"
    )


def test_layers_above_are_those_up_to_the_heads() -> None:
    """Of both stacks for themselves.

    0 for what follows them, and position biases are there, too.
    """
    model = meta(replace(T5, decoder_layers=2, peft=prompt.Config(3)))
    above = model.layers_above()
    assert above.keys() == dict(model.named_parameters()).keys()
    expected = {
        "embeddings": 4,
        "prompt": 4,
        "encoder.0": 3,
        "encoder.2": 1,
        "decoder.0": 2,
        "decoder.1": 1,
    }
    expected |= dict.fromkeys(("encoder_norm", "decoder_norm", "encoder_bias", "decoder_bias"), 0)
    for beginning, count in expected.items():
        found = {above[name] for name in above if name.startswith(f"{beginning}.")}
        assert found == {count}, beginning
    above = meta(replace(BERT, nsp=True)).layers_above()
    assert {above[name] for name in above if "head." in name} == {0}
    assert {name.partition(".")[0] for name in above if above[name] == 4} == {"embeddings"}


def test_the_last_layers_are_those_of_each_stack() -> None:
    model = meta(replace(T5, decoder_layers=2, **CLASSES))
    chosen = model.last_layers(2)
    assert {name[:9] for name in chosen} == {
        "encoder.1",
        "encoder.2",
        "decoder.0",
        "decoder.1",
        "head.pool",
    }
    assert {name[:8] for name in meta(BERT).last_layers(1)} == {"layers.2"}


@pytest.mark.parametrize(("groups", "above"), [(1, {0: 1}), (3, {0: 5, 2: 3, 4: 1})])
def test_a_shared_layer_counts_at_its_last_use(groups: int, above: dict[int, int]) -> None:
    """ALBERT of 6 layers: all are one, or a a b b c c."""
    shape = {**SHAPE, "layers": 6, "embedding_width": 8}
    model = meta(albert.Config(**shape, groups=groups, **CLASSES))
    found = model.layers_above()
    assert found.keys() == dict(model.named_parameters()).keys()
    places = {name: model.layer_of(name) for name in found}
    assert {place.number: found[name] for name, place in places.items() if place} == above
    assert {found[name] for name in found if name.startswith("embeddings.")} == {7}
    assert {found[name] for name in found if name.startswith("head.")} == {0}
    last = max(above)
    chosen = {name for name in model.last_layers(1) if not name.startswith("head.pooler.")}
    assert chosen == {name for name in found if name.startswith(f"layers.{last}.")}


def stored(config: TransformerConfig) -> Stored:
    return Stored(
        config, {name: tuple(each.shape) for name, each in meta(config).named_parameters()}
    )


def start(before: TransformerConfig, now: TransformerConfig) -> tuple[dict[str, str | None], Start]:
    """The parameters that do not start from the tensor of their name, and all that is known."""
    found = meta(now).start_from(stored(before))
    assert found.sources.keys() == dict(meta(now).named_parameters()).keys()
    return {name: source for name, source in found.sources.items() if source != name}, found


def test_a_model_starts_from_the_tensors_of_its_names() -> None:
    for config in MODELS.values():
        others, found = start(config, config)
        assert not others
        assert all(name.startswith(("head.", "nsp_head.")) for name in found.unused)


def test_a_new_head_is_initialized_and_the_old_one_left_out() -> None:
    others, found = start(BERT, replace(BERT, **CLASSES))
    parts = ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
    assert others == {f"head.{part}": None for part in parts}
    assert found.unused >= {"head.bias", "head.dense.weight", "head.norm.bias"}
    assert all(name.startswith("head.") for name in found.unused)
    assert found.reason == "model.head is classification"
    others, _ = start(
        replace(BERT, **CLASSES), replace(BERT, **CLASSES | {"labels": ("a", "c", "b")})
    )
    assert others == {"head.classifier.weight": None, "head.classifier.bias": None}


def test_a_pooler_starts_from_that_of_the_next_sentence_head() -> None:
    others, found = start(replace(BERT, nsp=True), replace(BERT, **CLASSES))
    assert others["head.pooler.weight"] == "nsp_head.pooler.weight"
    assert others["head.pooler.bias"] == "nsp_head.pooler.bias"
    assert others["head.classifier.weight"] is None
    assert {"nsp_head.classifier.weight", "head.dense.weight"} <= found.unused
    others, _ = start(replace(BERT, nsp=True, width=8), replace(BERT, **CLASSES))
    assert others["head.pooler.weight"] is None


def test_a_next_sentence_head_comes_and_goes() -> None:
    parts = ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
    others, _ = start(BERT, replace(BERT, nsp=True))
    assert others == {f"nsp_head.{part}": None for part in parts}
    others, found = start(replace(BERT, nsp=True), BERT)
    assert not others
    assert found.unused == {f"nsp_head.{part}" for part in parts}
    assert found.reason == "model.nsp is not set"


@pytest.mark.parametrize(
    "peft", [lora.Config(), adapters.Config(), prefix.Config(), prompt.Config()]
)
def test_what_peft_adds_is_initialized(peft: Any) -> None:
    for config in (BERT, GPT2, T5, BART):
        now = replace(config, peft=peft)
        others, _ = start(config, now)
        assert others == {name: None for name, _ in meta(now).named_parameters() if peft.owns(name)}
        assert others


def test_a_tagger_of_an_encoder_leaves_the_decoder_out() -> None:
    others, found = start(T5, MODELS["t5, tags"])
    assert others == {"head.classifier.weight": None, "head.classifier.bias": None}
    assert {name.partition(".")[0] for name in found.unused} == {
        "decoder",
        "decoder_norm",
        "decoder_bias",
    }
    _, found = start(T5, MODELS["t5, classes"])
    assert not found.unused


@pytest.mark.parametrize("name", MODELS)
def test_matrices_that_lie_in_one_parameter_are_counted(name: str) -> None:
    config = MODELS[name]
    parts = {"attention.qkv": 3, "attention.qkv.kv": 2, "cross_attention.kv": 2}
    parts |= {"ffn.up": 2} if config.gated else {}
    model = meta(config)
    expected = {
        own: count
        for own, _ in model.named_parameters()
        for module, count in parts.items()
        if re.fullmatch(rf"\w+\.\d\.{re.escape(module)}\.(weight|bias)", own)
    }
    assert model.stacked() == expected
    assert ("layers.0.ffn.up.bias" in expected) == (name == "bert, pre")
    assert meta(replace(config, peft=lora.Config(targets=("query", "up")))).stacked() == expected


@pytest.mark.parametrize(
    ("config", "offers", "trains"),
    [
        (BERT, {"tokens"}, {"tokens": ""}),
        (replace(BERT, causal=True), {"next_tokens"}, {"next_tokens": ""}),
        (
            replace(BERT, nsp=True),
            {"tokens", "next_sentence"},
            {"tokens": "", "next_sentence": "model.nsp=false"},
        ),
        (
            replace(BERT, **CLASSES),
            {"classification", "first_position"},
            {"classification": "model.head=language_model"},
        ),
        (
            replace(BERT, head="tagging", labels=("O", "B")),
            {"tagging"},
            {"tagging": "model.head=language_model"},
        ),
        (GPT2, {"next_tokens"}, {"next_tokens": ""}),
        (
            replace(GPT2, **CLASSES),
            {"classification", "last_position", "next_tokens"},
            {"classification": "model.head=language_model"},
        ),
        (T5, {"target_tokens"}, {"target_tokens": ""}),
        (BART, {"target_tokens"}, {"target_tokens": ""}),
        (MODELS["t5, shared"], {"target_tokens"}, {"target_tokens": ""}),
        (MODELS["t5, left to right"], {"next_tokens"}, {"next_tokens": ""}),
        (MODELS["t5, prefix"], {"prefixed_tokens"}, {"prefixed_tokens": ""}),
        (
            replace(T5, head="multiple_choice"),
            {"multiple_choice", "last_position"},
            {"multiple_choice": "model.head=language_model"},
        ),
    ],
)
def test_what_models_offer_and_have_to_train(
    config: TransformerConfig, offers: set[str], trains: dict[str, str]
) -> None:
    model = meta(config)
    noise = {"inputs.noise"} if config.normalizes_embeddings else set()
    numbered = {name for name in model.offers if "." in name}
    assert model.offers - numbered == offers | {"hidden"}
    kinds = {"layer": 4} if config.encoder_decoder else {"layer": 4, "compared": 4, "attention": 3}
    assert numbered == noise | {f"{kind}.{n}" for kind in kinds for n in range(4 - kinds[kind], 4)}
    assert dict(model.trains) == trains
    assert model.reads == frozenset()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hidden_states_of_layers_are_those_that_layers_return(name: str) -> None:
    """Of the stack that reads the text, without what is before it; the last with the final norm."""
    config = MODELS[name]
    model, given = make(config), columns(config)
    stack, layers = next(
        (own, each) for own, each in model.named_children() if isinstance(each, Stack)
    )
    seen: list[tuple[int, Tensor]] = []
    layers[0].register_forward_pre_hook(lambda _, arguments: seen.append((0, arguments[0])))
    for number, layer in enumerate(layers, 1):
        layer.register_forward_hook(lambda _, __, out, number=number: seen.append((number, out)))
    logits = predict(model, **given)
    states = dict(reversed(seen))  # the first call of a stack that serves as encoder and decoder
    norm = {"layers": "final_norm", "encoder": "encoder_norm", "decoder": "decoder_norm"}[stack]
    if getattr(model, norm) is not None:
        states[3] = getattr(model, norm)(states[3])
    expected = tuple(states[number][:, model.inserted :] for number in range(4))
    names = [f"layer.{number}" for number in range(4)]
    torch.testing.assert_close(outputs(model, *names, **given), expected, rtol=0, atol=0)
    for number in range(4):
        (alone,) = outputs(model, names[number], **given)
        assert torch.equal(alone, expected[number])
    if stack == "layers":  # beside others, too
        *beside, again = outputs(model, *names, config.predicts, **given)
        torch.testing.assert_close(beside, list(expected), rtol=0, atol=0)
        assert torch.equal(again, logits)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hidden_states_are_what_the_head_reads(name: str) -> None:
    config = MODELS[name]
    model, given = make(config), columns(config)
    seen: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    whole = predict(model, **given)
    (hidden,) = outputs(model, "hidden", **given)
    assert len(seen) == 1
    assert torch.equal(hidden, seen[0])
    assert hidden.shape == (2, 5 if config.predicts == "target_tokens" else 9, 16)
    some = torch.tensor([[4, 1], [0, 3]])
    logits, again = outputs(model, config.predicts, "hidden", **given, predicted=some)
    assert torch.equal(again, hidden)
    torch.testing.assert_close(
        logits, whole.take_along_dim(some[..., None], 1), rtol=1e-5, atol=1e-5
    )
