"""What parity tests share: a random model of `transformers`, and ours from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.outputs import fill, parameters, published
from trainer.checkpoint.huggingface import load_folder, save_folder
from trainer.models.codecs import codec_of, read_config


def saved(theirs: Any, folder: Path, noise: float = 0.05) -> Any:
    """Saves a model of transformers whose weights are larger than initial ones, and no bias 0."""
    add_noise(theirs, noise)
    theirs.save_pretrained(folder)
    return theirs


def add_noise(model: nn.Module, noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))


def load(schema: Any, folder: Path) -> tuple[Any, Any]:
    """Our configuration and model of a folder, for a family's `Config`."""
    tree, tensors = load_folder(folder)
    config = read_config(schema, tree, tensors)
    model = config.build().eval()
    fill(model, codec_of(config).import_tensors(tensors))
    return config, model


def close(ours: object, theirs: object, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol)


def assert_gradients_are_equal(config: Any, theirs: Any, ours: Any, atol: float = 1e-5) -> None:
    """Of all parameters: those that transformers does not use have no counterpart here."""
    found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    close(
        {name: p.grad for name, p in ours.named_parameters()},
        codec_of(config).import_tensors(found),
        atol,
    )


def exported(auto: Any, config: Any, ours: Any, folder: Path) -> Any:
    """Exports our model into the folder; returns what transformers loads, without a complaint."""
    save_folder(folder, *published(config, parameters(ours)))
    theirs, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return theirs.eval()


def padded_rows(*lengths: int) -> dict[str, Tensor]:
    """Random tokens below 300, in rows that end with padding."""
    width = max(lengths)
    generator = torch.Generator().manual_seed(1)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(5, 300, real.shape, generator=generator)
    return {
        "tokens": torch.where(real, tokens, 0),
        "segments": real.int(),
        "positions": torch.arange(width).expand(len(lengths), -1),
    }
