"""Objectives of fine-tuning tasks: layout of rows, losses, and scores of predictions."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Labels, TaskRow, Vocabulary
from samestep.hashing import mix
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives import Predictions, Task
from trainer.objectives.kinds import (
    classification,
    distillation,
    multiple_choice,
    question_answering,
    regression,
    sift,
    tagging,
)
from trainer.objectives.kinds.question_answering import max_context

PAD, CLS, SEP = 0, 1, 2
VOCABULARY = Vocabulary(100, PAD, CLS, SEP, None, (PAD, CLS, SEP))
ROBERTA = dataclasses.replace(VOCABULARY, between=2)

Pieces = list[tuple[int, list[int]]]
"""Of an example: the column of each piece, and its tokens."""


def make(
    rows: Sequence[Pieces], labels: Sequence[Sequence[float]], begin: Sequence[int] | None = None
) -> Examples:
    pieces = [piece for row in rows for piece in row]
    number = np.arange(len(rows))
    return Examples(
        tokens=np.array([token for _, tokens in pieces for token in tokens], dtype=np.int32),
        row=np.repeat(number, [len(row) for row in rows]),
        column=np.array([column for column, _ in pieces], dtype=np.int64),
        length=np.array([len(tokens) for _, tokens in pieces], dtype=np.int64),
        key=mix(number),
        weight=np.ones(len(rows), dtype=np.float32),
        isolated=False,
        labels=Labels(
            np.array([x for each in labels for x in each], dtype=np.float32),
            np.array([len(each) for each in labels], dtype=np.int64),
            number,
            np.array(begin or [0] * len(rows), dtype=np.int64),
            np.ones(len(rows), dtype=np.int64),
        ),
    )


def only(examples: Examples, rows: Sequence[int]) -> Examples:
    """Some of the examples, in another order."""
    labels = examples.labels
    assert labels is not None
    ends, values = np.cumsum(examples.length)[:-1], np.cumsum(labels.count)[:-1]
    tokens, numbers = np.split(examples.tokens, ends), np.split(labels.values, values)
    pieces = [np.flatnonzero(examples.row == row).tolist() for row in rows]
    made = make(
        [[(int(examples.column[i]), tokens[i].tolist()) for i in some] for some in pieces],
        [numbers[row].tolist() for row in rows],
        labels.begin[list(rows)].tolist(),
    )
    return dataclasses.replace(made, weight=examples.weight[list(rows)])


def laid_out(batch: Batch, row: int, name: str = "tokens") -> list[int]:
    return batch[name][row].tolist()


PAIRS = make(
    [[(1, [10, 11]), (4, [20, 21, 22])], [(1, [12])], [(1, [13]), (3, [23]), (5, [33])]],
    [[1], [0], [2]],
)
CHOICES = make(
    [
        [(1, [10, 11]), (4, [20]), (9, [10, 11]), (12, [21, 22])],
        [(1, [12]), (3, [23, 24]), (9, [12])],  # the second choice has no text
    ],
    [[1], [0]],
)
# A row of 5 tokens in two windows of 3 behind a question of 2; then one of a single text.
WINDOWS = make(
    [[(1, [10, 11]), (4, [20, 21, 22])], [(1, [10, 11]), (4, [22, 23, 24])], [(1, [30, 31, 32])]],
    [[4, 5], [4, 5], []],
    [2, 4, 0],
)
TAGS = make(
    [[(1, [20, 21, 22])], [(1, [23, 24])], [(1, [30])]],
    [[0, -1, 3, -1, 1], [0, -1, 3, -1, 1], [2]],
    [0, 3, 0],
)


def numbered(examples: Examples) -> Examples:
    """With a number as each row's label."""
    assert examples.labels is not None
    values = np.array([0.5, -2.0, 3.25], dtype=np.float32)
    return dataclasses.replace(examples, labels=dataclasses.replace(examples.labels, values=values))


def with_probabilities(examples: Examples) -> Examples:
    values = np.array([0.1, 0.7, 0.2, 0, 0, 1, 0.6, 0.3, 0.1], dtype=np.float32)
    count = np.full(3, 3, dtype=np.int64)
    assert examples.labels is not None
    return dataclasses.replace(
        examples, labels=dataclasses.replace(examples.labels, values=values, count=count)
    )


QA = question_answering.Config(stride=2, question_length=2, answer_length=3)
TASKS: list[
    tuple[str, Any, Examples, int, int]
] = [  # name, Config, examples, their width, outputs of the head
    ("classification", classification.Config(label_smoothing=0.1), PAIRS, 8, 3),
    ("soft", classification.Config(soft=True), with_probabilities(PAIRS), 8, 3),
    ("regression", regression.Config(), numbered(PAIRS), 8, 1),
    ("multiple_choice", multiple_choice.Config(choices=2), CHOICES, 8, 1),
    ("tagging", tagging.Config(), TAGS, 8, 4),
    ("question_answering", QA, WINDOWS, 8, 2),
]
each_task = pytest.mark.parametrize(
    ("config", "examples", "width", "outputs"),
    [task[1:] for task in TASKS],
    ids=[task[0] for task in TASKS],
)


