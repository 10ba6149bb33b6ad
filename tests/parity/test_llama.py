"""Llama and its relatives against their classes in transformers, in both directions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from samestep.errors import ConfigError
from tests.outputs import predict
from tests.parity.heads import names_of
from tests.parity.pairs import assert_gradients_are_equal, exported, load, padded_rows, saved
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import llama
from trainer.models.inputs import Inputs
from trainer.training.weights.loading import load_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 60,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LENGTH = {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {**LLAMA3, **LENGTH},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **LENGTH},
    "yarn, all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "attention_factor": 1.5,
        **LENGTH,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    **{
        f"llama, {name}": ("Llama", {"rope_parameters": {"rope_theta": 500.0, **rope}})
        for name, rope in ROPES.items()
    },
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-6}),
    "olmo2, heads of another width": ("Olmo2", {"head_dim": 12, "tie_word_embeddings": True}),
    "eurobert": ("EuroBert", {"mask_token_id": 3}),
    "eurobert, tied": ("EuroBert", {"mask_token_id": 3, "tie_word_embeddings": True}),
}
LONG = partial(pytest.param, marks=pytest.mark.long)
QUICK = ("llama", "llama, llama3", "mistral", "qwen3", "olmo2")
each_case = pytest.mark.parametrize(
    "case",
    [case if case in QUICK else LONG(case) for case in CASES],
)


def make(case: str, folder: Path, ending: str = "", **changes: Any) -> tuple[Any, Any, Any]:
    """A random model of transformers, saved in the folder, and ours imported from it."""
    begin, settings = CASES[case]
    ending = ending or ("ForMaskedLM" if begin == "EuroBert" else "ForCausalLM")
    config = getattr(transformers, f"{begin}Config")(**SHAPE | settings | changes)
    config._attn_implementation = "eager"
    theirs = getattr(transformers, begin + ending)(config).eval()
    return saved(theirs, folder, 0.1), *load(llama.Config, folder)


@each_case
def test_logits_loss_and_gradients_are_equal(case: str, tmp_path: Path) -> None:
    theirs, config, model = make(case, tmp_path)
    batch = padded_rows(24, 13, 2)
    real = batch["segments"].bool()
    labels = torch.where(real, batch["tokens"], -100)
    found = theirs(input_ids=batch["tokens"], attention_mask=batch["segments"], labels=labels)
    logits = predict(model, **batch)
    torch.testing.assert_close(logits[real], found.logits[real], rtol=1e-5, atol=1e-5)
    if config.causal:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    else:
        loss = F.cross_entropy(logits[real], labels[real])
    torch.testing.assert_close(loss, found.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    found.loss.backward()
    assert_gradients_are_equal(config, theirs, model)


@each_case
def test_transformers_loads_what_we_export(case: str, tmp_path: Path) -> None:
    theirs, config, model = make(case, tmp_path / "theirs")
    config = replace(config, theta=config.theta * 2)
    changed = config.build().eval()
    changed.load_state_dict(model.state_dict())
    auto = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModelForMaskedLM
    again = exported(auto, config, changed, tmp_path / "ours")
    assert type(again) is type(theirs)
    batch = padded_rows(24, 13)
    real = batch["segments"].bool()
    found = again(input_ids=batch["tokens"], attention_mask=batch["segments"]).logits
    torch.testing.assert_close(predict(changed, **batch)[real], found[real], rtol=1e-5, atol=1e-5)
    assert load(llama.Config, tmp_path / "ours")[0] == config
    assert load_weights(tmp_path / "ours").config == config


@each_case
def test_packed_sequences_get_the_logits_they_get_alone(case: str, tmp_path: Path) -> None:
    theirs, _, model = make(case, tmp_path)
    tokens = padded_rows(22)["tokens"]
    packed = {
        "tokens": F.pad(tokens, (0, 3)),
        "segments": torch.tensor([[1] * 12 + [2] * 10 + [0] * 3]),
        "positions": torch.tensor([[*range(12), *range(10), 0, 0, 0]]),
    }
    found = predict(model, **packed)[:, :22]
    alone = [theirs(input_ids=part).logits for part in tokens.split([12, 10], 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


@each_case
def test_greedy_tokens_are_those_of_generate(case: str, tmp_path: Path) -> None:
    """Prompts of different lengths, padded at the left."""
    theirs, config, model = make(case, tmp_path)
    if not config.causal:
        pytest.skip("it generates nothing")
    prompts = padded_rows(7, 3, 1)
    order = prompts["segments"].argsort(dim=1, stable=True)
    tokens, segments = (prompts[name].gather(1, order) for name in ("tokens", "segments"))
    logits, cache = model.start(Inputs(tokens, segments), capacity=20)
    ours = [logits.argmax(-1)]
    for _ in range(12):
        ours.append(model.step(ours[-1], cache).argmax(-1))
    assert cache.layers[0]._pair[0].shape[1] == config.keys
    found = theirs.generate(
        tokens,
        attention_mask=segments,
        max_new_tokens=13,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found[:, 7:].tolist() == torch.stack(ours, 1).tolist()


HEADS: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "classes": ("llama", "SequenceClassification", ("no", "maybe", "yes"), {}),
    "number": ("qwen3", "SequenceClassification", ("similarity",), {}),
    "classes after output norms": ("olmo2", "SequenceClassification", ("no", "yes"), {}),
    "tags": ("qwen2", "TokenClassification", ("O", "B", "I"), {}),
    **{
        f"classes of an encoder, {pooling}": (
            *("eurobert", "SequenceClassification", ("no", "maybe", "yes")),
            {"classifier_pooling": pooling},
        )
        for pooling in ("bos", "mean", "late")
    },
    "tags of an encoder": ("eurobert", "TokenClassification", ("O", "B", "I"), {}),
}


@pytest.mark.parametrize("name", ["classes", *(LONG(name) for name in HEADS if name != "classes")])
def test_heads_of_tasks(name: str, tmp_path: Path) -> None:
    case, ending, labels, changes = HEADS[name]
    theirs, config, model = make(
        case, tmp_path / "theirs", f"For{ending}", **names_of(labels), **changes
    )
    batch = padded_rows(24, 13, 2)
    real = batch["segments"].bool()
    expected = theirs(input_ids=batch["tokens"], attention_mask=batch["segments"]).logits
    if config.head == "tagging":
        ours, expected = predict(model, **batch)[real], expected[real]
    else:
        last = batch["segments"].sum(1, keepdim=True) - 1
        read = last if config.causal else torch.zeros_like(last)
        ours = predict(model, **batch, predicted=read)[:, 0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    ours.square().mean().backward()
    expected.square().mean().backward()
    assert_gradients_are_equal(config, theirs, model)
    auto = getattr(transformers, f"AutoModelFor{ending}")
    assert type(exported(auto, config, model, tmp_path / "ours")) is type(theirs)
    assert load(llama.Config, tmp_path / "ours")[0] == config


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias True"),
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "'longrope'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {**ROPES["yarn"], "truncate": False}}, "truncate"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "kinds full_attention, sl"),
    (
        *("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        "Only one kind for all layers",
    ),
    ("smollm3", {"no_rope_layers": [1, 0, 0]}, "no_rope_layers without an interval"),
    ("mixtral", {}, "model_type 'mixtral', and this family has llama, mistral"),
    (
        "eurobert",
        {"architectures": ["EuroBertForSequenceClassification"], "classifier_pooling": "max"},
        "classifier_pooling 'max'. Supported are bos, mean, late",
    ),
]


@pytest.mark.parametrize(("model_type", "change", "message"), REFUSED)
def test_what_we_do_not_compute_is_refused(
    model_type: str, change: dict[str, Any], message: str
) -> None:
    tree = {**SHAPE, "rms_norm_eps": 1e-6, "hidden_act": "silu", "model_type": model_type}
    with pytest.raises(ConfigError, match=message):
        read_config(llama.Config, {**tree, **change})


OLMO2 = {"output_norm": True, "joint_qk_norm": True}
SMALL = llama.Config(vocab_size=50, layers=4, width=16, heads=2, kv_heads=1, head_width=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True, "qk_norm": True}, "qkv_bias and qk_norm cannot be exported together"),
        ({"causal": False, "window": 4}, "causal: false and window cannot"),
        ({"unplaced_every": 2, "window": 4}, "unplaced_every and window cannot"),
        ({**OLMO2, "window": 4}, "output_norm and window cannot"),
        ({**OLMO2, "qkv_bias": True}, "qkv_bias and output_norm cannot"),
        ({"output_norm": True}, "output_norm True with joint_qk_norm False cannot be exported"),
        ({"joint_qk_norm": True}, "output_norm False with joint_qk_norm True cannot be exported"),
        ({**OLMO2, "head": "tagging", "labels": ("a", "b")}, "a tagging head cannot be exported"),
        ({"activation": "geglu"}, "activation geglu cannot be exported"),
        ({"head": "question_answering"}, "question_answering head cannot be exported"),
        ({"head": "multiple_choice", "causal": False}, "multiple_choice head cannot be exported"),
    ],
)
def test_what_transformers_lacks_is_not_exported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_of(replace(SMALL, **changes)).to_huggingface()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3, "heads": 4}, "kv_heads is 3, which does not divide heads 4"),
        ({"head_width": 7}, "head_width is 7"),
        ({"window": 0}, "window is 0"),
        ({"qk_norm": True, "joint_qk_norm": True}, "qk_norm and joint_qk_norm are true"),
        ({"theta": 0.0}, "theta is 0"),
        ({"pooling": "mean"}, "pooling is mean, which is for causal: false"),
        ({"unplaced_every": -1}, "unplaced_every is -1"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


def test_old_files_are_read() -> None:
    """Without grouped heads, with rotary settings beside the others, a buffer, and old names."""
    tree = {
        **{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"},
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = read_config(llama.Config, tree)
    assert config.scaling is not None
    assert (config.keys, config.head_width, config.theta) == (6, 8, 5e5)
    assert (config.scaling.kind, config.scaling.factor, config.tied) == ("linear", 2.0, False)
    length = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": None}
    scaling = read_config(llama.Config, {**tree, "rope_scaling": length}).scaling
    assert scaling is not None
    assert scaling.original == SHAPE["max_position_embeddings"]
    named = {"model_type": "eurobert", "architectures": ["EuroBertForSequenceClassification"]}
    assert read_config(llama.Config, {**tree, **named, "clf_pooling": "mean"}).pooling == "mean"
    tensors = codec_of(config).export_tensors(config.build().state_dict())
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert codec_of(config).import_tensors(old).keys() == config.build().state_dict().keys()


def test_the_released_size_and_groups_of_layers() -> None:
    """134.5M parameters of SmolLM-135M; every fourth layer of SmolLM3 is a group of its own."""
    with torch.device("meta"):
        model = llama.Config().build()
        other = replace(SMALL, layers=8, unplaced_every=4).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    groups = [(group.start, group.stop) for group in other.scan_groups()]
    assert groups == [(0, 3), (3, 4), (4, 7), (7, 8)]
