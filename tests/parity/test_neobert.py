"""NeoBERT against its published definition, in and out of its files, and bad settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.neobert_reference import (
    RELEASED,
    SHAPE,
    Encoder,
    MaskedLM,
    SequenceClassification,
)
from samestep.errors import CheckpointError, ConfigError
from tests.outputs import fill, outputs, parameters, predict, published, random_parameters
from tests.parity.pairs import add_noise, assert_gradients_are_equal, close, load
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import neobert
from trainer.models.peft.huggingface import export_adapter
from trainer.models.peft.kinds import lora, prefix, prompt
from trainer.publish import model_card
from trainer.training.weights.loading import load_weights

LABELS = ("no", "maybe", "yes")
ROWS: dict[str, Tensor] = {
    # A padded row, and one of two packed sequences and padding.
    "tokens": torch.tensor([[*range(5, 25), *[0] * 4], [*range(30, 52), 0, 0]]),
    "segments": torch.tensor([[1] * 20 + [0] * 4, [1] * 9 + [2] * 13 + [0] * 2]),
    "positions": torch.tensor([[*range(24)], [*range(9), *range(13), 0, 0]]),
}
REAL = ROWS["segments"] > 0


def save(theirs: nn.Module, folder: Path, name: str = "NeoBERTLMHead", **settings: Any) -> None:
    """Saves as the release does, with weights larger than initial ones."""
    add_noise(theirs, 0.1)
    folder.mkdir(exist_ok=True)
    content = {**SHAPE, "architectures": [name], "auto_map": {"AutoModel": "model.NeoBERT"}}
    (folder / "config.json").write_text(json.dumps(content | settings))
    save_file(dict(theirs.state_dict()), folder / "model.safetensors")


@pytest.mark.parametrize("inner", [60, 50])
def test_states_logits_loss_and_gradients_are_equal(inner: int, tmp_path: Path) -> None:
    theirs = MaskedLM({**SHAPE, "intermediate_size": inner})
    save(theirs, tmp_path, intermediate_size=inner)
    config, model = load(neobert.Config, tmp_path)
    assert config.ffn_width == 40
    expected = theirs(**ROWS)
    hidden, logits = outputs(model, "hidden", "tokens", **ROWS)
    close(hidden[REAL], theirs.model(**ROWS)[REAL])
    close(logits[REAL], expected[REAL])
    losses = [F.cross_entropy(each[REAL], ROWS["tokens"][REAL]) for each in (logits, expected)]
    close(*losses)
    for loss in losses:
        loss.backward()
    assert_gradients_are_equal(config, theirs, model)


def test_classification_reads_the_first_position(tmp_path: Path) -> None:
    theirs = SequenceClassification(SHAPE, len(LABELS))
    names = {"id2label": dict(enumerate(LABELS)), "classifier_dropout": 0.3}
    save(theirs, tmp_path, "NeoBERTForSequenceClassification", **names)
    config, model = load(neobert.Config, tmp_path)
    assert (config.head, config.labels, config.head_dropout) == ("classification", LABELS, 0.3)
    rows = {name: column[:1] for name, column in ROWS.items()}
    expected = theirs(**rows)
    logits = predict(model, **rows, predicted=torch.zeros(1, 1).long())[:, 0]
    close(logits, expected)
    logits.square().mean().backward()
    expected.square().mean().backward()
    assert_gradients_are_equal(config, theirs, model)
    tree, tensors = published(config, parameters(model))
    assert tree["architectures"] == ["NeoBERTForSequenceClassification"]
    close(tensors, dict(theirs.state_dict()))
    assert read_config(neobert.Config, tree, tensors) == config


def test_the_export_has_the_names_and_rows_of_the_release(tmp_path: Path) -> None:
    theirs = MaskedLM(SHAPE)
    save(theirs, tmp_path)
    config, model = load(neobert.Config, tmp_path)
    tree, tensors = published(config, parameters(model))
    again = MaskedLM(tree)
    again.load_state_dict(tensors)
    assert all(torch.equal(again.state_dict()[n], each) for n, each in theirs.state_dict().items())
    assert {name: tree[name] for name in SHAPE} == SHAPE
    code = tree["auto_map"]["AutoModelForMaskedLM"]
    assert code == "chandar-lab/NeoBERT--model.NeoBERTLMHead"
    assert read_config(neobert.Config, tree, tensors) == config


def test_a_card_says_that_the_code_is_on_the_hub(tmp_path: Path) -> None:
    save(MaskedLM(SHAPE), tmp_path)
    weights = load_weights(tmp_path)
    packages = model_card.packages(weights, tmp_path)
    card = model_card.write(weights, str(tmp_path), "mine", packages, "[MASK]")
    assert "pip install torch transformers xformers" in card
    assert "`trust_remote_code=True` runs the code of\n[chandar-lab/NeoBERT](https://" in card
    assert "pipeline('fill-mask', model='mine', trust_remote_code=True)" in card


def test_the_bare_encoder_is_an_embedding_model(tmp_path: Path) -> None:
    theirs = Encoder(SHAPE)
    save(theirs, tmp_path, "NeoBERT")
    weights = load_weights(tmp_path)
    assert weights.config.head == "embedding"
    (hidden,) = outputs(weights.model(), "embedding", **ROWS)
    close(hidden[REAL], theirs(**ROWS)[REAL])
    tree, tensors = published(weights.config, dict(weights.tensors))
    assert tree["architectures"] == ["NeoBERT"]
    assert tensors.keys() == {f"model.{name}" for name in theirs.state_dict()}


def test_an_adapter_changes_the_published_matrices() -> None:
    """LoRA of queries and gates, exported for `peft`: W + scale * B A, in their order of rows."""
    adapted = neobert.Config(
        vocab_size=60,
        layers=1,
        width=16,
        heads=2,
        ffn_width=24,
        peft=lora.Config(targets=("query", "gate"), rank=2),
    )
    model = adapted.build().eval()
    fill(model, random_parameters(model))
    content, adapter = export_adapter(adapted, parameters(model), "base")
    base = replace(adapted, peft=None)
    names = dict(base.build().named_parameters())
    own = {name: each for name, each in parameters(model).items() if name in names}
    tree, tensors = published(base, own)
    scale = content["lora_alpha"] / content["r"]
    for module in ("qkv", "ffn.w12"):
        (a, b) = (
            next(each for name, each in adapter.items() if f"{module}.lora_{matrix}." in name)
            for matrix in "AB"
        )
        tensors[f"model.transformer_encoder.0.{module}.weight"] += scale * b @ a
    theirs = MaskedLM(tree)
    theirs.load_state_dict(tensors)
    close(predict(model, **ROWS)[REAL], theirs(**ROWS)[REAL])


@pytest.mark.parametrize("kind", [prompt.Config(3), prefix.Config(3)])
def test_virtual_tokens_are_not_exported(kind: Any) -> None:
    """The published classifier takes no embeddings, and no cache."""
    task: dict[str, Any] = {"head": "classification", "labels": LABELS, "layers": 1}
    config = neobert.Config(**task, width=16, heads=2, ffn_width=24, vocab_size=60, peft=kind)
    with pytest.raises(ConfigError, match="as samestep does for neobert with a classification"):
        export_adapter(config, parameters(config.build()), "base")


def test_initial_weights_are_uniform() -> None:
    """Within 0.02 and of its deviation; a task's head has the deviation 0.02."""
    with torch.device("meta"):
        model = neobert.Config(head="classification", labels=LABELS, layers=1).build()
    limits = {"layers.0.ffn.up.weight": 0.02, "head.pooler.weight": 0.02 * 3**0.5}
    for name, limit in limits.items():
        values = model.initial_values(name, 0, 20_000, seed=0)
        assert 0.999 * limit < values.abs().max() <= limit
        assert float(values.std()) == pytest.approx(limit / 3**0.5, rel=0.02)


