"""ELMo's penalty on the scores of a learned mean of layers (Peters et al. 2018, section 3.3).

The loss gets l2 * sum_j w_j^2, where softmax(w) are the shares of the layers: the scores before the
softmax, as in bilm-tf and AllenNLP. A large coefficient leaves a plain mean of the layers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Outputs
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, Objective, OverBatch, Task, Taught, Tensors
from trainer.objectives.around import AroundTask

_SCORES = "mix_scores"


def with_penalty(objective: Objective, l2: float) -> Objective:
    """Adds the penalty to a task's objective.

    Raises:
        ConfigError: the objective is not one of a task, or needs a teacher or the whole batch.
    """
    if not isinstance(objective, Task) or isinstance(objective, Taught | OverBatch):
        raise ConfigError(
            f"model.scalar_mix_l2 is {l2}, which is for tasks, as classification or tagging, "
            "without a teacher or negatives of the batch. Set it to 0."
        )
    return MixPenalty(objective, l2)


class MixPenalty(AroundTask):
    """A task's objective with the penalty. Logged losses and evaluations are without it."""

    def __init__(self, of: Task, l2: float) -> None:
        super().__init__(of)
        self.l2 = l2
        self.needs = of.needs | {_SCORES}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The task's loss plus the penalty.

        A micro-batch adds the share of the penalty that it has of the step's examples, so a step
        adds it once, however it is split.
        """
        # Evaluations compare models by the task's own loss.
        if not torch.is_grad_enabled():
            return self.of.loss(model, batch, totals)
        # The scores come out of the same forward pass, in which a strategy has gathered them.
        scored = _WithScores(model)
        own = self.of.loss(scored, batch, totals)
        # Of 8 examples in micro-batches of 5 and 3, these add 5/8 and 3/8 of the penalty.
        share = batch["weights"].sum() / totals[self.denominator]
        penalty = self.l2 * scored.scores.float().square().sum()
        return replace(own, total=own.total + share * penalty)


class _WithScores(nn.Module):
    """Runs a model, and keeps the scores of its mean of layers."""

    scores: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.model(inputs, outputs | {_SCORES})
        self.scores = found[_SCORES]
        return found
