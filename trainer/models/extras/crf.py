"""Scores of transitions between tags, for a conditional random field (`trainer.objectives.crf`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainer.models.extras import Extra, HeadInput


class TagTransitions(Extra):
    """[C + 1, C + 1] scores. They are a parameter of the model itself, not of a module.

    Args:
        tags: C.
    """

    name = "tag_transitions"
    offers = frozenset({"tag_transitions"})
    trains: ClassVar[Mapping[str, str]] = {"tag_transitions": "model.crf=false"}
    has_labels = True

    def __init__(self, tags: int) -> None:
        super().__init__()
        # One more for the beginning and the end of a text.
        self.shape = (tags + 1, tags + 1)

    def add_to(self, model: nn.Module) -> None:
        model.register_parameter(self.name, nn.Parameter(torch.empty(self.shape)))

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        if self.name not in head_input.outputs:
            return {}
        # A copy, as a strategy may free the gathered parameter after this pass.
        return {self.name: model.get_parameter(self.name).clone()}
