"""Rows of tasks for models without [CLS] (T5, the GPTs), which pool the last position."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.format.manifest import TaskLabels
from data_pipeline.reading.config import Config as DataConfig
from samestep.errors import ConfigError
from samestep.examples import TaskRow, Vocabulary
from tests.unit.objectives import test_task_objectives as of_bert
from tests.unit.objectives.test_task_objectives import make, predictions
from trainer.models import Outputs
from trainer.models.families import bart, bert, gpt2, roberta, t5
from trainer.models.inputs import Inputs
from trainer.objectives.kinds import (
    classification,
    multiple_choice,
    question_answering,
    regression,
    tagging,
)
from trainer.optim.kinds import adamw
from trainer.training.compatibility import check_compatibility
from trainer.training.experiment import Experiment
from trainer.training.settings import Config as TrainingConfig

PAD, END, BEGIN = 0, 1, 2
T5 = Vocabulary(100, PAD, None, END, None, (PAD, END), eos=END, sentinels=(98, 99))
GPT2 = Vocabulary(
    100, None, 99, 99, None, (99,), eos=99
)  # <|endoftext|> begins and ends texts, and is padding
GPT1 = Vocabulary(
    100, PAD, BEGIN, END, None, (PAD, END, BEGIN), eos=END
)  # or SentencePiece with a token to begin with
ROBERTA = Vocabulary(100, PAD, BEGIN, END, 3, (PAD, END, BEGIN, 3), eos=END, between=2)

# A pair, a single text, and three texts; first without, then with a token before them.
PAIRS_ALONE = make(
    [[(0, [10, 11]), (3, [20, 21])], [(0, [12])], [(0, [13]), (2, [23]), (4, [33])]],
    [[1], [0], [2]],
)
PAIRS = dataclasses.replace(PAIRS_ALONE, column=PAIRS_ALONE.column + 1)


@pytest.mark.parametrize("vocabulary", [T5, GPT2], ids=["t5", "gpt2"])
def test_each_text_is_ended(vocabulary: Vocabulary) -> None:
    end, pad = (99, 99) if vocabulary is GPT2 else (END, PAD)
    objective = classification.Config().build(vocabulary)
    spec = objective.pack_spec(8)
    assert spec.parts is not None
    assert (spec.prefix, spec.suffix, spec.parts.between) == (0, 1, 1)
    batch = objective.collate(PAIRS_ALONE, 8)
    assert batch["tokens"].tolist() == [
        [10, 11, end, 20, 21, end, pad, pad],
        [12, end, *[pad] * 6],
        [13, end, 23, end, 33, end, pad, pad],
    ]
    assert batch["segments"].tolist() == [[1] * 6 + [0] * 2, [1] * 2 + [0] * 6, [1] * 6 + [0] * 2]
    assert batch["positions"][1].tolist() == [0, 1, *[0] * 6]
    assert batch["predicted"].tolist() == [[5], [1], [5]]
    assert batch["predicted"].dtype == np.int64
    assert "token_types" not in batch
    assert np.array_equal(
        regression.Config().build(vocabulary).collate(PAIRS_ALONE, 8)["predicted"],
        batch["predicted"],
    )


@pytest.mark.parametrize(
    ("vocabulary", "reads"), [(GPT1, None), (ROBERTA, "last")], ids=["gpt1", "gpt with <mask>"]
)
def test_a_token_that_begins_texts_comes_before_them(vocabulary: Vocabulary, reads: Any) -> None:
    """And one delimiter is between two texts, whatever the tokenizer is made for."""
    objective = classification.Config(reads=reads).build(vocabulary)
    spec = objective.pack_spec(8)
    assert spec.parts is not None
    assert (spec.prefix, spec.parts.between) == (1, 1)
    batch = objective.collate(PAIRS, 8)
    assert batch["tokens"][0].tolist() == [BEGIN, 10, 11, END, 20, 21, END, PAD]
    assert batch["predicted"].tolist() == [[6], [2], [6]]
    assert "token_types" not in batch


def test_an_encoders_rows_stay_as_they_are() -> None:
    """RoBERTa's tokenizer has an `eos`, too."""
    for vocabulary in (ROBERTA, of_bert.VOCABULARY, of_bert.ROBERTA):
        objective = classification.Config().build(vocabulary)
        assert objective.pack_spec(8).prefix == 1
        assert objective.needs == {"classification", "first_position"}
        assert not objective.collate(PAIRS, 8)["predicted"].any()


