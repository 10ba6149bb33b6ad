"""A BERT of a hundred tokens, whose weights are large enough that its inputs matter."""

from __future__ import annotations

from typing import Any

import torch

from trainer.models import Model
from trainer.models.families import bert


def tiny_bert(**settings: Any) -> Model:
    """Two heads, unless the settings say otherwise."""
    model = bert.Config(100, **{"heads": 2} | settings).build()
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(10 * model.initial_values(name, 0, each.numel(), 0).view_as(each))
    return model
