"""What the tests of heads for tasks share.

A random model of `transformers`, ours from its folder, and their parity.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.outputs import parameters, predict
from tests.parity.pairs import assert_gradients_are_equal, close, exported, load
from trainer.models.config import Head

LENGTH = 24
TASKS: dict[str, tuple[Head, str, tuple[str, ...]]] = {
    "classification": ("classification", "SequenceClassification", ("no", "maybe", "yes")),
    "regression": ("classification", "SequenceClassification", ("similarity",)),
    "multiple_choice": ("multiple_choice", "MultipleChoice", ()),
    "tagging": ("tagging", "TokenClassification", ("O", "B-PER", "I-PER", "B-LOC")),
    "question_answering": ("question_answering", "QuestionAnswering", ()),
}
"""The head of each task, the end of its class's name in `transformers`, and its labels."""


@dataclass
class Pair:
    """A random model of `transformers`, and ours imported from the folder that it saved."""

    task: str
    reference: PreTrainedModel
    config: Any
    model: Any

    @property
    def head(self) -> Head:
        return TASKS[self.task][0]

    def ours(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits as `transformers` shapes them, of starts and ends [B, S, 2]."""
        raise NotImplementedError

    def theirs(
        self, batch: dict[str, Tensor], model: PreTrainedModel | None = None, **labels: Tensor
    ) -> Any:
        """What theirs gives, or another model of its kind."""
        raise NotImplementedError

    def their_logits(
        self, batch: dict[str, Tensor], model: PreTrainedModel | None = None
    ) -> Tensor:
        out = self.theirs(batch, model)
        return (
            torch.stack([out.start_logits, out.end_logits], -1)
            if self.head == "question_answering"
            else out.logits
        )


class DecoderPair(Pair):
    """With heads on a decoder, which pool the last position."""

    def ours(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits as `transformers` shapes them, of starts and ends [B, S, 2]."""
        last = batch["segments"].sum(1, keepdim=True) - 1
        logits: Tensor = predict(
            self.model, **batch, predicted=last if self.head == "classification" else None
        )
        return logits[:, 0] if self.head == "classification" else logits

    def theirs(
        self, batch: dict[str, Tensor], model: PreTrainedModel | None = None, **labels: Tensor
    ) -> Any:
        return (model or self.reference)(
            input_ids=batch["tokens"], attention_mask=batch["segments"], **labels
        )


def text_pairs(lengths: list[tuple[int, int]], end: int, pad: int) -> dict[str, Tensor]:
    """Pairs of texts of these lengths, each with the token that ends it, padded to 24 positions."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.tensor(side)[:, None] for side in zip(*lengths, strict=True))
    place = torch.arange(LENGTH).expand(len(lengths), -1)
    tokens = torch.randint(end + 1, 300, place.shape, generator=generator)
    tokens[(place == first) | (place == first + second + 1)] = end
    real = place < first + second + 2
    return {"tokens": torch.where(real, tokens, pad), "segments": real.int()}


def names_of(labels: tuple[str, ...]) -> dict[str, Any]:
    """Labels as settings of `transformers`; none where there are none."""
    names = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: n for n, label in enumerate(labels)},
    }
    return names if labels else {}


def assert_logits_are_equal(pair: Pair, batch: dict[str, Tensor]) -> None:
    assert (pair.config.head, pair.config.labels) == (pair.head, TASKS[pair.task][2])
    ours, theirs = pair.ours(batch), pair.their_logits(batch)
    real = batch["segments"].bool() if ours.ndim == 3 else slice(None)
    assert ours.shape == theirs.shape
    close(ours[real], theirs[real])


def assert_losses_and_gradients_are_equal(
    pair: Pair,
    batch: dict[str, Tensor],
    spans: tuple[list[int], list[int]],
    untagged: slice | None = None,
) -> None:
    """Args: spans are answers' first and last positions; untagged are positions without a tag."""
    logits = pair.ours(batch)
    if pair.head == "question_answering":
        starts, ends = map(torch.tensor, spans)
        theirs = pair.theirs(batch, start_positions=starts, end_positions=ends).loss
        ours = (F.cross_entropy(logits[..., 0], starts) + F.cross_entropy(logits[..., 1], ends)) / 2
    elif pair.task == "regression":
        labels = torch.linspace(-1, 3, len(logits))
        theirs = pair.theirs(batch, labels=labels).loss
        ours = F.mse_loss(logits[:, 0], labels)
    else:
        generator = torch.Generator().manual_seed(2)
        labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator)
        if pair.head == "tagging" and untagged is not None:
            labels[:, untagged] = -100
        theirs = pair.theirs(batch, labels=labels).loss
        ours = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    close(ours, theirs)
    ours.backward()
    theirs.backward()
    assert_gradients_are_equal(pair.config, pair.reference, pair.model)


def assert_transformers_loads_what_we_export(
    pair: Pair, batch: dict[str, Tensor], folder: Path
) -> PreTrainedModel:
    """Exports ours into the folder, and returns what transformers loads."""
    _, name, labels = TASKS[pair.task]
    auto = getattr(transformers, f"AutoModelFor{name}")
    theirs = exported(auto, pair.config, pair.model, folder)
    assert type(theirs) is type(pair.reference)
    if labels:
        assert theirs.config.id2label == dict(enumerate(labels))
        assert theirs.config.label2id == {label: number for number, label in enumerate(labels)}
    assert theirs.config.problem_type == ("regression" if pair.task == "regression" else None)
    close(pair.their_logits(batch, theirs), pair.their_logits(batch))
    again, same = load(type(pair.config), folder)
    assert again == pair.config
    assert all(
        torch.equal(parameters(same)[key], value) for key, value in parameters(pair.model).items()
    )
    return theirs
