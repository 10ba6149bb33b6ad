"""An objective for runs that faults happen to.

Not too fast for them, sick where asked, and a bit flips on command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from samestep.examples import Vocabulary
from tests import sick_objective
from trainer.objectives import Loss
from trainer.partition import local_parts


@dataclass(frozen=True)
class Config(sick_objective.Config):
    """Masked language modeling at leisure.

    Attributes:
        seconds: that each micro-batch takes longer.
        flip: a file; if there is one, rank 1 removes it and flips a bit of its weights.
    """

    seconds: float = 0.05
    flip: str = ""

    def build(self, vocabulary: Vocabulary) -> PacedObjective:
        return PacedObjective(self, vocabulary)


class PacedObjective(sick_objective.SickObjective):
    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        time.sleep(self.config.seconds)
        flip = Path(self.config.flip)
        if os.environ.get("RANK") == "1" and flip.is_file():
            flip.unlink()
            (weights,) = local_parts([next(model.parameters()).detach()])
            weights.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 3)
        return super().loss(model, batch, totals)
