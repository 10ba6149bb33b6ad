"""The learned scale of a contrastive loss's similarities (CLIP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainer.models.extras import Extra, HeadInput


class LogitScale(Extra):
    """[1], 1 and the logarithm of the scale's change (Radford et al. 2021, section 2.4).

    The scale is exp(logit_scale - 1) / temperature, so 1 is the objective's `temperature`. From 0,
    optimizers whose steps are shares of a parameter (Adafactor, LAMB) would hardly move it. It is a
    parameter of the model itself, not of a module, and only training reads it.
    """

    name = "logit_scale"
    offers = frozenset({"logit_scale"})
    trains: ClassVar[Mapping[str, str]] = {"logit_scale": "model.logit_scale=false"}
    pretraining = "model.logit_scale"
    starts_anew = True
    initial_mean = 1.0

    def add_to(self, model: nn.Module) -> None:
        # With one dimension, it has no weight decay.
        model.register_parameter(self.name, nn.Parameter(torch.empty(1)))

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        if self.name not in head_input.outputs:
            return {}
        # A copy, as for `TagTransitions`.
        return {self.name: model.get_parameter(self.name).clone()}

    def initial_std(self, shape: Sequence[int]) -> float:
        return 0.0
