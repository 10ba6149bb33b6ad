"""Our BERT and RoBERTa against `transformers`, with random small models.

Both directions, both families.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DistilBertConfig,
    MPNetConfig,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
)

from samestep.errors import CheckpointError, ConfigError
from tests.outputs import fill, parameters, predict, published
from tests.parity.pairs import assert_gradients_are_equal, saved
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import albert, bert, distilbert, mpnet, roberta
from trainer.models.transformer import Transformer

FAMILIES = {
    "bert": (BertConfig, bert.Config, 0),
    "roberta": (RobertaConfig, roberta.Config, 1),
    "albert": (AlbertConfig, albert.Config, 0),
    "distilbert": (DistilBertConfig, distilbert.Config, 0),
    "mpnet": (MPNetConfig, mpnet.Config, 1),
}
CAUSAL = ("bert", "roberta")
QUERY = {
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight",
    "bert": "bert.encoder.layer.0.attention.self.query.weight",
    "distilbert": "distilbert.transformer.layer.0.attention.q_lin.weight",
    "mpnet": "mpnet.encoder.layer.0.attention.attn.q.weight",
    "roberta": "roberta.encoder.layer.0.attention.self.query.weight",
}
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
}
POOLERS = {
    "albert": ["pooler.weight", "pooler.bias", "sop_classifier.classifier.weight"],
    "bert": ["pooler.dense.weight", "pooler.dense.bias", "cls.seq_relationship.weight"],
}
"""Tensors of heads that a masked language model leaves out."""
SHAPES = {"weight": (48, 48), "bias": (48,)}
"""Of a pooler."""
OWN_SHAPE = {"albert": {"num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 20}}
"""Settings that only some families have; two groups of two layers for ALBERT."""


@dataclass
class Pair:
    """A random model of `transformers`, and ours imported from the folder that it saved."""

    family: str
    reference: PreTrainedModel
    config: bert.Config
    model: Transformer
    pad: int

    def prefix(self, name: str) -> str:
        return f"{self.family}.{name}"


def make(family: str, folder: Path, **changes: object) -> Pair:
    reference_config, _, pad = FAMILIES[family]
    theirs = AutoModelForCausalLM if changes.get("is_decoder") else AutoModelForMaskedLM
    reference = theirs.from_config(
        reference_config(**{**SHAPE, **OWN_SHAPE.get(family, {}), **changes}),
        attn_implementation="eager",
    ).eval()
    saved(reference, folder)
    config, model = load(family, folder)
    return Pair(family, reference, config, model, pad)


def load(family: str, folder: Path) -> tuple[bert.Config, Transformer]:
    tree, tensors = load_folder(folder)
    config = read_config(FAMILIES[family][1], tree)
    model = config.build().eval()
    fill(model, codec_of(config).import_tensors(tensors))
    return config, model


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make(request.param, tmp_path / "reference")


def random_tokens(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 1000, (length,), generator=generator) for length in lengths]


def padded(pair: Pair, *lengths: int) -> dict[str, Tensor]:
    """A row for each length, padded to 24 positions; every real position is predicted."""
    tokens = torch.full((len(lengths), 24), pair.pad)
    for row, ids in enumerate(random_tokens(*lengths)):
        tokens[row, : len(ids)] = ids
    segments = (torch.arange(24) < torch.tensor(lengths)[:, None]).int()
    return {
        "tokens": tokens,
        "segments": segments,
        "positions": torch.arange(24).expand(len(lengths), -1),
    }


def reference_logits(pair: Pair, batch: dict[str, Tensor], **inputs: Tensor) -> Tensor:
    mask = batch["segments"]
    logits: Tensor = pair.reference(input_ids=batch["tokens"], attention_mask=mask, **inputs).logits
    return logits[mask.bool()]


def test_logits_loss_and_gradients_are_equal(pair: Pair):
    batch = padded(pair, 24, 13, 1)
    labels = torch.randint(0, 1000, (38,), generator=torch.Generator().manual_seed(2))
    theirs = reference_logits(pair, batch)
    ours = predict(pair.model, **batch)[batch["segments"].bool()]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    losses = [F.cross_entropy(logits, labels) for logits in (theirs, ours)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    assert_gradients_are_equal(pair.config, pair.reference, pair.model)


def test_parameters_are_as_many(pair: Pair):
    counts = [sum(p.numel() for p in model.parameters()) for model in (pair.model, pair.reference)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations(family: str, activation: str, tmp_path: Path):
    pair = make(family, tmp_path / "reference", hidden_act=activation)
    batch = padded(pair, 24, 7)
    ours = predict(pair.model, **batch)[batch["segments"].bool()]
    torch.testing.assert_close(ours, reference_logits(pair, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
def test_left_to_right(family: str, tmp_path: Path):
    """A causal model equals theirs, and so does what we export as it is loaded by them."""
    pair = make(family, tmp_path / "reference", is_decoder=True)
    assert pair.config.causal
    batch = padded(pair, 24, 9)
    ours = predict(pair.model, **batch)[batch["segments"].bool()]
    torch.testing.assert_close(ours, reference_logits(pair, batch), rtol=1e-5, atol=1e-5)
    save_folder(
        tmp_path / "ours",
        *published(pair.config, parameters(pair.model)),
    )
    pair.reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    torch.testing.assert_close(ours, reference_logits(pair, batch), rtol=1e-5, atol=1e-5)


def test_token_types(tmp_path: Path):
    pair = make("bert", tmp_path / "reference")
    batch = padded(pair, 24, 9)
    types = (torch.arange(24) > 4).long().expand(2, -1)
    ours = predict(pair.model, **batch, token_types=types)[batch["segments"].bool()]
    torch.testing.assert_close(
        ours, reference_logits(pair, batch, token_type_ids=types), rtol=1e-5, atol=1e-5
    )


def test_packed_documents_get_the_logits_they_get_alone(pair: Pair):
    first, second = random_tokens(9, 12)
    packed = {
        "tokens": torch.cat([first, second, torch.full((3,), pair.pad)])[None],
        "segments": torch.tensor([[1] * 9 + [2] * 12 + [0] * 3]),
        "positions": torch.cat(
            [torch.arange(9), torch.arange(12), torch.zeros(3, dtype=torch.int64)]
        )[None],
    }
    ours = predict(pair.model, **packed)[0, :21]
    theirs = torch.cat(
        [pair.reference(input_ids=document[None]).logits[0] for document in (first, second)]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_we_export(family: str, tied: bool, tmp_path: Path):
    pair = make(family, tmp_path / "reference", tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in pair.model.parameters():  # weights that only we have
            parameter.mul_(1.1)
    exported = tmp_path / "exported"
    save_folder(exported, *published(pair.config, parameters(pair.model)))

    pair.reference, report = AutoModelForMaskedLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(pair.reference.config) is FAMILIES[family][0]
    batch = padded(pair, 24, 5)
    ours = predict(pair.model, **batch)[batch["segments"].bool()]
    torch.testing.assert_close(ours, reference_logits(pair, batch), rtol=1e-5, atol=1e-5)

    config, model = load(family, exported)
    assert config == pair.config
    assert all(
        torch.equal(parameters(model)[name], value)
        for name, value in parameters(pair.model).items()
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_import_then_export_changes_no_bit(family: str, tied: bool, tmp_path: Path):
    pair = make(family, tmp_path / "reference", tie_word_embeddings=tied)
    _, tensors = load_folder(tmp_path / "reference")
    again = codec_of(pair.config).export_tensors(codec_of(pair.config).import_tensors(tensors))
    unused = (
        {codec_of(pair.config).head_names["bias"]} if not tied else set()
    )  # transformers computes with decoder.bias alone
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name], tensors[name]) for name in set(tensors) - unused)


def test_older_checkpoints_are_understood(pair: Pair, caplog: pytest.LogCaptureFixture):
    tensors = {name: value.detach() for name, value in pair.reference.named_parameters()}
    expected = codec_of(pair.config).import_tensors(tensors)
    old = {
        name.removeprefix(pair.prefix(""))
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    old[f"{codec_of(pair.config).head_names['decoder']}.weight"] = old[
        "embeddings.word_embeddings.weight"
    ]
    old[f"{codec_of(pair.config).head_names['decoder']}.bias"] = old.pop(
        codec_of(pair.config).head_names["bias"]
    )
    extra = ["embeddings.position_ids", *POOLERS.get(pair.family, POOLERS["bert"])]
    with caplog.at_level(logging.INFO):
        imported = codec_of(pair.config).import_tensors(
            {**old, **{each: torch.zeros(SHAPES.get(each.rpartition(".")[2], 1)) for each in extra}}
        )
    assert all(torch.equal(imported[name], value) for name, value in expected.items())
    assert len(imported) == len(expected)
    assert "position_ids" not in caplog.text  # counts of positions, which no model misses
    assert all(name in caplog.text for name in extra[1:])


def test_foreign_tensors_are_refused_by_name(pair: Pair):
    tensors = {name: value.detach() for name, value in pair.reference.named_parameters()}
    query = QUERY[pair.family]
    embedding = pair.prefix("embeddings.word_embeddings.weight")
    decoder = f"{codec_of(pair.config).head_names['decoder']}.weight"
    for change, message in [
        ({query: None}, f"{query} is missing"),
        ({f"{query}.more": torch.zeros(2)}, f"{query}.more is unexpected"),
        ({embedding: torch.zeros(999, 9)}, f"{embedding} is .999, 9. instead of .1000, "),
        ({query: torch.zeros(48, 7)}, f"{query} is .48, 7. instead of .48, 48."),
        ({decoder: torch.zeros_like(tensors[embedding])}, "differs from.*tie_word_embeddings"),
    ]:
        wrong = {name: value for name, value in {**tensors, **change}.items() if value is not None}
        with pytest.raises(CheckpointError, match=message):
            codec_of(pair.config).import_tensors(wrong)
    with pytest.raises(CheckpointError, match=r"is missing.* and \d+ more"):
        codec_of(pair.config).import_tensors({})
    stored = parameters(pair.model)
    with pytest.raises(CheckpointError, match=r"head\.bias is missing"):
        codec_of(pair.config).export_tensors(
            {name: value for name, value in stored.items() if name != "head.bias"}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"hidden_act": "silu"}, "hidden_act 'silu'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "wide"}, "must be a whole number, not 'wide'"),
        ({"num_attention_heads": 7}, "not a multiple of heads 7"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_architectures_are_refused(family: str, change: dict[str, object], message: str):
    if family == "distilbert":  # the same keys have other names there, or do not exist
        names = {"hidden_size": "dim", "hidden_act": "activation", "num_attention_heads": "n_heads"}
        change = {names.get(key, key): value for key, value in change.items()}
        message = message.replace("hidden_act", "activation").replace("hidden_size", "dim")
        if change.keys() & {"position_embedding_type", "add_cross_attention"}:
            change, message = {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds True"
    if family == "mpnet" and change.keys() & {"position_embedding_type", "add_cross_attention"}:
        change = {"relative_attention_num_buckets": 64}
        message = "relative_attention_num_buckets 64, but this kind of mpnet needs 32"
    reference: PretrainedConfig = FAMILIES[family][0](**SHAPE)
    tree = {
        key: value for key, value in {**reference.to_dict(), **change}.items() if value is not None
    }
    with pytest.raises(ConfigError, match=message):
        read_config(FAMILIES[family][1], tree)


def test_roberta_positions_count_from_its_padding_id():
    tree = {**RobertaConfig(**SHAPE).to_dict(), "pad_token_id": 0}
    with pytest.raises(ConfigError, match="pad_token_id 0"):
        read_config(roberta.Config, tree)


@pytest.mark.parametrize("change", [{"norm": "pre"}, {"activation": "geglu"}])
def test_what_transformers_lacks_is_not_exported(change: dict[str, str]):
    with pytest.raises(ConfigError, match="cannot be exported"):
        codec_of(bert.Config(**change)).to_huggingface()