def test_rows_of_one_text_and_of_several() -> None:
    batch = classification.Config().build(VOCABULARY).collate(PAIRS, 8)
    assert laid_out(batch, 0) == [CLS, 10, 11, SEP, 20, 21, 22, SEP]
    assert laid_out(batch, 1) == [CLS, 12, SEP, *[PAD] * 5]
    assert laid_out(batch, 2) == [CLS, 13, SEP, 23, SEP, 33, SEP, PAD]
    assert batch["token_types"].tolist() == [[0] * 4 + [1] * 4, [0] * 8, [0] * 3 + [1] * 4 + [0]]
    assert batch["segments"].tolist() == [[1] * 8, [1] * 3 + [0] * 5, [1] * 7 + [0]]
    assert batch["positions"].tolist() == [list(range(8)), [0, 1, 2, *[0] * 5], [*range(7), 0]]
    assert batch["predicted"].tolist() == [[0]] * 3
    assert batch["labels"].tolist() == [1, 0, 2]
    assert batch["labels"].dtype == np.int64


def test_rows_of_roberta_have_two_separators_and_no_types() -> None:
    examples = make([[(1, [10, 11]), (5, [20])], [(1, [12])]], [[1], [0]])
    objective = classification.Config().build(ROBERTA)
    parts = objective.pack_spec(8).parts
    assert parts is not None
    assert parts.between == 2
    batch = objective.collate(examples, 8)
    assert laid_out(batch, 0) == [CLS, 10, 11, SEP, SEP, 20, SEP, PAD]
    assert laid_out(batch, 1) == [CLS, 12, SEP, *[PAD] * 5]
    assert "token_types" not in batch


def test_rows_without_a_first_text_or_any() -> None:
    batch = (
        classification.Config().build(VOCABULARY).collate(make([[(2, [20])], []], [[1], [0]]), 5)
    )
    assert laid_out(batch, 0) == [CLS, SEP, 20, SEP, PAD]
    assert laid_out(batch, 0, "token_types") == [0, 0, 1, 1, 0]
    # No row may be all padding: a softmax over nothing is not a number.
    assert laid_out(batch, 1) == [CLS, SEP, PAD, PAD, PAD]
    assert laid_out(batch, 1, "segments") == [1, 1, 0, 0, 0]


def test_choices_are_sequences_side_by_side() -> None:
    objective = multiple_choice.Config(choices=2).build(VOCABULARY)
    batch = objective.collate(CHOICES, 8)
    assert objective.pack_spec(8).positions == 16
    assert objective.predictions(8) == 2
    assert laid_out(batch, 0) == [
        CLS,
        10,
        11,
        SEP,
        20,
        SEP,
        PAD,
        PAD,
        CLS,
        10,
        11,
        SEP,
        21,
        22,
        SEP,
        PAD,
    ]
    assert laid_out(batch, 0, "token_types") == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert laid_out(batch, 0, "positions") == [0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 4, 5, 6, 0]
    assert laid_out(batch, 1) == [CLS, 12, SEP, 23, 24, SEP, PAD, PAD, CLS, 12, SEP, *[PAD] * 5]
    assert batch["labels"].tolist() == [1, 0]


def test_an_answer_is_in_the_windows_that_hold_all_of_it() -> None:
    batch = QA.build(VOCABULARY).collate(WINDOWS, 8)
    assert laid_out(batch, 1) == [CLS, 10, 11, SEP, 22, 23, 24, SEP]
    # Tokens 4 and 5 of the row are the context's 22 and 23; the first window ends with 22.
    assert batch["labels"].tolist() == [[0, 0], [4, 5], [0, 0]]
    assert laid_out(batch, 2, "token_types") == [0] * 8


def test_tags_are_those_of_the_window() -> None:
    batch = tagging.Config().build(VOCABULARY).collate(TAGS, 8)
    assert batch["labels"].tolist() == [
        [-1, 0, -1, 3, *[-1] * 4],
        [-1, -1, 1, *[-1] * 5],
        [-1, 2, *[-1] * 6],
    ]
    assert np.array_equal(batch["weights"], batch["labels"] >= 0)


@each_task
@pytest.mark.parametrize("vocabulary", [VOCABULARY, ROBERTA], ids=["bert", "roberta"])
def test_a_row_is_the_same_alone_and_in_any_batch(
    config: Any, examples: Examples, width: int, outputs: int, vocabulary: Vocabulary
) -> None:
    objective = config.build(vocabulary)
    batch = objective.collate(examples, width)
    size = len(batch["tokens"])
    for rows in ([0], [size - 1, 0, 0], [1]):
        some = objective.collate(only(examples, rows), width)
        assert batch.keys() == some.keys()
        for name, array in batch.items():
            np.testing.assert_array_equal(some[name], array[rows], err_msg=name)
            assert some[name].dtype == array.dtype


