"""ALBERT with its sentence-order head against `AlbertForPreTraining` of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AlbertConfig, AlbertForPreTraining, AutoModelForPreTraining

from samestep.errors import ConfigError
from tests.outputs import fill, outputs, parameters
from tests.parity.pairs import assert_gradients_are_equal, exported, saved
from tests.unit.objectives.test_mlm_nsp import VOCABULARY, random_pairs
from trainer.checkpoint.huggingface import load_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import albert
from trainer.models.transformer import Transformer
from trainer.objectives.kinds import mlm_sop

SHAPE = {
    "vocab_size": 100,
    "embedding_size": 20,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_hidden_groups": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
    "classifier_dropout_prob": 0.0,
}


def load(folder: Path) -> tuple[albert.Config, Transformer]:
    tree, tensors = load_folder(folder)
    config = read_config(albert.Config, tree, tensors)
    model = config.build_base().eval()
    fill(model, codec_of(config).import_tensors(tensors))
    return config, model


def reference(folder: Path) -> AlbertForPreTraining:
    """A random model of transformers, saved in a folder."""
    model = AlbertForPreTraining(AlbertConfig(**SHAPE)).eval()
    return saved(model, folder)


def test_logits_losses_and_gradients_are_equal(tmp_path: Path) -> None:
    theirs = reference(tmp_path / "theirs")
    config, model = load(tmp_path / "theirs")
    assert (config.nsp, config.groups, config.embedding_width) == (True, 3, 20)
    objective = mlm_sop.Config(ngrams=3).build(VOCABULARY)
    arrays = objective.collate(random_pairs(6, 40), 40)
    batch = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    labels = torch.full(batch["tokens"].shape, -100)
    used = batch["weights"] > 0
    labels[used.nonzero()[:, 0], batch["predicted"][used]] = batch["labels"][used]
    found = theirs(
        input_ids=batch["tokens"],
        attention_mask=batch["segments"],
        token_type_ids=batch["token_types"],
        labels=labels,
        sentence_order_label=batch["next_labels"],
    )
    columns = {name: batch[name] for name in ("tokens", "segments", "positions", "token_types")}
    logits, order = outputs(model, "tokens", "next_sentence", **columns)
    real = batch["segments"] > 0
    torch.testing.assert_close(logits[real], found.prediction_logits[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(order, found.sop_logits, rtol=1e-5, atol=1e-5)

    totals = {name: torch.tensor(value) for name, value in objective.weights(arrays).items()}
    loss = objective.loss(model, batch, totals)
    torch.testing.assert_close(loss.total, found.loss, rtol=1e-5, atol=1e-5)
    loss.total.backward()
    found.loss.backward()
    assert_gradients_are_equal(config, theirs, model)


def test_transformers_loads_what_we_export(tmp_path: Path) -> None:
    reference(tmp_path / "theirs")
    config, model = load(tmp_path / "theirs")
    theirs = exported(AutoModelForPreTraining, config, model, tmp_path / "ours")
    assert type(theirs) is AlbertForPreTraining
    again, same = load(tmp_path / "ours")
    assert again == config
    assert all(
        torch.equal(parameters(same)[name], value) for name, value in parameters(model).items()
    )


def test_a_shared_layer_computes_each_time() -> None:
    """FLOPs are those of BERT's layers, parameters those of one."""
    shared = albert.Config(layers=12).build()
    apart = albert.Config(layers=12, groups=12).build()
    difference = shared.flops_per_token(128) - apart.flops_per_token(128)
    assert difference == 0
    assert len(shared.sharding_units()) == 0
    assert len(apart.sharding_units()) == 12
    layer = sum(p.numel() for p in shared.layers[0].parameters())
    counts = [sum(p.numel() for p in model.parameters()) for model in (shared, apart)]
    assert counts[1] - counts[0] == 11 * layer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 5}, "groups 5 does not divide layers 12"),
        ({"embedding_width": 0}, "embedding_width is 0"),
        ({"head_dropout": 1.0}, "head_dropout is 1.0"),
        ({"heads": 7}, "not a multiple of heads 7"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        albert.Config(**settings)


def test_a_causal_one_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="no causal albert"):
        codec_of(albert.Config(causal=True)).to_huggingface()
