"""Classes of texts and of pairs of texts (Devlin et al. 2019, section 4.1): what GLUE's tasks but one are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Parts, Vocabulary
from trainer.metrics import check_names
from trainer.metrics import labels as metrics
from trainer.models import Inputs, Outputs
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task
from trainer.objectives.rows import score_tokens
from trainer.objectives.task_rows import (
    Cell,
    Float32,
    TaskRows,
    class_loss,
    class_predictions,
    count_examples,
    labelled,
    labels_of,
    reads_for,
    single_labels,
)
from trainer.tasks import TASKS


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Classification of texts, each row by itself.

    Attributes:
        metrics: that the held-out split is scored with: accuracy; f1, of the second label against all others; macro_f1,
            the mean of all labels' F1; matthews, the correlation; group_exact_match, the share of groups of rows of
            which all are right, as the answers of a question in MultiRC; group_first_right, the share of groups whose
            row that is the surest of the second label has it, as the entities for a query in ReCoRD.
        label_smoothing: so much of each label's probability is spread evenly over all labels.
        soft: whether rows may be labelled with a probability for each label, as by a teacher; one label is certain.
        reads: the cell of a sequence that is scored: for encoders the `first`, that of [CLS], for decoders the `last`.
            null goes by the tokenizer: the first for BERT's and RoBERTa's, which a GPT may have, too, else the last.
        lm_weight: what the loss of predicting each token from those before it is multiplied by, before it is added to
            the classes' loss: for a GPT, 0.5 in Radford et al. 2018, section 3.2. 0 leaves it out.
    """

    metrics: tuple[str, ...] = ("accuracy",)
    label_smoothing: float = 0.0
    soft: bool = False
    reads: Cell | None = None
    lm_weight: float = 0.0

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["classification"].metrics)
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; use 0 to go without, or a share, as 0.1"
            )
        if self.lm_weight < 0:
            raise ConfigError(
                f"lm_weight is {self.lm_weight}; use 0 to go without, or 0.5 as for GPT"
            )
        if self.lm_weight and self.reads == "first":
            raise ConfigError(
                f"lm_weight is {self.lm_weight} and reads is first, as for an encoder, which predicts no next tokens; "
                "leave reads out, or set lm_weight to 0"
            )

    @property
    def reads_probabilities(self) -> bool:
        return self.soft

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        if "next_tokens" in missing:
            return ("objective.lm_weight=0",)
        return reads_for(missing, offers)

    def build(self, vocabulary: Vocabulary) -> Task:
        return Classification(self, vocabulary)


class Classification(Task):
    """The classification objective; see `trainer.objectives.Task`.

    To the rows of `TaskRows` it adds, for B examples and C classes:
        predicted: int64 [B, 1], the cell that is read: that of [CLS], or for a decoder the last one with a token.
        labels: int64 [B], the class; or, where a row has several,
        probabilities: float32 [B, C], of each class.
        weights: float32 [B], the weight of the example.
        lm_weights: float32 [B, S - 1], of S cells, that of the example where cells 1 to S - 1 hold a token, else 0;
            only with `lm_weight`.

    The outputs are logits, float32 [B, C].

    Raises:
        ConfigError: as for `TaskRows`.
    """

    predicts = "classification"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self.config = config
        self._rows = TaskRows(vocabulary, "last" if config.lm_weight else config.reads)
        self.outputs = frozenset({"classification", *(["next_tokens"] if config.lm_weight else [])})
        self.needs = self.outputs | {f"{self._rows.reads}_position"}

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """All texts of a row in one sequence."""
        return self._rows.pack_spec(
            sequence_length, Parts("classification", between=self._rows.between)
        )

    def predictions(self, sequence_length: int) -> int:
        """One; all with `lm_weight`."""
        return sequence_length if self.config.lm_weight else 1

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the texts out; see the class for the arrays.

        Raises:
            ConfigError: there are probabilities, and `soft` is not set.
        """
        batch = self._rows.lay_out(examples, sequence_length)
        batch["predicted"] = self._rows.read_cells(batch)
        if (labels_of(examples).count > 1).any():
            batch["probabilities"] = self._probabilities(examples)
        else:
            batch["labels"] = single_labels(examples).astype(np.int64)
        if self.config.lm_weight:
            batch["lm_weights"] = (batch["segments"][:, 1:] == 1) * examples.weight[:, None]
        return {**batch, "weights": examples.weight}

    def _probabilities(self, examples: Examples) -> Float32:
        """float32 [B, C], those of each row, of which one has several."""
        labels = labels_of(examples)
        classes = int(labels.count.max())
        if not self.config.soft:
            raise ConfigError(
                f"a row of the dataset has {classes} probabilities, and objective.soft is false; set it to true"
            )
        several = labels.count > 1
        assert (labels.count[several] == classes).all(), (
            "rows have probabilities for different numbers of classes"
        )
        probabilities = np.zeros((several.size, classes), dtype=np.float32)
        of_several = np.repeat(several, labels.count)
        probabilities[several] = labels.values[of_several].reshape(-1, classes)
        probabilities[~several, labels.values[~of_several].astype(np.int64)] = 1
        return probabilities

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of examples that count, and with `lm_weight` of their tokens that are predicted."""
        tokens = {"lm": float(batch["lm_weights"].sum())} if self.config.lm_weight else {}
        return count_examples(batch) | tokens

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """Cross-entropy in float32, over the step's number of examples, totals["examples"].

        With `lm_weight`, so much of the cross-entropy of the tokens is added, which is over totals["lm"].
        """
        target = batch["probabilities" if "probabilities" in batch else "labels"]
        weights, smoothing, lm_weight = (
            batch["weights"],
            self.config.label_smoothing,
            self.config.lm_weight,
        )
        outputs = model(Inputs.of(batch), self.outputs)
        logits = outputs["classification"][:, 0]
        of_class = class_loss(logits, target, weights, totals["examples"], smoothing)
        if not lm_weight:
            return of_class
        labels = {"labels": batch["tokens"][:, 1:].long(), "weights": batch["lm_weights"]}
        of_tokens = score_tokens(outputs["next_tokens"], labels)
        total = of_class.total + lm_weight * of_tokens.nll / totals["lm"]
        metrics = {
            **of_class.metrics,
            # Its denominators differ; weighted by examples, the micro-batches of a step add up to the loss of the step.
            "loss": (total.detach() * totals["examples"], weights.sum()),
            "class_loss": of_class.metrics["loss"],
            "lm_loss": (of_tokens.nll.detach(), of_tokens.weight),
        }
        return Loss(total, metrics, of_class.outputs)

    @property
    def score_names(self) -> tuple[str, ...]:
        """The metrics."""
        return self.config.metrics

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The metrics."""
        scored = labelled(predictions)
        of_classes = scored.outputs.argmax(-1), scored.labels.astype(int)
        certainty = scored.outputs[:, 1] - scored.outputs[:, 0]
        return metrics.scores(self.config.metrics, *of_classes, scored.groups, certainty)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """The names of label and prediction, the probability of each label, and the group where rows have one."""
        for row in class_predictions(predictions, predictions.labels):
            yield row | {
                "probabilities": dict(zip(predictions.labels, row["probabilities"], strict=True))
            }
