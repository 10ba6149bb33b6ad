from collections.abc import Callable

import pytest
import torch

from trainer.models.families import bert
from trainer.models.transformer import Transformer


@pytest.fixture
def config() -> bert.Config:
    return bert.Config(vocab_size=97, layers=2, width=32, heads=4, ffn_width=48, max_positions=24)


@pytest.fixture
def build() -> Callable[..., Transformer]:
    """Builds a model as strategies do: on the meta device, then memory, then initial values."""

    def build(config: bert.Config, seed: int = 0) -> Transformer:
        with torch.device("meta"):
            model = config.build()
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(
                    model.initial_values(name, 0, parameter.numel(), seed).view_as(parameter)
                )
        return model

    return build


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Four rows of 20 positions: packed, padded, full, and padding only.

    Five predictions each, and dropout keys.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [(7, 9, 4), (11,), (20,), ()]
    segments, positions = torch.zeros(2, 4, 20, dtype=torch.int32)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts, 1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = torch.arange(length)
            start += length
    return {
        "tokens": torch.randint(0, 97, (4, 20), generator=generator, dtype=torch.int32),
        "segments": segments,
        "positions": positions,
        "predicted": torch.randint(0, 11, (4, 5), generator=generator),
        "dropout_key": torch.tensor([5, -6, 2**31 - 1, -(2**31)], dtype=torch.int32),
    }
