"""Families and their codecs find each other, here and in other packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from samestep.config import Kinds
from samestep.errors import ConfigError
from tests.outputs import published, random_parameters
from trainer.checkpoint.huggingface import save_folder
from trainer.models import codecs
from trainer.models.codecs import ConfigJson, codec_of, read_config
from trainer.models.families import bert, gpt2, lstm
from trainer.training.weights.loading import load_weights

FAMILIES = Kinds("trainer.models.families")


@dataclass(frozen=True)
class Config(gpt2.Config):
    """A family of another package, with a format of its own."""

    codec: ClassVar[str] = __name__


class Codec(codecs.Codec[Config]):
    model_type = "own"

    @classmethod
    def from_huggingface(
        cls, family: type[Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> Config:
        return family(vocab_size=config["size"])

    def to_huggingface(self) -> ConfigJson:
        return {"model_type": self.model_type, "size": self.config.vocab_size}

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        return {"a": ("b",)}

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"a": tensors["b"]}

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"b": parameters["a"]}


def test_each_family_has_the_codec_of_its_name_or_none() -> None:
    without = set()
    for name in FAMILIES.available():
        family: Any = FAMILIES.schema(name, "a test")
        if not family.codec:
            without.add(name)
            continue
        assert family.codec == f"trainer.models.codecs.{name}"
        codec = codec_of(family())
        assert type(codec).__module__ == family.codec
        # By the name in `config.json`, `load_weights` finds the family; version 3 is stored as 2.
        theirs = "deberta_v2" if name == "deberta_v3" else name
        assert codec.model_type.replace("-", "_") == theirs
    assert without == {"lstm", "bilm", "word_vectors"}


def test_a_codec_of_another_package() -> None:
    config = read_config(Config, {"size": 7})
    assert config == Config(vocab_size=7)
    assert codec_of(config).to_huggingface() == {"model_type": "own", "size": 7}
    assert codec_of(config).import_rows("name", torch.ones(2)).tolist() == [1, 1]
    assert codec_of(config).export_parts() == {}


def test_a_family_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lstm has no Hugging Face format"):
        codec_of(lstm.Config(vocab_size=9))
    config = bert.Config(vocab_size=9, layers=1, width=4, heads=1)
    _, tensors = published(config, random_parameters(config.build()))
    save_folder(tmp_path / "saved", {"model_type": "lstm"}, tensors)
    with pytest.raises(ConfigError, match="lstm has no Hugging Face format"):
        load_weights(str(tmp_path / "saved"))
