"""Last layers that are initialized at random although the model starts from trained weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.models.families import bert, t5
from trainer.training.weights.initial import reinitialize_layers

SHAPE = {"vocab_size": 40, "layers": 3, "width": 8, "heads": 2, "ffn_width": 16}


def trained(_name: str, start: int, stop: int) -> Tensor:
    return torch.full((stop - start,), 7.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            bert.Config(**SHAPE, head="classification", labels=("a", "b")),
            ("layers.2.", "head.pooler."),
        ),
        (t5.Config(**SHAPE, head_width=4), ("encoder.2.", "decoder.2.")),
    ],
)
def test_the_last_layers_are_initialized(config, expected) -> None:
    with torch.device("meta"):
        model = config.build()
    values = reinitialize_layers(trained, model, 1, seed=3)
    found = {
        name
        for name, weight in model.named_parameters()
        if (values(name, 0, weight.numel()) != 7).any()
    }
    assert found == {name for name, _ in model.named_parameters() if name.startswith(expected)}
    name = f"{expected[0]}ffn.up.weight"
    assert torch.equal(values(name, 3, 9), model.initial_values(name, 3, 9, 3))
    with pytest.raises(ConfigError, match="redraw_layers is 4, and the model has 3 layers"):
        reinitialize_layers(trained, model, 4, seed=3)
