"""Multiple choice: the text that continues a first one (SWAG, RACE, COPA).

As in Devlin et al. 2019, section 4.4, each choice is scored in a sequence of its own, after the
first text. The scores of a row are the logits of one softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.tasks import TASKS
from trainer.metrics import check_names
from trainer.objectives import Loss, Predictions, Task, Tensors
from trainer.objectives.task_rows import (
    Pooled,
    PooledConfig,
    PooledTask,
    class_loss,
    class_predictions,
)


@dataclass(frozen=True)
class Config(PooledConfig):
    """Multiple choice. `data.sequence_length` is the length of each choice's sequence.

    Attributes:
        choices: number of choices: the texts of a row after the first.
        metrics: scores of the held-out split: accuracy.
    """

    choices: int = 4
    metrics: tuple[str, ...] = ("accuracy",)
    reads: Pooled | None = None

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["multiple_choice"].metrics)
        if self.choices < 2:
            raise ConfigError(f"choices is {self.choices}. Use at least 2.")

    def build(self, vocabulary: Vocabulary) -> Task:
        return MultipleChoice(self, vocabulary)


class MultipleChoice(PooledTask):
    """The multiple-choice objective; see `PooledTask`. Labels are indices of choices.

    The outputs are logits, float32 [B, k].
    """

    kind = "multiple_choice"
    predicts = "multiple_choice"
    mean_names = ("loss", "accuracy")

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self._parts = replace(self._parts, choices=config.choices)

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Cross-entropy in float32, over totals["examples"]."""
        logits = self.sequence_outputs(model, batch)[..., 0]
        return class_loss(logits, batch["labels"], batch["weights"], totals["examples"])

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """Label and prediction, counted from 0, and the probability of each choice."""
        return class_predictions(predictions, range(self._parts.choices))
