"""DeBERTa v1 and v2 against their classes in transformers, and the enhanced mask decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from samestep.errors import CheckpointError, ConfigError
from tests.outputs import fill, outputs, parameters
from tests.parity.pairs import assert_gradients_are_equal, exported, load, saved
from trainer.checkpoint.huggingface import load_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import deberta, deberta_v2
from trainer.models.layers.disentangled import place_table

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
V2 = {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
CONVOLUTION = {**V2, "conv_kernel_size": 3, "conv_act": "gelu"}
KINDS: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "v1": (deberta, DebertaConfig, "Deberta", {}),
    "v2": (deberta_v2, DebertaV2Config, "DebertaV2", V2),
    "v2 with a convolution": (deberta_v2, DebertaV2Config, "DebertaV2", CONVOLUTION),
}


def make(kind: str, folder: Path, ending: str = "MaskedLM", **changes: Any) -> tuple[Any, Any, Any]:
    """A random model of transformers, saved in the folder, and ours imported from it."""
    module, config, prefix, settings = KINDS[kind]
    theirs = getattr(transformers, f"{prefix}For{ending}")(config(**SHAPE, **settings, **changes))
    theirs.eval()
    return saved(theirs, folder, 0.1), *load(module.Config, folder)


def rows(length: int = 40) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(length) < torch.tensor([length, 23, 5])[:, None]
    tokens = torch.randint(5, 100, real.shape, generator=generator)
    return {"tokens": torch.where(real, tokens, 0), "segments": real.int()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("legacy", [True, False])
def test_masked_lm(kind: str, legacy: bool, tmp_path: Path) -> None:
    """Logits, loss and every gradient; both of their names of the head."""
    theirs, config, ours = make(kind, tmp_path / "theirs", legacy=legacy)
    columns = rows()
    real = columns["segments"] > 0
    (logits,) = outputs(ours, "tokens", **columns)
    found = theirs(input_ids=columns["tokens"], attention_mask=columns["segments"]).logits
    torch.testing.assert_close(logits[real], found[real], rtol=1e-5, atol=1e-5)
    losses = [F.cross_entropy(each[real], columns["tokens"][real]) for each in (logits, found)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    assert_gradients_are_equal(config, theirs, ours)

    folder = tmp_path / "ours"
    again = exported(type(theirs), config, ours, folder)
    once_more = again(input_ids=columns["tokens"], attention_mask=columns["segments"]).logits
    torch.testing.assert_close(once_more[real], found[real], rtol=1e-6, atol=1e-6)
    assert load(KINDS[kind][0].Config, folder)[0] == config


HEAD_OF_V3 = {
    f"mask_predictions.{part}.{kind}"
    for part in ("dense", "LayerNorm", "classifier")
    for kind in ("weight", "bias")
}


@pytest.mark.parametrize(
    ("kind", "names"),
    [("v1", {"deberta.embeddings.position_embeddings.weight"}), ("v2", HEAD_OF_V3)],
)
def test_released_checkpoints_have_tensors_that_nothing_reads(
    kind: str, names: set[str], tmp_path: Path
) -> None:
    _, config, ours = make(kind, tmp_path)
    tensors = load_folder(tmp_path)[1]
    released = tensors | {name: torch.ones(3) for name in names}
    assert read_config(KINDS[kind][0].Config, load_folder(tmp_path)[0], released) == config
    torch.testing.assert_close(
        codec_of(config).import_tensors(released), parameters(ours), rtol=0, atol=0
    )
    with pytest.raises(CheckpointError, match=r"deberta\.other\.weight is unexpected"):
        codec_of(config).import_tensors(released | {"deberta.other.weight": torch.ones(3)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ending", "head"),
    [
        ("SequenceClassification", "classification"),
        ("TokenClassification", "tagging"),
        ("QuestionAnswering", "question_answering"),
        ("MultipleChoice", "multiple_choice"),
    ],
)
def test_heads(kind: str, ending: str, head: str, tmp_path: Path) -> None:
    if (kind, head) == ("v1", "multiple_choice"):
        return  # transformers has no such class
    labels = {"num_labels": 3} if head in ("classification", "tagging") else {}
    theirs, config, ours = make(kind, tmp_path, ending, **labels)
    assert config.head == head
    columns = rows()
    pooled = head in ("classification", "multiple_choice")
    at = torch.zeros(3, 1, dtype=torch.long) if pooled else None
    (logits,) = outputs(ours, head, **columns, predicted=at)
    inputs = {"input_ids": columns["tokens"], "attention_mask": columns["segments"]}
    if head == "multiple_choice":
        inputs = {name: each[:, None] for name, each in inputs.items()}
    found = theirs(**inputs)
    if head == "question_answering":
        expected = torch.stack((found.start_logits, found.end_logits), -1)
    else:
        expected = found.logits.view(3, 1, -1) if pooled else found.logits
    real = torch.ones(3, 1, dtype=torch.bool) if pooled else columns["segments"] > 0
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)
    logits[real].square().mean().backward()
    expected[real].square().mean().backward()
    assert_gradients_are_equal(config, theirs, ours)


@pytest.mark.parametrize(
    ("length", "buckets", "farthest"), [(512, 256, 512), (128, 256, 512), (64, 8, 64)]
)
def test_places_are_those_of_the_released_code(length: int, buckets: int, farthest: int) -> None:
    layer = torch.empty(1, length, 4)
    expected = build_relative_position(layer, layer, buckets, farthest)[0]
    expected = (expected + buckets).clamp(0, 2 * buckets - 1)
    assert place_table(length, buckets, farthest).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_do_not_see_each_other(kind: str, tmp_path: Path) -> None:
    """The convolution stops at the borders of sequences, too."""
    _, _, model = make(kind, tmp_path)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, 100, (1, 30), generator=generator)
    segments = torch.tensor([[1] * 12 + [2] * 15 + [0] * 3])
    (whole,) = outputs(model, "tokens", tokens=tokens, segments=segments)
    for first, last in ((0, 12), (12, 27)):
        (alone,) = outputs(model, "tokens", tokens=tokens[:, first:last])
        torch.testing.assert_close(alone[0], whole[0, first:last], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_enhanced_mask_decoder(kind: str, tmp_path: Path) -> None:
    """As in the released code: the last layer twice, by their layers, from absolute positions."""
    theirs, config, _ = make(kind, tmp_path)
    ours = replace(config, mask_decoder=True).build().eval()
    table = torch.randn(64, 48, generator=torch.Generator().manual_seed(5))
    exported = codec_of(config).import_tensors(load_folder(tmp_path)[1])
    fill(ours, {**exported, "decoder_positions.weight": table})
    tokens = rows()["tokens"][:1]
    predicted = torch.tensor([[3, 7, 30]])
    (logits,) = outputs(ours, "tokens", tokens=tokens, predicted=predicted)

    encoder = theirs.deberta.encoder
    hidden = theirs.deberta(tokens, output_hidden_states=True).hidden_states
    relative, mask = encoder.get_rel_embedding(), torch.ones(1, 1, 40, 40)
    places = encoder.get_rel_pos(hidden[0])
    layer, queries = encoder.layer[-1], hidden[-2] + table[:40]
    for _ in range(2):
        queries = _cross(kind, layer, queries, hidden[-2], mask, places, relative)
    expected = theirs.cls(queries)[:, predicted[0]]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    logits.sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert (
        codec_of(config).export_tensors(parameters(ours)).keys()
        == codec_of(config).export_tensors(exported).keys()
    )


def _cross(
    kind: str,
    layer: Any,
    queries: Tensor,
    hidden: Tensor,
    mask: Tensor,
    places: Tensor,
    relative: Tensor,
) -> Tensor:
    """A layer of transformers from queries to hidden states."""
    if kind != "v1":
        found = layer(
            hidden, mask, query_states=queries, relative_pos=places, rel_embeddings=relative
        )
        return found[0]
    # Version 1 of transformers cannot do that: both at once, and the rows of the queries.
    own = layer.attention.self
    heads = own.num_attention_heads
    weight = own.in_proj.weight.view(heads, 3, -1, 48)

    def part(x: Tensor, index: int) -> Tensor:
        return torch.einsum("bsd,hkd->bhsk", x, weight[:, index])

    query = part(queries, 0) + own.q_bias.view(heads, 1, -1)
    value = part(hidden, 2) + own.v_bias.view(heads, 1, -1)
    key = part(hidden, 1)
    place_key = own.pos_proj(relative).view(-1, heads, query.shape[-1]).transpose(0, 1)
    place_query = own.pos_q_proj(relative).view(-1, heads, query.shape[-1]).transpose(0, 1)
    index = places[0] + 64
    scores = query @ key.mT
    scores = scores + torch.einsum("bhik,hijk->bhij", query, place_key[:, index])
    scores = scores + torch.einsum("bhjk,hijk->bhij", key, place_query[:, index])
    mixed = (scores / (3 * query.shape[-1]) ** 0.5).softmax(-1) @ value
    attended = layer.attention.output(mixed.transpose(1, 2).flatten(2), queries)
    return layer.output(layer.intermediate(attended), attended)


def test_released_sizes() -> None:
    """The classes of transformers at the sizes of base models, the shared matrix counted once."""
    for module, theirs in ((deberta, "DebertaForMaskedLM"), (deberta_v2, "DebertaV2ForMaskedLM")):
        with torch.device("meta"):
            config = module.Config()
            own = config.build()
            kind = getattr(transformers, theirs)
            other = kind(kind.config_class(**codec_of(config).to_huggingface()))
        count = sum(parameter.numel() for parameter in own.parameters())
        # transformers keeps an embedding of the tied head's bias twice.
        assert count == sum(p.numel() for p in other.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nsp": True}, "nsp is set, but DeBERTa has no such head"),
        ({"type_vocab": 2}, "DeBERTa has norm post, no token types"),
        ({"position_buckets": 2000}, "position_buckets is 2000"),
        ({"conv_width": 4}, "conv_width is 4"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deberta_v2.Config(**settings)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_head_with_another_activation_is_refused(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "words", pooler_hidden_act="tanh")
    with pytest.raises(ConfigError, match="pooler_hidden_act 'tanh', but a classification head"):
        make(kind, tmp_path / "classes", "SequenceClassification", pooler_hidden_act="tanh")


def test_other_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pos_att_type"):
        read_config(deberta_v2.Config, {"model_type": "deberta-v2", "pos_att_type": ["c2p"]})
