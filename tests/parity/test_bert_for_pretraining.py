"""BERT with its next-sentence head against `BertForPreTraining` of transformers."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    BertConfig,
    BertForPreTraining,
)

from samestep.errors import ConfigError
from samestep.examples import Examples, Vocabulary
from samestep.hashing import mix
from tests.outputs import outputs, parameters, predict
from tests.parity.pairs import assert_gradients_are_equal, exported, load, saved
from trainer.checkpoint.huggingface import load_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import bert, roberta
from trainer.objectives.kinds import mlm_nsp
from trainer.training.weights.loading import load_weights

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SHAPE = {
    "vocab_size": 500,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
}


@pytest.fixture
def reference(tmp_path: Path) -> BertForPreTraining:
    """A random model of transformers, saved in tmp_path/reference."""
    model = BertForPreTraining(BertConfig(**SHAPE)).eval()
    return saved(model, tmp_path / "reference")


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Six pairs of different lengths, as the objective makes them."""
    draw = np.random.default_rng(0)
    lengths = [(9, 12), (1, 1), (18, 3), (5, 16), (10, 4), (7, 7)]
    pieces = [draw.integers(4, 500, length) for pair in lengths for length in pair]
    examples = Examples(
        tokens=np.concatenate(pieces).astype(np.int32),
        row=np.repeat(np.arange(6), 2),
        column=np.array([at for a, _ in lengths for at in (1, a + 2)]),
        length=np.array([len(piece) for piece in pieces]),
        key=mix(np.arange(6)),
        weight=np.ones(6, dtype=np.float32),
        isolated=False,
        random=np.array([True, False, False, True, True, False]),
    )
    objective = mlm_nsp.Config().build(Vocabulary(500, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK)))
    return {
        name: torch.from_numpy(array) for name, array in objective.collate(examples, 24).items()
    }


def whole_rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What our model reads, to score all positions."""
    return {name: batch[name] for name in ("tokens", "segments", "positions", "token_types")}


def their_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = torch.full(batch["tokens"].shape, -100)
    used = batch["weights"] > 0
    labels[used.nonzero()[:, 0], batch["predicted"][used]] = batch["labels"][used]
    return {
        "input_ids": batch["tokens"],
        "attention_mask": batch["segments"],
        "token_type_ids": batch["token_types"],
        "labels": labels,
        "next_sentence_label": batch["next_labels"],
    }


def test_logits_losses_and_gradients_are_equal(reference, batch, tmp_path):
    config, model = load(bert.Config, tmp_path / "reference")
    assert config.nsp
    theirs = reference(**their_inputs(batch))
    logits, next_logits = outputs(model, "tokens", "next_sentence", **whole_rows(batch))
    real = batch["segments"] > 0
    torch.testing.assert_close(logits[real], theirs.prediction_logits[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(next_logits, theirs.seq_relationship_logits, rtol=1e-5, atol=1e-5)

    objective = mlm_nsp.Config().build(Vocabulary(500, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK)))
    totals = {name: torch.tensor(value) for name, value in objective.weights(batch).items()}
    loss = objective.loss(model, batch, totals)
    torch.testing.assert_close(loss.total, theirs.loss, rtol=1e-5, atol=1e-5)
    next_loss = torch.nn.functional.cross_entropy(
        theirs.seq_relationship_logits, batch["next_labels"]
    )
    torch.testing.assert_close(
        loss.metrics["nsp_loss"][0] / 6, next_loss.detach(), rtol=1e-5, atol=1e-5
    )

    loss.total.backward()
    theirs.loss.backward()
    assert_gradients_are_equal(config, reference, model)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_we_export(batch, tmp_path, tied):
    config = bert.Config(
        vocab_size=500, layers=2, width=48, heads=4, ffn_width=96, max_positions=40, tied=tied
    )
    config = replace(config, nsp=True)
    model = config.build().eval()
    theirs = exported(AutoModelForPreTraining, config, model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [
        "BertForPreTraining"
    ]
    assert type(theirs) is BertForPreTraining
    found = theirs.eval()(**their_inputs(batch))
    (next_logits,) = outputs(model, "next_sentence", **whole_rows(batch))
    torch.testing.assert_close(next_logits, found.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    again, same = load(bert.Config, tmp_path / "ours")
    assert again == config
    assert all(
        torch.equal(parameters(same)[name], value) for name, value in parameters(model).items()
    )
    assert (
        AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").config.hidden_size == 48
    )  # it is a masked LM, too


def test_the_head_goes_by_the_tensors_not_by_the_architecture(reference, tmp_path, caplog):
    """As in bert-base-uncased, whose config.json says BertForMaskedLM."""
    tree, tensors = load_folder(tmp_path / "reference")
    tree = {**tree, "architectures": ["BertForMaskedLM"]}
    old = {name.removeprefix("bert."): value for name, value in tensors.items()}
    assert read_config(bert.Config, tree, old).nsp
    without = {name: value for name, value in old.items() if "seq_relationship" not in name}
    config = read_config(bert.Config, tree, without)
    assert not config.nsp
    with caplog.at_level(logging.INFO):
        assert not [
            name for name in codec_of(config).import_tensors(without) if name.startswith("nsp_head")
        ]
    assert "no such parameters: pooler.dense" in caplog.text
    assert load_weights(tmp_path / "reference").config.nsp


def test_a_model_with_the_head_is_a_masked_lm_unless_asked_for_more(batch):
    config = bert.Config(
        vocab_size=500, layers=1, width=48, heads=4, ffn_width=96, max_positions=40, nsp=True
    )
    for each in (config, replace(config, norm="pre")):
        model = each.build().eval()
        inputs = {name: batch[name] for name in ("tokens", "segments", "positions", "predicted")}
        logits = predict(model, **inputs)
        assert logits.shape == (6, batch["predicted"].shape[1], 500)
        with_next = outputs(model, "tokens", "next_sentence", **inputs)
        torch.testing.assert_close(
            with_next[0], logits, rtol=0, atol=1e-6 * float(logits.detach().abs().max())
        )
        assert with_next[1].shape == (6, 2)


def test_roberta_has_no_such_head():
    with pytest.raises(ConfigError, match="RoBERTa has no next-sentence head"):
        roberta.Config(nsp=True)
