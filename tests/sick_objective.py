"""An objective of which some examples are bad for the gradient: {kind.

Tests.sick_objective, sick: [75]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from samestep.examples import Vocabulary
from trainer.objectives import Loss
from trainer.objectives.kinds import mlm


@dataclass(frozen=True)
class Config(mlm.Config):
    """Masked language modeling with faults.

    Attributes:
        sick: global examples that multiply the gradient of the micro-batches of a step, on the rank
            that has them.
        factor: by how much.
        passing: whether they do so only the first time.
        source: the dataset whose examples they are, in the first pass, by their index in it; None:
            they are numbers of the data order.
    """

    sick: tuple[int, ...] = ()
    factor: float = float("nan")
    passing: bool = False
    source: int | None = None

    def build(self, vocabulary: Vocabulary) -> SickObjective:
        return SickObjective(self, vocabulary)


class SickObjective(mlm.MaskedLM):
    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self._sick, self._factor, self._passing = list(config.sick), config.factor, config.passing
        self._ill, self._source = False, config.source

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        numbers = batch["number"]
        if self._source is not None:
            mine = (batch["source"] == self._source) & (batch["epoch"] == 0)
            numbers = batch["example"][mine]
        found = np.intersect1d(self._sick, numbers).tolist()
        self._ill |= bool(found)
        if self._passing:
            self._sick = [number for number in self._sick if number not in found]
        return super().weights(batch)

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        loss = super().loss(model, batch, totals)
        ill, self._ill = self._ill, False
        return replace(loss, total=loss.total * self._factor) if ill else loss
