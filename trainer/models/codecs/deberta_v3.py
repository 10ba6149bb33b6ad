"""DeBERTa version 3 in Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from trainer.models import ModelConfig
from trainer.models.codecs import ConfigJson, deberta_v2
from trainer.models.config import Head
from trainer.models.families import deberta_v3
from trainer.models.generator import GENERATOR

_TABLE = "embeddings.tokens.weight"
_HEAD = "mask_predictions."


class Codec(deberta_v2.Codec[deberta_v3.Config]):
    """DeBERTa version 3 in Hugging Face files."""

    architecture: ClassVar[str] = "DebertaV2Model"
    head_begins: ClassVar[tuple[str, ...]] = (_HEAD, "lm_predictions.", "cls.predictions.")

    def to_huggingface(self) -> ConfigJson:
        tree = super().to_huggingface()
        if self.config.head != "language_model":
            tree["architectures"] = [self._task_architecture(self.config.head)]
        return tree

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: each for name, each in parameters.items() if not name.startswith(GENERATOR)}
        # Without its generator, the discriminator has one table: the sum of both.
        below = parameters.get(GENERATOR + _TABLE)
        if below is not None:
            own[_TABLE] = own[_TABLE] + below
        alone = type(self)(replace(self.config, generator_layers=0, mask_decoder=False))
        exported = super(Codec, alone).export_tensors(own)
        # transformers has no head that detects replaced tokens of a DeBERTa.
        return {name: each for name, each in exported.items() if not name.startswith(_HEAD)}

    def export_parts(self) -> dict[str, tuple[ModelConfig, str]]:
        config = self.config
        if not config.generator_layers or config.head != "language_model":
            return {}
        return {"generator": (config.generator, GENERATOR)}

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        table = super().tensor_names()
        if self.config.head != "language_model":
            return table
        table = {name: theirs for name, theirs in table.items() if not name.startswith("head.")}
        own = {f"head.{part}.{kind}" for part in ("dense", "out") for kind in ("weight", "bias")}
        return table | {name: (_HEAD + name,) for name in own}

    @classmethod
    def _heads(cls) -> dict[str, tuple[str, ...]]:
        return {}  # its own architecture, of exports, has no head

    @classmethod
    def _task_architecture(cls, head: Head) -> str:
        return deberta_v2.Codec._task_architecture(head)
