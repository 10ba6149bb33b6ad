"""Checkpoints that store a tied tensor under another of its names than the usual one, and names and
values that no model has.

`safetensors.torch.save_model` keeps the first name in alphabetical order, and BART-large-CNN was
published with the head's name. Logits are those of `transformers`, from the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor

from samestep.errors import CheckpointError
from tests.outputs import predict
from tests.parity.pairs import add_noise
from trainer.training.weights.loading import load_weights

BERT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
BART = {
    "vocab_size": 100,
    "d_model": 32,
    **{f"{stack}_layers": 1 for stack in ("encoder", "decoder")},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 64 for stack in ("encoder", "decoder")},
    "max_position_embeddings": 40,
}


@dataclass
class Family:
    """A class of `transformers`.

    Attributes:
        name: of the class.
        settings: of a small model.
        names: the names of each tied tensor.
    """

    name: str
    settings: dict[str, Any]
    names: tuple[tuple[str, ...], ...]


def encoder(name: str, decoder: str, bias: str = "", table: str = "", **settings: Any) -> Family:
    """A family with a tied masked-LM head, and its bias under two names if `bias` is given."""
    table = table or f"{name.partition('For')[0].lower()}.embeddings.word_embeddings.weight"
    biases = ((bias, f"{decoder}.bias"),) if bias else ()
    return Family(name, settings, ((table, f"{decoder}.weight"), *biases))


STACKS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
FAMILIES = {
    "bert": encoder("BertForMaskedLM", "cls.predictions.decoder", "cls.predictions.bias", **BERT),
    "roberta": encoder("RobertaForMaskedLM", "lm_head.decoder", "lm_head.bias", **BERT),
    "albert": encoder(
        "AlbertForMaskedLM", "predictions.decoder", "predictions.bias", **BERT, embedding_size=16
    ),
    "distilbert": encoder(
        "DistilBertForMaskedLM",
        "vocab_projector",
        vocab_size=100,
        dim=32,
        n_layers=1,
        n_heads=2,
        hidden_dim=64,
        max_position_embeddings=40,
    ),
    "electra": encoder("ElectraForMaskedLM", "generator_lm_head", **BERT, embedding_size=16),
    "mpnet": encoder("MPNetForMaskedLM", "lm_head.decoder", "lm_head.bias", **BERT),
    "deberta": encoder(
        "DebertaForMaskedLM", "cls.predictions.decoder", "cls.predictions.bias", **DEBERTA
    ),
    "deberta_v2": encoder(
        "DebertaV2ForMaskedLM",
        "cls.predictions.decoder",
        "cls.predictions.bias",
        "deberta.embeddings.word_embeddings.weight",
        **DEBERTA,
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "modernbert": encoder(
        "ModernBertForMaskedLM",
        "decoder",
        table="model.embeddings.tok_embeddings.weight",
        **BERT,
        **dict.fromkeys((f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")), 0),
    ),
    "xlnet": encoder(
        "XLNetLMHeadModel",
        "lm_loss",
        table="transformer.word_embedding.weight",
        vocab_size=100,
        d_model=32,
        n_layer=1,
        n_head=2,
        d_inner=64,
    ),
    "gpt2": encoder("GPT2LMHeadModel", "lm_head", table="transformer.wte.weight", **GPT),
    "openai_gpt": encoder(
        "OpenAIGPTLMHeadModel", "lm_head", table="transformer.tokens_embed.weight", **GPT
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0},
        (("shared.weight", *STACKS),),
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        {**BART, "forced_eos_token_id": None},
        (("model.shared.weight", "model." + STACKS[0], "model." + STACKS[1], STACKS[2]),),
    ),
}


def logits(theirs: Any, ours: Any) -> tuple[Tensor, Tensor]:
    """Logits of both models for two rows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 100, (2, 12), generator=generator)
    positions = torch.arange(12).expand(2, -1)
    kind = theirs.config.model_type
    if theirs.config.is_encoder_decoder:
        targets = F.pad(tokens[:, :6], (1, 0), value=theirs.config.decoder_start_token_id)
        own = predict(ours, tokens=tokens, target_tokens=targets)
        return theirs(input_ids=tokens, decoder_input_ids=targets).logits, own
    if kind == "xlnet":  # predicts three positions in their order
        places = torch.tensor([[3, 8, 5], [1, 2, 11]])
        order = torch.arange(1, 4, dtype=torch.int32).expand(2, -1)
        rank = torch.zeros(2, 12, dtype=torch.int32).scatter(1, places, order)
        hidden = (rank[:, None, :] > 0) & (rank[:, None, :] >= rank[:, :, None])
        mapping = F.one_hot(places, 12).float()
        found = theirs(
            input_ids=tokens, perm_mask=hidden.float(), target_mapping=mapping, use_mems=False
        )
        return found.logits, predict(ours, tokens=tokens, predicted=places, extra={"rank": rank})
    segments = torch.ones_like(tokens, dtype=torch.int32)
    own = predict(ours, tokens=tokens, segments=segments, positions=positions)
    return theirs(input_ids=tokens, attention_mask=segments).logits, own