class Stub(nn.Module):
    """Logits that depend on the tokens, for the predicted positions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(100, outputs, generator=generator))
        self.mix = nn.Parameter(torch.randn(100, outputs, generator=generator))

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        rows, key = inputs.tokens.shape, inputs.dropout_key
        of_rows = (inputs.segments, inputs.positions, inputs.token_types)
        assert all(array is None or array.shape == rows for array in of_rows)
        assert key is None or key.shape == rows[:1]
        (name,) = outputs
        return {name: self.scores(inputs.tokens, inputs.predicted)}

    def scores(self, tokens: Tensor, predicted: Tensor | None = None) -> Tensor:
        logits = self.table[tokens] + self.mix[tokens].mean(dim=1, keepdim=True)
        return (
            logits
            if predicted is None
            else logits.gather(1, predicted[..., None].expand(-1, -1, logits.shape[-1]))
        )


def as_tensors(batch: Batch, **more: Tensor) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()
    } | more


@each_task
def test_the_losses_of_micro_batches_add_up(
    config: Any, examples: Examples, width: int, outputs: int
) -> None:
    objective, model = config.build(VOCABULARY), Stub(outputs)
    size = examples.key.size
    whole = as_tensors(objective.collate(examples, width))
    totals = {name: torch.tensor(weight) for name, weight in objective.weights(whole).items()}
    loss = objective.loss(model, whole, totals)
    loss.total.backward()
    gradients = [
        model.table.grad,
        model.mix.grad,
    ]  # what scores are compared in has none of one of them
    assert max(float(each.abs().max()) for each in gradients if each is not None) > 1e-3
    model.zero_grad()

    # One by one, and with rows that only pad: they change nothing.
    padded = dataclasses.replace(
        examples, weight=np.array([1] * (size - 1) + [0], dtype=np.float32)
    )
    parts = [only(examples, [size - 1]), padded]
    losses = [
        objective.loss(model, as_tensors(objective.collate(part, width)), totals) for part in parts
    ]
    torch.testing.assert_close(sum(part.total for part in losses), loss.total)
    sum(part.total for part in losses).backward()
    torch.testing.assert_close([model.table.grad, model.mix.grad], gradients)
    for name, (total, weight) in loss.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name][0] for part in losses), total)
        torch.testing.assert_close(sum(part.metrics[name][1] for part in losses), weight)
        assert not total.requires_grad
    torch.testing.assert_close(
        loss.metrics["loss"][0] / loss.metrics["loss"][1], loss.total.detach()
    )
    assert loss.outputs is not None
    assert not loss.outputs.requires_grad
    assert loss.outputs.dtype == torch.float32
    torch.testing.assert_close(losses[1].outputs, loss.outputs)  # weights play no part in them


@each_task
def test_a_batch_needs_no_segments_where_nothing_is_padding(
    config: Any, examples: Examples, width: int, outputs: int
) -> None:
    """They are left out then, so that attention needs no mask."""
    objective, model = config.build(VOCABULARY), Stub(outputs)
    batch = as_tensors(objective.collate(only(examples, [0]), width))
    key = torch.zeros(batch["predicted"].shape if objective.predicts == "multiple_choice" else 1)
    without = {name: array for name, array in batch.items() if name != "segments"} | {
        "dropout_key": key
    }
    totals = {name: torch.tensor(1.0) for name in objective.weights(batch)}
    full = batch | {"segments": torch.ones_like(batch["segments"])}
    torch.testing.assert_close(
        objective.loss(model, without, totals).total, objective.loss(model, full, totals).total
    )


def test_losses_are_those_of_pytorch() -> None:
    model, one = Stub(3), {"examples": torch.tensor(3.0)}
    batch = as_tensors(classification.Config().build(VOCABULARY).collate(PAIRS, 8))
    logits = model.scores(batch["tokens"])[:, 0]
    label = torch.tensor([1, 0, 2])
    for smoothing in (0.0, 0.2):
        objective = classification.Config(label_smoothing=smoothing).build(VOCABULARY)
        loss = objective.loss(model, as_tensors(objective.collate(PAIRS, 8)), one)
        torch.testing.assert_close(
            loss.total, F.cross_entropy(logits, label, label_smoothing=smoothing)
        )
        assert loss.metrics["accuracy"][0] == (logits.argmax(-1) == label).sum()
    soft = classification.Config(soft=True).build(VOCABULARY)
    hard = dataclasses.replace(
        PAIRS,
        labels=Labels(
            np.eye(3, dtype=np.float32)[[1, 0, 2]].reshape(-1),
            np.full(3, 3),
            *[np.zeros(3, int)] * 3,
        ),
    )
    loss = soft.loss(model, as_tensors(soft.collate(hard, 8)), one)
    torch.testing.assert_close(loss.total, F.cross_entropy(logits, label))
    number = regression.Config().build(VOCABULARY)
    loss = number.loss(Stub(1), as_tensors(number.collate(numbered(PAIRS), 8)), one)
    assert loss.outputs is not None
    torch.testing.assert_close(
        loss.total.detach(), F.mse_loss(loss.outputs[:, 0], torch.tensor([0.5, -2.0, 3.25]))
    )


def test_losses_of_choices_and_of_tags_are_those_of_pytorch() -> None:
    choice, model = multiple_choice.Config(choices=2).build(VOCABULARY), Stub(1)
    batch = as_tensors(choice.collate(CHOICES, 8), dropout_key=torch.zeros(2, 2, dtype=torch.int32))
    logits = model.scores(batch["tokens"].view(4, 8))[:, 0].view(2, 2)  # a row of each choice
    loss = choice.loss(model, batch, {"examples": torch.tensor(2.0)})
    torch.testing.assert_close(loss.total, F.cross_entropy(logits, torch.tensor([1, 0])))
    tags, model = tagging.Config().build(VOCABULARY), Stub(4)
    batch = as_tensors(tags.collate(TAGS, 8))
    logits = model.scores(batch["tokens"])
    labels = torch.tensor([[-1, 0, -1, 3, *[-1] * 4], [-1, -1, 1, *[-1] * 5], [-1, 2, *[-1] * 6]])
    loss = tags.loss(model, batch, {"tags": torch.tensor(float((labels >= 0).sum()))})
    torch.testing.assert_close(
        loss.total, F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-1)
    )


def test_the_loss_of_spans_is_that_of_pytorch_where_no_cell_is_padding() -> None:
    objective, model = QA.build(VOCABULARY), Stub(2)
    batch = as_tensors(objective.collate(only(WINDOWS, [0, 1]), 8))
    begin, end = model.scores(batch["tokens"]).unbind(-1)
    loss = objective.loss(model, batch, {"examples": torch.tensor(2.0)})
    expected = (
        F.cross_entropy(begin, torch.tensor([0, 4])) + F.cross_entropy(end, torch.tensor([0, 5]))
    ) / 2
    torch.testing.assert_close(loss.total, expected)


def test_rows_of_a_teacher_and_rows_of_people_go_together() -> None:
    """As in training on one of them, with the held-out rows of the other."""
    objective, model, one = (
        classification.Config(soft=True).build(VOCABULARY),
        Stub(3),
        {"examples": torch.tensor(3.0)},
    )
    own, taught = PAIRS.labels, with_probabilities(PAIRS).labels
    assert own is not None
    assert taught is not None
    values = np.concatenate([taught.values[:3], own.values[1:2], taught.values[6:]])
    mixed = dataclasses.replace(own, values=values, count=np.array([3, 1, 3]))
    batch = objective.collate(dataclasses.replace(PAIRS, labels=mixed), 8)
    assert batch["probabilities"].tolist() == [
        [*map(np.float32, row)] for row in ([0.1, 0.7, 0.2], [1, 0, 0], [0.6, 0.3, 0.1])
    ]
    loss = objective.loss(model, as_tensors(objective.collate(PAIRS, 8)), one)
    plain = classification.Config().build(VOCABULARY)
    torch.testing.assert_close(
        loss.total, plain.loss(model, as_tensors(plain.collate(PAIRS, 8)), one).total
    )


def test_padding_has_no_part_in_the_softmax_of_a_span() -> None:
    objective, model = QA.build(VOCABULARY), Stub(2)
    batch, one = (
        as_tensors(objective.collate(only(WINDOWS, [2]), 8)),
        {"examples": torch.tensor(1.0)},
    )
    logits = model.scores(batch["tokens"])[:, :5]  # [CLS] 30 31 32 [SEP]
    nll = [F.cross_entropy(logits[:, :, side], torch.tensor([0])) for side in (0, 1)]
    torch.testing.assert_close(objective.loss(model, batch, one).total, (nll[0] + nll[1]) / 2)


def test_each_choice_is_scored_by_itself() -> None:
    objective, model = multiple_choice.Config(choices=2).build(VOCABULARY), Stub(1)
    batch = as_tensors(
        objective.collate(CHOICES, 8), dropout_key=torch.zeros(2, 2, dtype=torch.int32)
    )
    logits = objective.loss(model, batch, {"examples": torch.tensor(2.0)}).outputs
    assert logits is not None
    alone = [model.scores(batch["tokens"][:, at : at + 8])[:, 0, 0] for at in (0, 8)]
    torch.testing.assert_close(logits, torch.stack(alone, dim=1).detach())


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_outputs_of_both_orders_are_added(kind: str) -> None:
    """Each is scored by itself, and turning a row's texts around changes nothing."""
    config: Any = {"classification": classification, "regression": regression}[kind]
    objective, model = config.Config(both_orders=True).build(VOCABULARY), Stub(3)
    if kind == "regression":
        model = Stub(1)
    assert objective.predictions(8) == 2
    rows = [
        [(1, [10, 11]), (4, [20]), (9, [20]), (11, [10, 11])],
        [(1, [12]), (3, [23, 24]), (9, [23, 24]), (12, [12])],
    ]
    turned = [
        [*((column - 8, tokens) for column, tokens in row[2:]), *((c + 8, t) for c, t in row[:2])]
        for row in rows
    ]
    found = []
    for given in (rows, turned):
        batch = as_tensors(
            objective.collate(make(given, [[1], [0]]), 8),
            dropout_key=torch.zeros(2, 2, dtype=torch.int32),
        )
        found.append(objective.loss(model, batch, {"examples": torch.tensor(2.0)}))
        outputs = found[-1].outputs
        alone = [model.scores(batch["tokens"][:, at : at + 8])[:, 0] for at in (0, 8)]
        torch.testing.assert_close(outputs, sum(alone).detach())  # type: ignore[union-attr]
    torch.testing.assert_close(found[0].total, found[1].total)


