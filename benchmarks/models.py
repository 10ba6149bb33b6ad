"""Models of both sides, ours and those of `transformers`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from trainer.models.codecs import codec_of


def import_transformers() -> ModuleType:
    """Imports `transformers` without torchvision: litdata's need not fit this torch."""
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    import transformers

    return transformers


def initialized(config: Any) -> Any:
    """Our model with its initial weights."""
    model = config.build()
    values = {
        name: model.initial_values(name, 0, each.numel(), seed=0).view(each.shape)
        for name, each in model.named_parameters()
    }
    # Buffers keep their values.
    model.load_state_dict(values, strict=False)
    return model


def loaded(kind: str, config: Any, parameters: Mapping[str, Tensor]) -> Any:
    """The model of class `kind` of `transformers`, with these parameters of ours."""
    transformers = import_transformers()
    model = getattr(transformers, kind)(
        transformers.AutoConfig.for_model(**codec_of(config).to_huggingface())
    )
    found = model.load_state_dict(codec_of(config).export_tensors(parameters), strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    model.tie_weights()
    return model
