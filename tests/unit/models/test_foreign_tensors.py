"""A folder whose `config.json` and tensors are of two families is rejected, by names of tensors."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from samestep.config import Kinds
from samestep.errors import CheckpointError
from tests.outputs import published
from trainer.models.codecs import codec_of
from trainer.training.weights.loading import load_weights

FAMILIES = Kinds("trainer.models.families")
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "layers": 1,
    "width": 8,
    "heads": 2,
    "kv_heads": 1,
    "head_width": 4,
    "ffn_width": 32,
    "max_positions": 12,
    "position_buckets": 4,
}
KINDS = sorted(
    name for name in FAMILIES.available() if getattr(FAMILIES.schema(name, "a test"), "codec", "")
)


@cache
def folder_of(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of `config.json`, and the tensors, of a language model of a family."""
    family: Any = FAMILIES.schema(kind, "a test")
    known = {field.name for field in fields(family)}
    config = family(**{name: value for name, value in SHAPE.items() if name in known})
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in config.build().named_parameters()}
    content, tensors = published(config, {name: torch.ones(shapes[name]) for name in shapes})
    return content, {name: each.clone() for name, each in tensors.items()}


def save(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_other_family(kind: str, tmp_path: Path) -> None:
    content, own = folder_of(kind)
    save(tmp_path / kind, content, own)
    config = load_weights(tmp_path / kind).config  # which reads its own
    content = {**content, "architectures": None}  # else the head that it names is missed first
    expected = {name for names in codec_of(config).tensor_names().values() for name in names}
    for other in KINDS:
        theirs, tensors = folder_of(other)
        if theirs["model_type"] == content["model_type"]:
            continue
        save(tmp_path / other, content, tensors)
        with pytest.raises(CheckpointError, match=r"the weights do not fit this .* is ") as caught:
            load_weights(tmp_path / other)
        named = {name for name in expected | {*tensors} if f"{name} is " in str(caught.value)}
        assert named, f"{kind} says of the tensors of {other}: {caught.value}"