@pytest.fixture(scope="module")
def references() -> Callable[[str], tuple[Any, dict[str, Tensor]]]:
    """A random model of each family, and its tensors under all their names."""
    made: dict[str, tuple[Any, dict[str, Tensor]]] = {}

    def make(family: str) -> tuple[Any, dict[str, Tensor]]:
        if family not in made:
            kind = getattr(transformers, FAMILIES[family].name)
            model = kind(kind.config_class(**FAMILIES[family].settings)).eval()
            add_noise(model, 0.1)
            made[family] = model, {n: each.clone() for n, each in model.state_dict().items()}
        return made[family]

    return make


def folder_of(model: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored_forms(family: str) -> Iterator[tuple[str, set[str]]]:
    """Each name of each tied tensor -> the other names, which are not stored."""
    for names in FAMILIES[family].names:
        for name in names:
            yield name, set(names) - {name}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_tensor_is_read_under_any_of_its_names(
    family: str, references: Any, tmp_path: Path
) -> None:
    model, tensors = references(family)
    known = {name for names in FAMILIES[family].names for name in names}
    assert known <= tensors.keys()
    for number, (name, absent) in enumerate(stored_forms(family)):
        kept = {n: each for n, each in tensors.items() if n not in absent}
        folder = folder_of(model, kept, tmp_path / str(number))
        theirs = type(model).from_pretrained(folder).eval()
        ours = load_weights(folder).model()
        torch.testing.assert_close(*logits(theirs, ours), rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(*logits(model, ours), rtol=1e-5, atol=1e-5, msg=name)
    save_model(model, str(tmp_path / "0" / "model.safetensors"), metadata={"format": "pt"})
    saved = load_weights(tmp_path / "0").model()
    torch.testing.assert_close(*logits(model, saved), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_that_differ_are_refused(family: str, references: Any, tmp_path: Path) -> None:
    model, tensors = references(family)
    for names in FAMILIES[family].names:
        for alias in names[1:]:
            other = {**tensors, alias: tensors[alias] + 1}
            folder = folder_of(model, other, tmp_path / alias)
            with pytest.raises(CheckpointError, match=f"{alias} differs from {names[0]}"):
                load_weights(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_of_names(family: str, references: Any, tmp_path: Path) -> None:
    """Of wrappers they are removed. Any other is named, with an example of a name that has it."""
    model, tensors = references(family)
    for prefix in ("_orig_mod.", "module.", "model.", "module._orig_mod."):
        wrapped = {prefix + name: each for name, each in tensors.items()}
        folder = folder_of(model, wrapped, tmp_path / prefix)
        torch.testing.assert_close(
            *logits(model, load_weights(folder).model()), rtol=1e-5, atol=1e-5
        )
    for prefix in ("net.", "net._orig_mod."):
        wrapped = {prefix + name: each for name, each in tensors.items()}
        folder = folder_of(model, wrapped, tmp_path / prefix)
        with pytest.raises(CheckpointError) as caught:
            load_weights(folder)
        message = str(caught.value)
        assert f"Remove '{prefix}' from the names of the tensors" in message
        assert " is missing; " in message
        assert f" {prefix}" in message.partition(" is unexpected")[0]


def test_weights_that_are_no_numbers_are_named(references: Any, tmp_path: Path) -> None:
    model, tensors = references("bert")
    name = "bert.encoder.layer.0.attention.self.key.weight"
    for number, value in enumerate((float("nan"), float("-inf"))):
        wrong = {**tensors, name: tensors[name].clone()}
        wrong[name][3, 5] = value
        folder = folder_of(model, wrong, tmp_path / str(number))
        file = folder / "model.safetensors"
        with pytest.raises(CheckpointError, match=f"{name} in {file} holds NaN or infinity"):
            load_weights(folder).model()
    # So is one that the model does not have: the file is damaged.
    spare = "cls.seq_relationship.bias"
    unused = {**load_file(file), **tensors, spare: torch.full((2,), float("nan"))}
    with pytest.raises(CheckpointError, match=f"{spare} in .* holds NaN or infinity"):
        load_weights(folder_of(model, unused, tmp_path / "unused"))


@pytest.mark.parametrize(
    ("name", "settings", "names"),
    [
        (
            "T5ForTokenClassification",
            T5,
            [f"transformer.{n}" for n in ("shared.weight", STACKS[0])],
        ),
        ("T5ForQuestionAnswering", T5, ["shared.weight", *STACKS[:2]]),
        ("BartForSequenceClassification", BART, FAMILIES["bart"].names[0][:3]),
    ],
)
def test_models_with_the_head_of_a_task(
    name: str, settings: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    kind = getattr(transformers, name)
    more = {"decoder_start_token_id": 0} if name.startswith("T5") else {}
    model = kind(kind.config_class(**settings, **more))
    tensors = {n: each.clone() for n, each in model.state_dict().items()}
    assert set(names) <= tensors.keys()
    found = []
    for number, kept in enumerate(names):
        stored = {n: each for n, each in tensors.items() if n == kept or n not in names}
        found.append(dict(load_weights(folder_of(model, stored, tmp_path / str(number))).tensors))
    for other in found[1:]:
        assert all(torch.equal(other[n], each) for n, each in found[0].items())
