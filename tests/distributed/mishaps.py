"""An objective to which something happens on one rank: masked language modeling otherwise."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainer.objectives.kinds import mlm
from trainer.partition import local_parts

FOREVER = 1000.0


@dataclass(frozen=True)
class Config(mlm.Config):
    """What happens on rank 1.

    Attributes:
        mishap: in the loss of step 3, or when the third block of batches is made.
        slow: seconds that the loss of step 2 takes longer.
    """

    mishap: Literal["loss hangs", "data hang", "stops", "bit flips"] = "loss hangs"
    slow: float = 0.0

    def build(self, vocabulary: Any) -> Objective:
        return Objective(self, vocabulary)


class Objective(mlm.MaskedLM):
    config: Config
    steps = blocks = 0

    def collate(self, *arguments: Any) -> Any:
        self.blocks += 1
        if self.blocks == 3 and self._happens("data hang"):
            time.sleep(FOREVER)
        return super().collate(*arguments)

    def loss(self, model: Any, *arguments: Any) -> Any:
        self.steps += 1  # as one micro-batch holds all rows of a rank
        if self.steps == 2:
            time.sleep(self.config.slow)
        if self.steps == 3:
            if self._happens("loss hangs"):
                time.sleep(FOREVER)
            if self._happens("stops"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._happens("bit flips"):
                (weights,) = local_parts([next(model.parameters()).detach()])
                weights.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 3)
        return super().loss(model, *arguments)

    def _happens(self, mishap: str) -> bool:
        return self.config.mishap == mishap and os.environ["RANK"] == "1"
