"""BERT and RoBERTa with the heads of tasks against `transformers`, with random small models, in both directions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import BertConfig, PreTrainedModel, RobertaConfig

from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.errors import CheckpointError, ConfigError
from trainer.models import bert, roberta
from trainer.models.config import Head
from trainer.models.transformer import Transformer
from trainer.weights import load_weights

FAMILIES: dict[str, Any] = {"bert": (BertConfig, bert.Config, 0), "roberta": (RobertaConfig, roberta.Config, 1)}
SHAPE = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 40, "type_vocab_size": 2}  # fmt: skip
CLASSES, TAGS = ("no", "maybe", "yes"), ("O", "B-PER", "I-PER", "B-LOC")
TASKS: dict[str, tuple[Head, str, tuple[str, ...]]] = {
    "classification": ("classification", "SequenceClassification", CLASSES),
    "regression": ("classification", "SequenceClassification", ("similarity",)),
    "multiple_choice": ("multiple_choice", "MultipleChoice", ()),
    "tagging": ("tagging", "TokenClassification", TAGS),
    "span": ("span", "QuestionAnswering", ()),
}
PADDED, FULL = (
    [(9, 9), (1, 1), (15, 3), (5, 12), (10, 4), (7, 7)],
    [(9, 12), (20, 1), (1, 20), (3, 18), (5, 16), (6, 15)],
)
CELLS, CHOICES = 24, 3


@dataclass
class Pair:
    """A random model of `transformers`, and ours imported from the folder that it saved."""

    family: str
    task: str
    reference: PreTrainedModel
    config: bert.Config
    model: Transformer

    @property
    def head(self) -> Head:
        return TASKS[self.task][0]

    def batch(self, lengths: list[tuple[int, int]]) -> dict[str, Tensor]:
        """Pairs of texts of these lengths, with three special tokens, padded to 24 cells."""
        generator = torch.Generator().manual_seed(1)
        before, after = (torch.tensor(side)[:, None] for side in zip(*lengths, strict=True))
        cells = torch.arange(CELLS).expand(len(lengths), -1)
        real = cells < before + after + 3
        tokens = torch.randint(5, 300, real.shape, generator=generator)
        return {
            "tokens": torch.where(real, tokens, FAMILIES[self.family][2]),
            "segments": real.int(),
            "positions": cells,
            "token_types": (real & (cells > before + 1)).int(),
        }

    def ours(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits as `transformers` shapes them, of starts and ends [B, S, 2]."""
        pooled = self.head in ("classification", "multiple_choice")
        first = torch.zeros(len(batch["tokens"]), 1, dtype=torch.int64)
        logits: Tensor = self.model(**batch, predicted=first if pooled else None)
        return logits.view(-1, CHOICES) if self.head == "multiple_choice" else logits[:, 0] if pooled else logits

    def theirs(self, batch: dict[str, Tensor], model: PreTrainedModel | None = None, **labels: Tensor) -> Any:
        inputs = {"input_ids": "tokens", "attention_mask": "segments", "token_type_ids": "token_types"}
        shape = (-1, CHOICES, CELLS) if self.head == "multiple_choice" else (-1, CELLS)
        return (model or self.reference)(**{name: batch[own].view(shape) for name, own in inputs.items()}, **labels)

    def their_logits(self, batch: dict[str, Tensor], model: PreTrainedModel | None = None) -> Tensor:
        out = self.theirs(batch, model)
        return torch.stack([out.start_logits, out.end_logits], -1) if self.head == "span" else out.logits


def make(family: str, task: str, folder: Path) -> Pair:
    _, name, labels = TASKS[task]
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    config = FAMILIES[family][0](**SHAPE, **(names if labels else {}))
    reference = getattr(transformers, f"AutoModelFor{name}").from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():  # larger than at initialisation, and biases not zero
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    reference.save_pretrained(folder)
    return Pair(family, task, reference, *load(family, folder))


def load(family: str, folder: Path) -> tuple[bert.Config, Transformer]:
    tree, tensors = load_folder(folder)
    config = FAMILIES[family][1].from_huggingface(tree, tensors)
    model = config.build().eval()
    model.load_state_dict(config.import_tensors(tensors))
    return config, model


