"""A projection of hidden states to the width of a distillation's teacher (TinyBERT)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from trainer.models.extras import Extra


class TeacherWidth(nn.Linear, Extra):
    """Projects the hidden states that are compared with the teacher's: [B, S, D] -> [B, S, W]."""

    name = "fit_head"
    trains: ClassVar[Mapping[str, str]] = {"compared.0": "model.teacher_width=0"}
    pretraining = "model.teacher_width"

    def compared(self, hidden: Tensor) -> Tensor:
        fitted: Tensor = self(hidden)
        return fitted