def test_windows_of_a_row_count_once_together() -> None:
    """A row of two windows and one of one have the same part in the loss, and in the scores."""
    objective = classification.Config(stride=4, metrics=("accuracy", "f1")).build(VOCABULARY)
    parts = objective.pack_spec(16).parts
    assert parts is not None
    # [CLS] first [SEP] window [SEP]: 13 tokens of text, of which a window of 4 has its part.
    assert (parts.layout, parts.most) == ("windows", 9)
    examples = make([[(1, [10, 11])], [(1, [12, 13])], [(1, [20])]], [[1], [1], [0]])
    assert examples.labels is not None
    windows = dataclasses.replace(
        examples.labels, document=np.array([0, 0, 1]), examples=np.array([2, 2, 1])
    )
    batch = objective.collate(dataclasses.replace(examples, labels=windows), 16)
    assert batch["weights"].tolist() == [0.5, 0.5, 1.0]
    # So do their tokens in the loss of the language model beside it.
    beside = classification.Config(stride=4, lm_weight=0.5).build(VOCABULARY)
    batch = beside.collate(dataclasses.replace(examples, labels=windows), 16)
    assert batch["lm_weights"].max(1).tolist() == [0.5, 0.5, 1.0]
    rows = [TaskRow(texts=("a",), label=1.0), TaskRow(texts=("b",), label=0.0)]
    # The mean of the first row's logits is 0.5 for class 1; the second window alone says 0.
    given = predictions([[0, 3], [2, 0], [1, 0]], rows, ("no", "yes"), document=[0, 0, 1])
    assert objective.scores(given) == {"accuracy": 1.0, "f1": 1.0}
    (first, _) = objective.row_predictions(given)
    assert first["prediction"] == "yes"
    assert first["probabilities"]["yes"] == pytest.approx(1 / (1 + np.exp(-0.5)))
    whole = classification.Config().build(VOCABULARY)
    assert whole.pack_spec(16) == whole.pack_spec(16)
    assert (spec := whole.pack_spec(16).parts) is not None
    assert (spec.layout, spec.most) == ("joined", None)