@pytest.fixture(params=[(family, task) for family in FAMILIES for task in TASKS], ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make(*request.param, tmp_path / "reference")


def close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_logits_of_padded_batches_are_equal(pair: Pair):
    assert (pair.config.head, pair.config.labels) == (pair.head, TASKS[pair.task][2])
    batch = pair.batch(PADDED)
    ours, theirs = pair.ours(batch), pair.their_logits(batch)
    real = batch["segments"].bool() if ours.ndim == 3 else slice(None)
    assert ours.shape == theirs.shape
    close(ours[real], theirs[real])


def test_losses_and_gradients_are_equal(pair: Pair):
    batch = pair.batch(FULL)  # transformers lets an answer begin in padding
    logits = pair.ours(batch)
    if pair.head == "span":
        starts, ends = torch.tensor([[0, 5, 23, 7, 1, 11], [0, 6, 23, 19, 1, 12]])
        theirs = pair.theirs(batch, start_positions=starts, end_positions=ends).loss
        ours = (F.cross_entropy(logits[..., 0], starts) + F.cross_entropy(logits[..., 1], ends)) / 2
    elif pair.task == "regression":
        labels = torch.linspace(-1, 3, 6)
        theirs = pair.theirs(batch, labels=labels).loss
        ours = F.mse_loss(logits[:, 0], labels)
    else:
        generator, classes = torch.Generator().manual_seed(2), logits.shape[-1]
        labels = torch.randint(0, classes, logits.shape[:-1], generator=generator)
        if pair.head == "tagging":
            labels[:, ::3] = -100
        theirs = pair.theirs(batch, labels=labels).loss
        ours = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    close(ours, theirs)
    ours.backward()
    theirs.backward()
    expected = pair.config.import_tensors({name: p.grad for name, p in pair.reference.named_parameters()})
    close({name: p.grad for name, p in pair.model.named_parameters()}, expected)


def test_transformers_loads_what_we_export(pair: Pair, tmp_path: Path):
    _, name, labels = TASKS[pair.task]
    exported = pair.config.export_tensors(pair.model.state_dict())
    save_folder(tmp_path / "ours", pair.config.to_huggingface(), exported)
    auto = getattr(transformers, f"AutoModelFor{name}")
    theirs, report = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert type(theirs) is type(pair.reference)
    if labels:
        assert theirs.config.id2label == dict(enumerate(labels))
        assert theirs.config.label2id == {label: number for number, label in enumerate(labels)}
    assert theirs.config.problem_type == ("regression" if pair.task == "regression" else None)
    batch = pair.batch(PADDED)
    close(pair.their_logits(batch, theirs.eval()), pair.their_logits(batch))
    again, same = load(pair.family, tmp_path / "ours")
    assert again == pair.config
    assert all(torch.equal(same.state_dict()[key], value) for key, value in pair.model.state_dict().items())


def test_old_checkpoints_hold_more_than_their_head_takes(tmp_path: Path):
    pair = make("bert", "tagging", tmp_path / "reference")
    tree, tensors = load_folder(tmp_path / "reference")
    old = {name.removeprefix("bert."): value for name, value in tensors.items()}
    old |= {"pooler.dense.weight": torch.ones(48, 48), "pooler.dense.bias": torch.ones(48)}
    old |= {"embeddings.position_ids": torch.arange(40)[None]}
    config = bert.Config.from_huggingface(tree, old)
    assert config == pair.config
    imported = config.import_tensors(old)
    assert all(torch.equal(imported[name], value) for name, value in pair.model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"classifier.bias is missing"):
        config.import_tensors({name: value for name, value in old.items() if name != "classifier.bias"})


def test_the_head_goes_by_the_architecture_and_is_there(tmp_path: Path):
    pair = make("roberta", "multiple_choice", tmp_path / "reference")
    tree, tensors = load_folder(tmp_path / "reference")
    assert roberta.Config.from_huggingface(tree).head == "multiple_choice"
    assert load_weights(tmp_path / "reference").config == pair.config
    without = [name for name in tensors if not name.startswith("classifier.")]
    assert roberta.Config.from_huggingface(tree, without).head == "language_model"
    for architectures in ([], None, ["RobertaForMaskedLM"], ["BertForMultipleChoice"]):
        other = {**tree, "architectures": architectures}
        assert roberta.Config.from_huggingface(other, tensors).head == "language_model"


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"id2label": None, "num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {str(number): f"class {number}" for number in reversed(range(11))}}, None),
        ({"id2label": {"1": "a", "2": "b"}}, "does not name the labels 0, 1, ...; correct it"),
        ({"id2label": {"first": "a"}}, "does not name the labels"),
        ({"id2label": ["a", "b"]}, "does not name the labels"),
        ({"id2label": {"0": "a", "1": "a"}}, "labels must differ, and 'a' is among them 2 times"),
    ],
)
def test_labels_of_a_configuration(named: dict[str, object], labels: object):
    tree = bert.Config(head="classification", labels=("a", "b")).to_huggingface()
    tree = {key: value for key, value in tree.items() if key != "id2label"} | named
    if isinstance(labels, str):
        with pytest.raises(ConfigError, match=labels):
            bert.Config.from_huggingface(tree)
    else:
        expected = labels or tuple(f"class {number}" for number in range(11))
        assert bert.Config.from_huggingface(tree).labels == expected