def test_the_released_size() -> None:
    """245.1 million parameters; the paper counts 250."""
    with torch.device("meta"):
        model, theirs = neobert.Config().build(), MaskedLM(RELEASED)
    assert sum(each.numel() for each in model.parameters()) == 245_136_954
    assert sum(each.numel() for each in theirs.parameters()) == 245_136_954
    assert read_config(neobert.Config, RELEASED) == neobert.Config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type_vocab": 2}, "type_vocab is 2, but NeoBERT has none"),
        ({"tied": True}, "tied is True, but NeoBERT has none"),
        ({"norm": "post"}, "NeoBERT has norm pre and swiglu"),
        ({"activation": "geglu"}, "NeoBERT has norm pre and swiglu"),
        ({"width": 36, "heads": 12}, "rotary positions need an even number"),
        ({"head_dropout": 1.0}, "head_dropout is 1.0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        neobert.Config(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": False}, "rope False"),
        ({"rms_norm": False}, "rms_norm False"),
        ({"ngpt": True}, "ngpt True"),
        ({"hidden_act": "GELU"}, "hidden_act 'gelu'. Supported are swiglu"),
        ({"rope_theta": 500.0}, "rope_theta 500.0"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"model_type": "bert"}, "model_type 'bert'"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(neobert.Config, {**SHAPE, "hidden_act": "SwiGLU", **change})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"causal": True}, "no left-to-right model"),
        ({"head": "question_answering"}, "no question_answering head"),
        ({"ffn_width": 20}, "ffn_width 20 cannot be exported"),
    ],
)
def test_exports_that_the_published_code_lacks(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        codec_of(neobert.Config(**settings)).to_huggingface()


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Of the code that trained it, gated units may be three matrices: w1, w2 and w3."""
    theirs = MaskedLM(SHAPE)
    save(theirs, tmp_path)
    tensors = dict(theirs.state_dict())
    joined = tensors.pop("model.transformer_encoder.0.ffn.w12.weight")
    for name, half in zip(("w1", "w2"), joined.chunk(2), strict=True):
        tensors[f"model.transformer_encoder.0.ffn.{name}.weight"] = half.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ffn\.w12\.weight is missing"):
        load_weights(tmp_path)
