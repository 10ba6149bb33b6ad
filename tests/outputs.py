"""Running a model in tests: columns in, outputs by name out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.models import ModelConfig
from trainer.models.codecs import codec_of
from trainer.models.inputs import Inputs


def outputs(model: nn.Module, *names: str, **columns: Tensor | None) -> tuple[Tensor, ...]:
    """Some outputs of a model on columns of a batch, in the order of their names."""
    found = model(Inputs(**columns), frozenset(names))
    return tuple(found[name] for name in names)


def predict(model: nn.Module, **columns: Tensor | None) -> Tensor:
    """What a model's head says of columns of a batch."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    (found,) = outputs(model, inner.config.predicts, **columns)
    return found


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name; a shared one once, unlike in `state_dict`."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def published(
    config: ModelConfig, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of `config.json`, and the tensors, as `samestep export` writes them."""
    codec = codec_of(config)
    return codec.to_huggingface(), codec.export_tensors(parameters)


def random_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Values for `fill`, larger than at initialization, so that the tokens matter."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets all parameters."""
    named = dict(model.named_parameters())
    assert named.keys() == tensors.keys()
    for name, parameter in named.items():
        parameter.copy_(tensors[name])
