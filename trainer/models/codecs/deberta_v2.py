"""DeBERTa version 2 in Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeVar

from torch import Tensor

from trainer.models.codecs import ConfigJson, deberta
from trainer.models.families import deberta_v2

C = TypeVar("C", bound=deberta_v2.Config)


class Codec(deberta.Codec[C]):
    """DeBERTa version 2 in Hugging Face files."""

    model_type: ClassVar[str] = "deberta-v2"
    architecture: ClassVar[str] = "DebertaV2ForMaskedLM"
    their_settings: ClassVar[Mapping[str, str]] = {
        **deberta.Codec.their_settings,
        "position_buckets": "position_buckets",
        "conv_width": "conv_kernel_size",
        "conv_activation": "conv_act",
    }
    their_constants: ClassVar[Mapping[str, object]] = {
        **deberta.Codec.their_constants,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **deberta.Codec.layer_names,
        "attention.qkv": tuple(f"attention.self.{part}_proj" for part in ("query", "key", "value")),
    }
    targets_not_in_peft: ClassVar[frozenset[str]] = frozenset({"convolution"})

    @classmethod
    def from_huggingface(
        cls, family: type[C], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> C:
        # Of transformers: files of version 1 have none of these keys.
        defaults = {
            "position_buckets": -1,
            "conv_kernel_size": 0,
            "conv_act": "tanh",
            "share_att_key": False,
            "norm_rel_ebd": "none",
        }
        return super().from_huggingface(family, {**defaults, **config}, tensors)

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        table, begin = super().tensor_names(), f"{self.prefix}.encoder"
        for kind in ("weight", "bias"):
            table[f"relative.norm.{kind}"] = (f"{begin}.LayerNorm.{kind}",)
            if self.config.conv_width:
                table[f"layers.0.convolution.{kind}"] = (f"{begin}.conv.conv.{kind}",)
                table[f"layers.0.convolution_norm.{kind}"] = (f"{begin}.conv.LayerNorm.{kind}",)
        return table

    def attention_names(self) -> dict[str, tuple[str, ...]]:
        return {}

    def import_rows(self, name: str, rows: Tensor) -> Tensor:
        # A convolution [D, D, size] is a matrix over neighbors side by side, [D, size * D].
        if not name.endswith("encoder.conv.conv.weight"):
            return rows
        return rows.transpose(1, 2).flatten(1)

    def export_rows(self, name: str, rows: Tensor) -> Tensor:
        config = self.config
        if not name.endswith("encoder.conv.conv.weight"):
            return rows
        return rows.view(config.width, config.conv_width, config.width).transpose(1, 2).contiguous()