def predictions(
    outputs: Any, rows: list[TaskRow], labels: tuple[str, ...] = (), **columns: list[int]
) -> Predictions:
    outputs = np.asarray(outputs, dtype=np.float32)
    numbers = dict.fromkeys(("begin", "column", "length"), [0] * len(outputs))
    columns = {"document": list(range(len(outputs))), **numbers, **columns}
    of_examples = {k: np.array(v) for k, v in columns.items()}
    return Predictions(
        outputs, **of_examples, rows=rows, number=np.arange(len(rows)), labels=labels
    )


def test_scores_of_classes() -> None:
    names = ("accuracy", "f1", "group_exact_match")
    objective = classification.Config(metrics=names).build(VOCABULARY)
    rows = [
        TaskRow(("a",), label, group=group)
        for label, group in ((1, "x"), (0, "x"), (1, "y"), (0, "y"))
    ]
    found = objective.scores(predictions([[0, 1], [1, 0], [1, 0], [0, 1]], rows, ("no", "yes")))
    assert found == pytest.approx({"accuracy": 1 / 2, "f1": 1 / 2, "group_exact_match": 1 / 2})
    assert list(found) == list(names)
    with pytest.raises(ConfigError, match=r"Set source\.group to the column"):
        objective.scores(predictions([[0, 1]], [TaskRow(("a",), 1)], ("no", "yes")))
    taught = TaskRow(("a",), probabilities=(0.4, 0.6), group="z")
    assert objective.scores(predictions([[0, 1], [1, 0]], [taught] * 2))["accuracy"] == 0.5
    choice = multiple_choice.Config(choices=2).build(VOCABULARY)
    assert choice.scores(predictions([[0, 1], [0, 1]], rows)) == {"accuracy": 0.5}


def test_scores_of_numbers() -> None:
    rows = [TaskRow(("a",), label) for label in (0.0, 1.0, 5.0)]
    found = regression.Config().build(VOCABULARY).scores(predictions([[0], [2], [10]], rows))
    assert found == pytest.approx({"pearson": 1.0, "spearman": 1.0})


