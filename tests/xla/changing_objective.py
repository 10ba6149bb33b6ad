"""Masked LM with a mistake that compiled graphs cannot bear.

What it computes changes after a few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from samestep.examples import Vocabulary
from trainer.objectives import Loss
from trainer.objectives.kinds import mlm

_SOUND_CALLS = 3


@dataclass(frozen=True)
class Config(mlm.Config):
    """Masked LM.

    Attributes:
        changes: the shape of the predictions, or a number that the loss is multiplied by.
    """

    changes: Literal["shape", "number"] = "shape"

    def build(self, vocabulary: Vocabulary) -> ChangingObjective:
        return ChangingObjective(self, vocabulary)


class ChangingObjective(mlm.MaskedLM):
    calls = 0

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        self.calls += 1
        changed = self.calls > _SOUND_CALLS
        if changed and self.config.changes == "shape":
            batch = {
                **batch,
                **{name: batch[name][:, 1:] for name in ("predicted", "labels", "weights")},
            }
        loss = super().loss(model, batch, totals)
        return (
            Loss(loss.total * (1.0 if changed else 2.0), loss.metrics)
            if self.config.changes == "number"
            else loss
        )
