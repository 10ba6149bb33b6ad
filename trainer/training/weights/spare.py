"""Tensors of a published model that its own parameters are not made of."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

from torch import Tensor

from samestep.errors import CheckpointError
from trainer.checkpoint import huggingface
from trainer.models import Model


def lent(
    spare: Mapping[str, Mapping[str, Tensor]], model: Model, taken: Container[str]
) -> dict[str, Tensor]:
    """Returns spare parts for the parameters of a model that nothing else gives values.

    Args:
        spare: see `Weights`.
        taken: names of the parameters that have values.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {
        name: tensor
        for name, tensor in spare.get(model.config.head, {}).items()
        if name not in taken and shapes.get(name) == tensor.shape
    }


def check_unused(tensors: Mapping[str, Tensor], used: Mapping[str, Tensor], folder: Path) -> None:
    """Rejects NaN and infinity in the tensors of a folder that no parameter shares memory with.

    A damaged tensor is a sign of a damaged file, and it might be exported again. Parameters are
    checked when they are read.

    Raises:
        CheckpointError: with the tensor's name and its file.
    """
    # A parameter is a view of its tensor, unless several are joined; those are read twice.
    addresses = {tensor.data_ptr() for tensor in used.values()}
    for name, tensor in tensors.items():
        if tensor.data_ptr() in addresses or not tensor.is_floating_point():
            continue
        if not tensor.float().isfinite().all():
            raise not_finite(huggingface.first_not_finite(folder) or f"{name} in {folder}")


def not_finite(place: str) -> CheckpointError:
    return CheckpointError(
        f"{place} holds NaN or infinity. Copy or download it again, or name other weights"
    )