def test_scores_of_tags() -> None:
    """Of each word its first token's tag, wherever that stands; windows come in any order."""
    names = ("O", "B-PER", "I-PER", "B-LOC")
    # "van" is two tokens, then one is white space; the last two words have no token.
    row = TaskRow(
        ("Ann van  Berg sees Rome",),
        spans=((0, 3, 1), (4, 7, 2), (9, 13, 2), (19, 23, 3), (8, 9, 0), (10, 10, 0)),
        offsets=((0, 3), (4, 5), (5, 7), (8, 8), (9, 13), (14, 18), (19, 23)),
    )
    other = TaskRow(("Bob",), spans=((0, 3, 1),), offsets=((0, 3),))
    outputs = np.zeros((3, 6))
    outputs[0, 1:5] = [3, 2, 0, 3]  # " ", "Berg", "sees", "Rome"
    outputs[2, 1:4] = [1, 2, 3]  # "Ann", "v", "an"
    found = predictions(
        outputs,
        [row, other],
        names,
        document=[0, 1, 0],
        begin=[3, 0, 0],
        column=[1] * 3,
        length=[4, 1, 3],
    )
    objective = tagging.Config(metrics=("entity_f1", "entity_precision", "entity_recall")).build(
        VOCABULARY
    )
    assert objective.tags(found) == [["B-PER", "I-PER", "I-PER", "B-LOC", "O", "O"], ["O"]]
    assert objective.scores(found) == pytest.approx(
        {"entity_f1": 0.8, "entity_precision": 1.0, "entity_recall": 2 / 3}
    )
    first, second = objective.row_predictions(found)
    assert first == {
        "words": ["Ann", "van", "Berg", "Rome", " ", ""],
        "label": ["B-PER", "I-PER", "I-PER", "B-LOC", "O", "O"],
        "prediction": ["B-PER", "I-PER", "I-PER", "B-LOC", "O", "O"],
    }
    assert second == {"words": ["Bob"], "label": ["B-PER"], "prediction": ["O"]}


def spans_by_definition(
    starts: np.ndarray,
    ends: np.ndarray,
    columns: list[int],
    begins: list[int],
    lengths: list[int],
    most: int,
    best: int,
) -> list[tuple[float, int, int]]:
    """Scores and tokens of the spans that BERT's run_squad.py looks at, the best one first."""
    found = []
    for window, (column, begin, length) in enumerate(zip(columns, begins, lengths, strict=True)):
        first, last = (
            sorted(range(length), key=lambda i: -logits[window, column + i])[:best]
            for logits in (starts, ends)
        )
        for i in first:
            for j in last:
                if owner_by_definition(begin + i, begins, lengths) == window and i <= j < i + most:
                    score = float(starts[window, column + i]) + float(ends[window, column + j])
                    found.append((score, begin + i, begin + j))
    return sorted(found, key=lambda span: -span[0])


def owner_by_definition(token: int, begins: list[int], lengths: list[int]) -> int | None:
    best, owner = None, None
    for window, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
        if begin <= token < begin + length:
            score = min(token - begin, begin + length - 1 - token) + 0.01 * length
            if best is None or score > best:
                best, owner = score, window
    return owner


def cut(tokens: int, room: int, stride: int) -> tuple[list[int], list[int]]:
    begins = [0]
    while begins[-1] + room < tokens:
        begins.append(begins[-1] + stride)
    return begins, [min(room, tokens - begin) for begin in begins]


@pytest.mark.parametrize(
    ("tokens", "room", "stride"), [(1, 5, 3), (30, 7, 3), (23, 10, 10), (40, 9, 2), (17, 16, 1)]
)
def test_a_token_is_of_the_window_with_most_text_around_it(
    tokens: int, room: int, stride: int
) -> None:
    begins, lengths = cut(tokens, room, stride)
    owner = max_context(np.array(begins), np.array(lengths), tokens)
    assert owner.tolist() == [
        owner_by_definition(token, begins, lengths) for token in range(tokens)
    ]


def test_windows_of_a_long_text_take_memory_in_proportion_to_it() -> None:
    tokens = 20_000
    begins, lengths = cut(tokens, 316, 128)
    tracemalloc.start()
    owner = max_context(np.array(begins), np.array(lengths), tokens)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * tokens
    assert owner.max() == len(begins) - 1 > 150


@pytest.mark.parametrize("vocabulary", [VOCABULARY, ROBERTA], ids=["bert", "roberta"])
@pytest.mark.parametrize("question", [3, 8])  # of the second one, two tokens are cut off
def test_answers_are_the_best_spans_of_all_windows(question: int, vocabulary: Vocabulary) -> None:
    config = question_answering.Config(stride=5, question_length=6, answer_length=4, n_best=4)
    random = np.random.default_rng(question)
    words = [f"w{i}" for i in range(30)]
    text = " ".join(words)
    offsets = tuple((text.index(word), text.index(word) + len(word)) for word in words)
    column = 1 + min(question, 6) + vocabulary.between
    begins, lengths = cut(30, 12, 5)
    outputs = random.normal(size=(len(begins), 30, 2)).astype(np.float32)
    expected = spans_by_definition(
        outputs[..., 0], outputs[..., 1], [column] * len(begins), begins, lengths, most=4, best=4
    )
    order = random.permutation(
        len(begins)
    ).tolist()  # the row's windows, then one of a row whose text has no token
    found = predictions(
        np.concatenate((outputs[order], outputs[:1])),
        [TaskRow(("q", text), offsets=offsets), TaskRow(("q", ""))],
        document=[0] * len(begins) + [1],
        begin=[question + begins[i] for i in order] + [0],
        column=[column] * len(begins) + [1],
        length=[lengths[i] for i in order] + [0],
    )
    answers, none = config.build(vocabulary).answers(found)
    assert len(expected) > 4
    for answer, (score, first, last) in zip(answers.best, expected, strict=False):
        assert answer.text == text[answer.begin : answer.end] == " ".join(words[first : last + 1])
        assert answer.score == pytest.approx(score)
    assert len(answers.best) == 4
    assert answers.no_answer == pytest.approx(outputs[:, 0].sum(axis=1).min())
    assert answers.doubt == pytest.approx(answers.no_answer - expected[0][0])
    assert (none.best, none.text, none.doubt) == ((), "", np.inf)


