"""The size that stored settings claim of a model, compared with the tensors beside them.

Settings may be a stranger's. A model that they describe is built on the meta device first, and a
number of layers that nobody has stored is rejected before even that.
"""

from __future__ import annotations

import math

import torch

from samestep.errors import CheckpointError
from trainer.checkpoint import huggingface
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import StoredTensors
from trainer.models import Model, ModelConfig

# Settings that are numbers of modules, each with tensors of its own; but a model that shares its
# layers, as ALBERT does, has few tensors for many of them.
_COUNTS = ("layers", "decoder_layers", "generator_layers", "groups", "head_lstm")
_FEW_LAYERS = 200


def check_size(config: ModelConfig, tensors: StoredTensors, place: Location) -> None:
    """Rejects a stored model that is larger than its tensors, before memory is allocated for it.

    Its description may be a stranger's.

    Raises:
        CheckpointError: the description is of another model.
    """
    check_layers(config, len(tensors), place)
    with huggingface.wrong_settings_explained(place), torch.device("meta"):
        model = config.build()
    check_elements(model, tensors, place)


def check_layers(config: ModelConfig, tensors: int, place: Location) -> None:
    """Rejects more layers than a number of tensors can be of: building them could take hours.

    Raises:
        CheckpointError: see `check_size`.
    """
    for name in _COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > max(_FEW_LAYERS, tensors):
            raise CheckpointError(
                f"the settings in {place} have {name} {count}, which its {tensors} tensors cannot "
                "have. Use those that belong to them"
            )


def check_elements(model: Model, tensors: StoredTensors, place: Location) -> None:
    """Rejects a model with more elements than the tensors.

    Args:
        model: on the meta device.

    Raises:
        CheckpointError: see `check_size`.
    """
    needed = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(math.prod(tensors.shape(name)) for name in tensors)
    if needed > stored:
        raise CheckpointError(
            f"the settings in {place} are of a model with {needed} parameters, and its tensors "
            f"have {stored} elements. Use those that belong to them"
        )
