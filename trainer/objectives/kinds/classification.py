"""Classification of texts and of pairs of texts (Devlin et al. 2019, section 4.1): GLUE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from samestep.tasks import TASKS
from trainer.metrics import check_names, per_class
from trainer.metrics.per_class import ClassReport
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.models.token_scores import Target
from trainer.objectives import Loss, Predictions, Task, Tensors
from trainer.objectives.class_weights import ClassLoss, ClassLossConfig, ClassWeights
from trainer.objectives.rows import score_output
from trainer.objectives.task_rows import (
    PairConfig,
    PairTask,
    Pooled,
    class_loss,
    class_predictions,
    label_of,
    labels_of,
    scored_rows,
)


@dataclass(frozen=True)
class Config(PairConfig, ClassLossConfig):
    """Classification of texts, each row by itself.

    Attributes:
        metrics: scores of the held-out split: accuracy; f1, of the second label against all others;
            macro_f1, the mean of all labels' F1; matthews, the correlation; group_exact_match, the
            fraction of groups of rows that are all right, as the answers of a question in MultiRC;
            group_first_right, the fraction of groups whose row that is most certain of the second
            label has it, as the entities for a query in ReCoRD.
        class_weights: label -> weight of its rows in the loss, 1 for labels that are left out; or
            balanced, n / (k * count) for a label that `count` of the n training rows have, of k
            labels. The loss is divided by the sum of the rows' weights over the whole batch.
        label_smoothing: probability of each label that is spread evenly over all labels.
        soft: whether rows may be labeled with a probability for each label, as by a teacher; a row
            with one label is certain.
        both_orders: reads the two texts of a row in both orders, each in a sequence of its own,
            and adds the logits, as for similarity in Radford et al. 2018, section 3.3.
        stride: cuts a text that is too long into windows, which start this many tokens apart, and
            averages their logits; null truncates it.
        lm_weight: weight of the next-token loss that is added to the loss of the classes: for a
            GPT, 0.5 in Radford et al. 2018, section 3.2. 0 disables it.
    """

    metrics: tuple[str, ...] = ("accuracy",)
    class_weights: ClassWeights = None
    label_smoothing: float = 0.0
    soft: bool = False
    reads: Pooled | None = None
    both_orders: bool = False
    stride: int | None = None
    lm_weight: float = 0.0

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["classification"].metrics)
        self.check_arrangement()
        self.check_class_loss()
        if self.class_weights is not None and self.soft:
            raise ConfigError(
                "class_weights are for rows of one label each, and soft allows several. Set soft "
                "to false, or leave class_weights out."
            )
        if self.lm_weight < 0:
            raise ConfigError(
                f"lm_weight is {self.lm_weight}. Use 0.5 as for GPT, or 0 to disable it."
            )
        if self.lm_weight and self.both_orders:
            raise ConfigError(
                f"lm_weight is {self.lm_weight} and both_orders is true, which exclude each other. "
                "Set one of them to 0 or false."
            )
        if self.lm_weight and self.reads == "first":
            raise ConfigError(
                f"lm_weight is {self.lm_weight} and reads is first, as for an encoder, which does "
                "not predict next tokens. Leave reads out, or set lm_weight to 0."
            )

    @property
    def pooled(self) -> Pooled | None:
        return "last" if self.lm_weight else self.reads

    @property
    def reads_probabilities(self) -> bool:
        return self.soft

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        if "next_tokens" in missing:
            return ("objective.lm_weight=0",)
        return super().adapted(missing, offers)

    def build(self, vocabulary: Vocabulary) -> Task:
        return Classification(self, vocabulary)


class Classification(PairTask):
    """The classification objective; see `PairTask`.

    Its batch differs, for B examples of S positions and C classes:
        probabilities: float32 [B, C], of each class; instead of `labels` if a row has several.
        lm_weights: float32 [B, S - 1], the weight of the example, or of the window, where positions
            1 to S - 1 hold a token, else 0; only with `lm_weight`.

    The outputs are logits, float32 [B, C].
    """

    kind = "classification"
    predicts = "classification"
    mean_names: tuple[str, ...] = ("loss", "accuracy")

    config: Config

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self._outputs = frozenset({self.predicts})
        self._class_loss = ClassLoss(config)
        if config.lm_weight:
            self._outputs |= {"next_tokens"}
            self.needs |= {"next_tokens"}
            self.mean_names = (*self.mean_names, "class_loss", "lm_loss")

    def predictions(self, sequence_length: int) -> int:
        return sequence_length if self.config.lm_weight else super().predictions(sequence_length)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays out the texts.

        Raises:
            ConfigError: rows have probabilities, and `soft` is not set.
        """
        batch = super().collate(examples, sequence_length)
        if self.config.lm_weight:
            batch["lm_weights"] = (batch["segments"][:, 1:] == 1) * batch["weights"][:, None]
        return batch

    def targets(self, examples: Examples) -> Batch:
        """The classes; or the probabilities of each row, if one has several."""
        labels = labels_of(examples)
        several = labels.count > 1
        if not several.any():
            return super().targets(examples)
        classes = int(labels.count.max())
        if not self.config.soft:
            raise ConfigError(
                f"a row of the dataset has {classes} probabilities, and objective.soft is false. "
                "Set it to true."
            )
        assert (labels.count[several] == classes).all(), (
            "rows have probabilities for different numbers of classes"
        )
        probabilities = np.zeros((several.size, classes), dtype=np.float32)
        of_several = np.repeat(several, labels.count)
        probabilities[several] = labels.values[of_several].reshape(-1, classes)
        probabilities[~several, labels.values[~of_several].astype(np.int64)] = 1
        return {"probabilities": probabilities}

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        found = super().weights(batch)
        if self.config.class_weights is not None:
            found[self.denominator] = self._class_loss.total(batch)
        if self.config.lm_weight:
            found["lm"] = float(batch["lm_weights"].sum())
        return found

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Cross-entropy of the classes in float32, over totals["examples"], the sum of weights.

        With `lm_weight`, that multiple of the tokens' cross-entropy, over totals["lm"], is added.
        """
        target = batch["probabilities" if "probabilities" in batch else "labels"]
        weights, total = batch["weights"], totals["examples"]
        lm_weight = self.config.lm_weight
        if not lm_weight:
            logits = self.row_outputs(model, batch)
            return class_loss(logits, target, weights, total, self._class_loss)
        labels = batch["tokens"][:, 1:].long()
        targets = {"next_tokens": Target(labels, batch["lm_weights"])}
        outputs = model(Inputs.of(batch, targets), self._outputs)
        logits = outputs["classification"][:, 0]
        of_class = class_loss(logits, target, weights, total, self._class_loss)
        of_tokens = score_output(outputs, "next_tokens", targets["next_tokens"])
        loss = of_class.total + lm_weight * of_tokens.loss / totals["lm"]
        metrics = {
            **of_class.metrics,
            # The terms have different denominators. Weighted by examples, the micro-batches of a
            # step add up to the step's loss.
            "loss": (loss.detach() * total, of_class.metrics["loss"][1]),
            "class_loss": of_class.metrics["loss"],
            "lm_loss": (of_tokens.nll, of_tokens.weight),
        }
        return Loss(loss, metrics, of_class.outputs)

    def terms(self) -> Mapping[str, float]:
        if not self.config.lm_weight:
            return super().terms()
        return {"class_loss": 1.0, "lm_loss": self.config.lm_weight}

    def class_report(self, predictions: Predictions) -> ClassReport | None:
        rows, logits = scored_rows(predictions)
        true = np.array([int(label_of(row)) for row in rows], dtype=np.int64)
        return per_class.of_classes(predictions.labels, logits.argmax(-1), true)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """The names of label and prediction, each label's probability, and the group, if any."""
        names = predictions.labels
        for row in class_predictions(predictions, names):
            yield row | {"probabilities": dict(zip(names, row["probabilities"], strict=True))}