def of_squad(gaps: list[float]) -> Predictions:
    """Two questions with an answer, two without; "Rome" is better than none by each gap."""
    text = "to Rome it went"
    offsets = ((0, 2), (3, 7), (8, 10), (11, 15))
    rows = [
        TaskRow(("q", text), answers=answers, offsets=offsets)
        for answers in (("Rome",), ("to Rome",), (), ())
    ]
    outputs = np.full((4, 8, 2), -9.0)
    outputs[:, 0] = 0
    outputs[:, 4] = np.array(gaps)[:, None] / 2  # the position of "Rome", after [CLS] q [SEP]
    return predictions(outputs, rows, begin=[1] * 4, column=[3] * 4, length=[4] * 4)


def test_scores_of_answers() -> None:
    found = of_squad([5, 3, 1, 2])
    assert question_answering.Config().build(VOCABULARY).scores(found) == pytest.approx(
        {"exact_match": 1 / 4, "f1": (1 + 2 / 3) / 4}
    )
    tuned = question_answering.Config(impossible=True).build(VOCABULARY).scores(found)
    assert tuned == pytest.approx(
        {
            "exact_match": 3 / 4,
            "f1": (1 + 2 / 3 + 2) / 4,
            "has_answer_exact_match": 1 / 2,
            "has_answer_f1": (1 + 2 / 3) / 2,
            "no_answer_accuracy": 1.0,
            "best_exact_match": 3 / 4,
            "best_f1": (1 + 2 / 3 + 2) / 4,
            "threshold": -3.0,
        }
    )
    assert {*tuned} == {
        *question_answering.Config(impossible=True).build(VOCABULARY).score_names,
        "threshold",
    }
    fixed = (
        question_answering.Config(impossible=True, threshold=-1.5).build(VOCABULARY).scores(found)
    )
    assert fixed == pytest.approx(
        {
            "exact_match": 2 / 4,
            "f1": (1 + 2 / 3 + 1) / 4,
            "has_answer_exact_match": 1 / 2,
            "has_answer_f1": (1 + 2 / 3) / 2,
            "no_answer_accuracy": 0.5,
            "best_exact_match": 3 / 4,
            "best_f1": (1 + 2 / 3 + 2) / 4,
            "threshold": -1.5,
        }
    )


def test_the_best_answers_of_a_question_share_one_softmax() -> None:
    """With no answer among them, where there may be none, as in run_squad.py."""
    found = of_squad([5, 3, 1, 2])
    found = dataclasses.replace(
        found, rows=[dataclasses.replace(row, group="q1") for row in found.rows]
    )
    for impossible in (False, True):
        config = question_answering.Config(
            impossible=impossible, threshold=-1.5 if impossible else None, n_best=2
        )
        objective = config.build(VOCABULARY)
        for row, answers in zip(
            objective.row_predictions(found), objective.answers(found), strict=True
        ):
            n_best, scores = row["n_best"], np.array([answer["score"] for answer in row["n_best"]])
            texts = [answer["text"] for answer in n_best if answer["text"]]
            assert texts == [answer.text for answer in answers.best]
            assert sorted(scores, reverse=True) == scores.tolist()
            expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            assert [answer["probability"] for answer in n_best] == pytest.approx(expected.tolist())
            assert [answer["score"] for answer in n_best if not answer["text"]] == [
                0.0
            ] * impossible
            assert row.get("null_odds") == (answers.doubt if impossible else None)
            assert row["prediction"] == ("" if impossible and answers.doubt > -1.5 else "Rome")
            assert row["id"] == "q1"


def test_a_text_without_answers_has_finite_odds_of_none() -> None:
    row = TaskRow(("q", ""), answers=("Rome",))
    found = predictions(np.full((1, 8, 2), -2.0), [row], begin=[1], column=[3], length=[0])
    (said,) = question_answering.Config(impossible=True).build(VOCABULARY).row_predictions(found)
    assert said == {
        "answers": ["Rome"],
        "prediction": "",
        "null_odds": -4.0,
        "n_best": [{"text": "", "begin": 0, "end": 0, "score": -4.0, "probability": 1.0}],
    }


