"""DeBERTa version 1 in Hugging Face files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from torch import Tensor

from samestep.errors import ConfigError
from trainer.models.codecs import ConfigJson, bert
from trainer.models.families import deberta

# What transformers assumes of keys that config.json lacks.
_DEFAULTS = {
    "relative_attention": False,
    "position_biased_input": True,
    "max_relative_positions": -1,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-7,
}
# Released checkpoints name the masked-LM head so; it computes the same function.
_OTHER_HEAD = re.compile(r"lm_predictions\.lm_head\.(?:(dense|LayerNorm)\.(\w+)|bias)")
# Released checkpoints have these too, which transformers skips: absolute positions, which no layer
# reads, and the head that detects replaced tokens (version 3).
_SKIPPED = re.compile(
    r"(\w+\.)?embeddings\.position_embeddings\.weight"
    r"|mask_predictions\.(dense|LayerNorm|classifier)\.(weight|bias)"
)
_POOLED = {"pooler": "pooler.dense", "classifier": "classifier"}


C = TypeVar("C", bound=deberta.Config)


class Codec(bert.Codec[C]):
    """DeBERTa version 1 in Hugging Face files."""

    model_type: ClassVar[str] = "deberta"
    prefix: ClassVar[str] = "deberta"
    architecture: ClassVar[str] = "DebertaForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Codec.task_names,
        "classification": _POOLED,
        "multiple_choice": _POOLED,
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        ours: name for ours, name in bert.Codec.their_settings.items() if ours != "causal"
    }
    their_constants: ClassVar[Mapping[str, object]] = {
        "relative_attention": True,
        "position_biased_input": False,
        "max_relative_positions": -1,
    }
    pooled_constants: ClassVar[Mapping[str, object]] = {"pooler_hidden_act": "gelu"}
    embedding_names: ClassVar[Mapping[str, str]] = {
        name: theirs
        for name, theirs in bert.Codec.embedding_names.items()
        if not name.startswith(("positions", "types"))
    }
    # Version 1 has one matrix for queries, keys and values, whose rows are ordered by head.
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        name: theirs for name, theirs in bert.Codec.layer_names.items() if "qkv" not in name
    }
    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        f"{bert.Codec.optional_names.pattern}|{_SKIPPED.pattern}"
    )
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "encoder.")

    @classmethod
    def from_huggingface(
        cls, family: type[C], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> C:
        config = {**_DEFAULTS, **config}
        kinds = config.get("pos_att_type") or []
        kinds = kinds.split("|") if isinstance(kinds, str) else kinds
        if sorted(kind.strip().lower() for kind in kinds) != ["c2p", "p2c"]:
            raise ConfigError(
                f"config.json has pos_att_type {config.get('pos_att_type')!r}. Only models with "
                "both c2p and p2c are supported."
            )
        # The released files name the number of positions.
        if config["max_relative_positions"] == config.get("max_position_embeddings"):
            config["max_relative_positions"] = -1
        return super().from_huggingface(family, config, tensors)

    def to_huggingface(self) -> ConfigJson:
        return {
            **super().to_huggingface(),
            **self.their_constants,
            "pos_att_type": ["c2p", "p2c"],
            "pooler_hidden_size": self.config.width,
            "pooler_dropout": 0.0,
            **self.pooled_constants,
            "legacy": True,
        }

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # transformers has no enhanced mask decoder.
        known = {
            n: each for n, each in parameters.items() if not n.startswith("decoder_positions.")
        }
        alone = type(self)(replace(self.config, mask_decoder=False))
        return super(Codec, alone).export_tensors(known)

    def import_rows(self, name: str, rows: Tensor) -> Tensor:
        if not name.endswith("in_proj.weight"):
            return rows
        # Rows of each head: its queries, keys and values. Ours are all queries, keys, then values.
        by_head = rows.view(self.config.heads, 3, self.config.head_width, -1)
        return by_head.transpose(0, 1).reshape(rows.shape)

    def export_rows(self, name: str, rows: Tensor) -> Tensor:
        if not name.endswith("in_proj.weight"):
            return rows
        by_part = rows.view(3, self.config.heads, self.config.head_width, -1)
        return by_part.transpose(0, 1).reshape(rows.shape)

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        table = super().tensor_names()
        for layer in range(self.config.layers):
            begin = f"{self.prefix}.encoder.layer.{layer}.attention.self"
            for ours, theirs in self.attention_names().items():
                names = tuple(f"{begin}.{name}" for name in theirs)
                table[f"layers.{layer}.attention.{ours}"] = names
        table["relative.weight"] = (f"{self.prefix}.encoder.rel_embeddings.weight",)
        return table

    def attention_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter of an attention module -> transformers' names of its parts."""
        return {
            "qkv.weight": ("in_proj.weight",),
            "query_bias": ("q_bias",),
            "value_bias": ("v_bias",),
            "place_key.weight": ("pos_proj.weight",),
            "place_query.weight": ("pos_q_proj.weight",),
            "place_query.bias": ("pos_q_proj.bias",),
        }

    @classmethod
    def _canonical(cls, name: str) -> str:
        if match := _OTHER_HEAD.fullmatch(name):
            module, kind = match.groups()
            own = "bias" if module is None else f"transform.{module}.{kind}"
            return f"cls.predictions.{own}"
        return super()._canonical(name)
