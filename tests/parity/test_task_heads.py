"""BERT and RoBERTa with the heads of tasks against `transformers`, with random small models, in
both directions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AlbertConfig,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    MPNetConfig,
    PreTrainedModel,
    RobertaConfig,
)

from samestep.errors import CheckpointError, ConfigError
from tests.outputs import parameters, predict
from tests.parity import heads
from tests.parity.heads import (
    LENGTH,
    TASKS,
    assert_logits_are_equal,
    assert_losses_and_gradients_are_equal,
    assert_transformers_loads_what_we_export,
    load,
    names_of,
)
from tests.parity.pairs import saved
from trainer.checkpoint.huggingface import load_folder
from trainer.models.codecs import codec_of, read_config
from trainer.models.families import albert, bert, distilbert, electra, mpnet, roberta
from trainer.training.weights.loading import load_weights

FAMILIES: dict[str, Any] = {
    "bert": (BertConfig, bert.Config, 0),
    "roberta": (RobertaConfig, roberta.Config, 1),
    "albert": (AlbertConfig, albert.Config, 0),
    "distilbert": (DistilBertConfig, distilbert.Config, 0),
    "electra": (ElectraConfig, electra.Config, 0),
    "mpnet": (MPNetConfig, mpnet.Config, 1),
}
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}
PADDED, FULL = (
    [(9, 9), (1, 1), (15, 3), (5, 12), (10, 4), (7, 7)],
    [(9, 12), (20, 1), (1, 20), (3, 18), (5, 16), (6, 15)],
)
CHOICES = 3


@dataclass
class Pair(heads.Pair):
    family: str

    def batch(self, lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
        """Pairs of texts of these lengths, with three special tokens, padded to 24 positions."""
        generator = torch.Generator().manual_seed(1)
        before, after = (torch.tensor(side)[:, None] for side in zip(*lengths, strict=True))
        places = torch.arange(LENGTH).expand(len(lengths), -1)
        real = places < before + after + 3
        tokens = torch.randint(5, 300, real.shape, generator=generator)
        return {
            "tokens": torch.where(real, tokens, FAMILIES[self.family][2]),
            "segments": real.int(),
            "positions": places,
            "token_types": (real & (places > before + 1)).int(),
        }

    def ours(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits as `transformers` shapes them, of starts and ends [B, S, 2]."""
        pooled = self.head in ("classification", "multiple_choice")
        first = torch.zeros(len(batch["tokens"]), 1, dtype=torch.int64)
        logits: Tensor = predict(self.model, **batch, predicted=first if pooled else None)
        return (
            logits.view(-1, CHOICES)
            if self.head == "multiple_choice"
            else logits[:, 0]
            if pooled
            else logits
        )

    def theirs(
        self, batch: dict[str, Tensor], model: PreTrainedModel | None = None, **labels: Tensor
    ) -> Any:
        inputs = {
            "input_ids": "tokens",
            "attention_mask": "segments",
            "token_type_ids": "token_types",
        }
        shape = (-1, CHOICES, LENGTH) if self.head == "multiple_choice" else (-1, LENGTH)
        return (model or self.reference)(
            **{name: batch[own].view(shape) for name, own in inputs.items()}, **labels
        )


def make(family: str, task: str, folder: Path) -> Pair:
    _, name, labels = TASKS[task]
    theirs, ours, _ = FAMILIES[family]
    reference = (
        getattr(transformers, f"AutoModelFor{name}")
        .from_config(theirs(**SHAPE, **names_of(labels)))
        .eval()
    )
    saved(reference, folder)
    return Pair(task, reference, *load(ours, folder), family=family)


@pytest.fixture(params=[(family, task) for family in FAMILIES for task in TASKS], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make(*request.param, tmp_path / "reference")


def test_logits_of_padded_batches_are_equal(pair: Pair):
    assert_logits_are_equal(pair, pair.batch(PADDED))


def test_losses_and_gradients_are_equal(pair: Pair):
    spans = [0, 5, 23, 7, 1, 11], [0, 6, 23, 19, 1, 12]
    batch = pair.batch(FULL)  # transformers lets an answer begin in padding
    assert_losses_and_gradients_are_equal(pair, batch, spans, untagged=slice(None, None, 3))


def test_transformers_loads_what_we_export(pair: Pair, tmp_path: Path):
    assert_transformers_loads_what_we_export(pair, pair.batch(PADDED), tmp_path / "ours")


def test_old_checkpoints_hold_more_than_their_head_takes(tmp_path: Path):
    pair = make("bert", "tagging", tmp_path / "reference")
    tree, tensors = load_folder(tmp_path / "reference")
    old = {name.removeprefix("bert."): value for name, value in tensors.items()}
    old |= {"pooler.dense.weight": torch.ones(48, 48), "pooler.dense.bias": torch.ones(48)}
    old |= {"embeddings.position_ids": torch.arange(40)[None]}
    config = read_config(bert.Config, tree, old)
    assert config == pair.config
    imported = codec_of(config).import_tensors(old)
    assert all(torch.equal(imported[name], value) for name, value in parameters(pair.model).items())
    with pytest.raises(CheckpointError, match=r"classifier.bias is missing"):
        codec_of(config).import_tensors(
            {name: value for name, value in old.items() if name != "classifier.bias"}
        )


def test_the_head_goes_by_the_architecture_and_is_there(tmp_path: Path):
    pair = make("roberta", "multiple_choice", tmp_path / "reference")
    tree, tensors = load_folder(tmp_path / "reference")
    assert read_config(roberta.Config, tree).head == "multiple_choice"
    assert load_weights(tmp_path / "reference").config == pair.config
    without = [name for name in tensors if not name.startswith("classifier.")]
    with pytest.raises(
        CheckpointError, match="names a model with classifier, which the weights lack"
    ):
        read_config(roberta.Config, tree, without)
    for architectures in ([], None, ["BertForMultipleChoice"]):
        other = {**tree, "architectures": architectures}
        assert read_config(roberta.Config, other, tensors).head == "embedding"


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"id2label": None, "num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {str(number): f"class {number}" for number in reversed(range(11))}}, None),
        ({"id2label": {"1": "a", "2": "b"}}, "Number the labels 0, 1, ..."),
        ({"id2label": {"first": "a"}}, "Number the labels"),
        ({"id2label": ["a", "b"]}, "Number the labels"),
        ({"id2label": {"0": "a", "1": "a"}}, "labels has 'a' 2 times"),
    ],
)
def test_labels_of_a_configuration(named: dict[str, object], labels: object):
    tree = codec_of(bert.Config(head="classification", labels=("a", "b"))).to_huggingface()
    tree = {key: value for key, value in tree.items() if key != "id2label"} | named
    if isinstance(labels, str):
        with pytest.raises(ConfigError, match=labels):
            read_config(bert.Config, tree)
    else:
        expected = labels or tuple(f"class {number}" for number in range(11))
        assert read_config(bert.Config, tree).labels == expected