def test_rows_without_any_text() -> None:
    batch = classification.Config().build(T5).collate(make([[]], [[1]]), 5)
    assert (batch["tokens"].tolist(), batch["predicted"].tolist()) == ([[END, *[PAD] * 4]], [[0]])
    batch = classification.Config().build(GPT1).collate(make([[]], [[1]]), 5)
    assert (batch["tokens"].tolist(), batch["predicted"].tolist()) == (
        [[BEGIN, END, *[PAD] * 3]],
        [[1]],
    )


def test_each_choice_is_read_at_its_own_end() -> None:
    choices = make([[(0, [10, 11]), (3, [20]), (8, [10, 11]), (11, [21, 22])]], [[1]])
    batch = multiple_choice.Config(choices=2).build(T5).collate(choices, 8)
    assert batch["tokens"].tolist() == [
        [10, 11, END, 20, END, *[PAD] * 3, 10, 11, END, 21, 22, END, PAD, PAD]
    ]
    assert batch["predicted"].tolist() == [[4, 5]]


def test_tags_are_those_of_the_tokens() -> None:
    batch = tagging.Config().build(T5).collate(make([[(0, [20, 21, 22])]], [[0, -1, 3]]), 6)
    assert batch["tokens"].tolist() == [[20, 21, 22, END, PAD, PAD]]
    assert batch["labels"].tolist() == [[0, -1, 3, -1, -1, -1]]


QA = question_answering.Config(
    stride=2, question_length=2, answer_length=3, impossible=True, threshold=0.0
)


def test_the_last_position_stands_for_no_answer() -> None:
    """A row of 5 tokens in two windows behind a question of 2; the answer is in the second."""
    windows = make(
        [[(0, [10, 11]), (3, [20, 21, 22])], [(0, [10, 11]), (3, [22, 23])], [(0, [30])]],
        [[5, 5], [5, 5], []],
        [2, 4, 0],
    )
    objective = QA.build(T5)
    batch = objective.collate(windows, 8)
    assert batch["tokens"][1].tolist() == [10, 11, END, 22, 23, END, PAD, PAD]
    assert batch["labels"].tolist() == [[6, 6], [4, 4], [1, 1]]

    row = TaskRow(("q q", "a b c d"), answers=("d",), offsets=((0, 1), (2, 3), (4, 5), (6, 7)))
    outputs = np.zeros((2, 8, 2))
    outputs[0, 6], outputs[1, 5], outputs[1, 4] = 3.0, 2.0, 2.5  # no answer, no answer, "d"
    found = objective.answers(
        predictions(outputs, [row], document=[0, 0], begin=[2, 4], column=[3, 3], length=[3, 2])
    )[0]
    assert (found.text, found.no_answer, found.doubt) == ("d", 4.0, -1.0)


def test_the_tokens_of_examples_that_count_are_predicted_too() -> None:
    objective = classification.Config(lm_weight=0.5).build(T5)
    examples = dataclasses.replace(PAIRS_ALONE, weight=np.array([1, 1, 0], dtype=np.float32))
    batch = objective.collate(examples, 8)
    assert batch["lm_weights"].tolist() == [[1] * 5 + [0] * 2, [1] + [0] * 6, [0] * 7]
    assert batch["lm_weights"].dtype == np.float32
    assert objective.weights(batch) == {"examples": 2.0, "lm": 6.0}
    assert "lm_weights" not in classification.Config().build(T5).collate(examples, 8)
    assert classification.Config(lm_weight=0.5).build(ROBERTA).pack_spec(8).parts.between == 1


class Stub(of_bert.Stub):
    def __init__(self) -> None:
        super().__init__(3)
        self.of_tokens = torch.nn.Parameter(
            torch.randn(100, 100, generator=torch.Generator().manual_seed(1))
        )

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        assert outputs == {"classification", "next_tokens"}
        found = super().forward(inputs, frozenset({"classification"}))
        return {**found, "next_tokens": self.of_tokens[inputs.tokens][:, :-1]}