def test_predictions_of_rows_are_in_the_order_of_the_rows() -> None:
    """Also where examples are not, as in batches of about the same length."""
    rows = [TaskRow((text,), label, group=text) for text, label in (("a", 1), ("b", 0), ("c", 1))]
    columns = {"document": [2, 0, 1]}
    found = predictions([[9, 0], [0, 9], [0, 9]], rows, ("no", "yes"), **columns)
    said = [*classification.Config().build(VOCABULARY).row_predictions(found)]
    assert [(row["group"], row["label"], row["prediction"]) for row in said] == [
        ("a", "yes", "yes"),
        ("b", "no", "yes"),
        ("c", "yes", "no"),
    ]
    assert said[0]["probabilities"] == pytest.approx(
        {"no": 1 / (1 + np.exp(9)), "yes": 1 / (1 + np.exp(-9))}
    )
    taught = dataclasses.replace(found, rows=[TaskRow(("a",), probabilities=(0.4, 0.6))] * 3)
    assert [
        row["label"] for row in classification.Config().build(VOCABULARY).row_predictions(taught)
    ] == ["yes"] * 3
    said = [*multiple_choice.Config(choices=2).build(VOCABULARY).row_predictions(found)]
    assert [(row["label"], row["prediction"]) for row in said] == [(1, 1), (0, 1), (1, 0)]
    numbers = predictions([[9], [0.5], [1]], rows, **columns)
    said = [*regression.Config().build(VOCABULARY).row_predictions(numbers)]
    assert said == [
        {"label": 1, "prediction": 0.5},
        {"label": 0, "prediction": 1.0},
        {"label": 1, "prediction": 9.0},
    ]


def test_windows_that_were_not_scored_shift_no_answer() -> None:
    """As in a partial evaluation without the row's first window."""
    found = of_squad([5, 3, 1, 2])
    late = dataclasses.replace(
        found, begin=found.begin + 2, length=found.length - 2
    )  # "it went", behind "to Rome"
    answers = question_answering.Config().build(VOCABULARY).answers(late)
    assert [answer.text for answer in answers] == ["went"] * 4  # at the position where "Rome" was


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (
            lambda: classification.Config(metrics=("pearson",)),
            "metrics has pearson. Use some of accuracy",
        ),
        (lambda: regression.Config(metrics=("accuracy",)), "Use some of pearson, spearman"),
        (lambda: multiple_choice.Config(metrics=("f1",)), "Use some of accuracy"),
        (lambda: tagging.Config(metrics=("f1",)), "entity_f1"),
        (lambda: classification.Config(label_smoothing=1.0), "label_smoothing is 1.0"),
        (lambda: multiple_choice.Config(choices=1), "choices is 1"),
        (lambda: question_answering.Config(stride=0), "stride is 0"),
        (lambda: question_answering.Config(threshold=0.0), "Set impossible to true"),
        (
            lambda: classification.Config(both_orders=True, lm_weight=0.5),
            "lm_weight is 0.5 and both_orders is true",
        ),
        (lambda: regression.Config(stride=0), "stride is 0. Use 1 or more"),
        (
            lambda: classification.Config(stride=4, both_orders=True),
            "stride is 4 beside both_orders",
        ),
        (
            lambda: sift.Config(regression.Config(both_orders=True)),
            "of.both_orders is true, and sift",
        ),
        (
            lambda: distillation.Config(
                teacher="runs/teacher", of=classification.Config(both_orders=True)
            ),
            "of.both_orders is true, and students",
        ),
        (
            lambda: question_answering.Config().build(VOCABULARY).pack_spec(128),
            "Use a stride of at most 61",
        ),
        (
            lambda: question_answering.Config().build(VOCABULARY).pack_spec(60),
            "has room for -7 tokens of text",
        ),
        (
            lambda: tagging.Config().build(Vocabulary(9, 0, None, None, None, ())),
            r"has no \[CLS\], \[SEP\]",
        ),
        (
            lambda: classification.Config().build(VOCABULARY).collate(with_probabilities(PAIRS), 8),
            "Set it to true",
        ),
    ],
)
def test_invalid_settings_are_rejected(make_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config()


@each_task
def test_a_task_says_what_it_needs(
    config: Any, examples: Examples, width: int, outputs: int
) -> None:
    objective: Task = config.build(ROBERTA)
    spec = objective.pack_spec(32)
    assert spec.parts is not None
    assert (spec.prefix, spec.suffix, spec.parts.between) == (1, 1, 2)
    assert objective.predicts in (
        "classification",
        "multiple_choice",
        "tagging",
        "question_answering",
    )
    assert objective.predicts in objective.needs


def test_ensembles_average_outputs_and_taggers_vote() -> None:
    classes = classification.Config().build(VOCABULARY)
    mean = classes.combined([np.float32([[1, 3]]), np.float32([[3, -1]])])
    assert mean.tolist() == [[2, 1]]
    tagger = tagging.Config().build(VOCABULARY)
    # Two against one; one each, where the first counts; and all alike.
    members = [np.float32([[3, 3, 5]]), np.float32([[1, 1, 5]]), np.float32([[1, 2, 5]])]
    assert tagger.combined(members).tolist() == [[1, 3, 5]]