def test_the_auxiliary_losses_of_micro_batches_add_up() -> None:
    objective, model = classification.Config(lm_weight=0.5).build(T5), Stub()
    whole = of_bert.as_tensors(objective.collate(PAIRS_ALONE, 8))
    totals = {name: torch.tensor(weight) for name, weight in objective.weights(whole).items()}
    loss = objective.loss(model, whole, totals)
    loss.total.backward()
    gradient, model.of_tokens.grad = model.of_tokens.grad, None
    parts = [
        of_bert.as_tensors(objective.collate(of_bert.only(PAIRS_ALONE, rows), 8))
        for rows in ([2], [0, 1])
    ]
    losses = [objective.loss(model, part, totals) for part in parts]
    sum(part.total for part in losses).backward()
    torch.testing.assert_close(model.of_tokens.grad, gradient)
    for name, (total, weight) in loss.metrics.items():
        torch.testing.assert_close(sum(part.metrics[name][0] for part in losses), total)
        torch.testing.assert_close(sum(part.metrics[name][1] for part in losses), weight)
    torch.testing.assert_close(
        loss.metrics["loss"][0] / loss.metrics["loss"][1], loss.total.detach()
    )
    assert set(objective.mean_names) == set(loss.metrics)


CLASSES: dict[str, Any] = {"head": "classification", "labels": ("a", "b")}


@pytest.mark.parametrize(
    ("model", "config", "vocabulary", "message"),
    [
        (bert.Config(**CLASSES), {}, ROBERTA, None),
        (
            roberta.Config(**CLASSES),
            {"reads": "last"},
            ROBERTA,
            "needs last_position, .* set objective.reads=first",
        ),
        (gpt2.Config(**CLASSES), {}, GPT2, None),
        (
            gpt2.Config(**CLASSES),
            {},
            ROBERTA,
            "needs first_position, and the model, gpt2, .* set objective.reads=last",
        ),
        (gpt2.Config(**CLASSES), {"lm_weight": 0.5}, ROBERTA, None),
        (t5.Config(**CLASSES), {}, T5, None),
        (t5.Config(**CLASSES), {}, ROBERTA, "set objective.reads=last"),
        (
            t5.Config(**CLASSES),
            {"lm_weight": 0.5},
            T5,
            "needs next_tokens, and the model, t5, .*; set objective.lm_weight=0",
        ),
        (
            bert.Config(**CLASSES),
            {"lm_weight": 0.5},
            ROBERTA,
            "next_tokens, and the model, bert, .*; set objective.lm_weight=0",
        ),
        (
            t5.Config(**CLASSES),
            {},
            dataclasses.replace(T5, pad=3),
            "begins with the padding token, of id 0",
        ),
        (bart.Config(**CLASSES, start_token=END), {"reads": "last"}, ROBERTA, None),
        (
            bart.Config(**CLASSES, start_token=BEGIN),
            {"reads": "last"},
            ROBERTA,
            f"model.start_token is {BEGIN}, and in rows .*; set model.start_token={END}",
        ),
    ],
)
def test_models_that_pool_another_position_are_rejected(
    model: Any, config: dict[str, Any], vocabulary: Vocabulary, message: str | None
) -> None:
    experiment = Experiment(
        "run",
        model,
        classification.Config(**config),
        DataConfig("rows", sequence_length=8, packing="padded"),
        TrainingConfig(steps=1, global_batch_size=1, micro_batch_size=1),
        adamw.Config(),
    )
    with torch.device("meta"):
        built = experiment.build_model()
    task = SimpleNamespace(task=TaskLabels("classification", ("a", "b")))
    dataset: Any = SimpleNamespace(
        name="rows", manifest=task, tokenizer=SimpleNamespace(vocabulary=vocabulary)
    )
    dataset.sources = {"rows": dataset}
    objective = experiment.objective.build(vocabulary)
    if message is None:
        check_compatibility(experiment, dataset, [objective], built)
    else:
        with pytest.raises(ConfigError, match=message):
            check_compatibility(experiment, dataset, [objective], built)


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (lambda: classification.Config(lm_weight=-1.0), "lm_weight is -1.0. Use 0.5"),
        (
            lambda: classification.Config(lm_weight=0.5, reads="first"),
            "lm_weight is 0.5 and reads is first",
        ),
        (lambda: classification.Config(reads="first").build(T5), r"has no \[CLS\]"),
        (
            lambda: classification.Config(reads="last").build(
                Vocabulary(9, 0, None, None, None, ())
            ),
            "needs a token to end texts with",
        ),
    ],
)
def test_invalid_settings_are_rejected(make_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config()
