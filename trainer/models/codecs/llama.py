"""Llama and its relatives in Hugging Face files: one family here, a model_type each there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.models import codecs
from trainer.models.base import POOLED
from trainer.models.codecs import ConfigJson, settings
from trainer.models.codecs.tensors import join_tensors, keep_one, split_tensors
from trainer.models.config import Head
from trainer.models.families import llama
from trainer.models.layers.frequencies import Scaling

_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
# What a class begins with in transformers, and the value of an absent tie_word_embeddings.
_CLASSES = {
    "llama": ("Llama", False),
    "mistral": ("Mistral", False),
    "qwen2": ("Qwen2", False),
    "qwen3": ("Qwen3", False),
    "smollm3": ("SmolLM3", True),
    "olmo2": ("Olmo2", False),
    "eurobert": ("EuroBert", False),
}
_OFTEN_ABSENT: dict[str, object] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
_LAYER = {
    "attention.qkv.query": ("self_attn.q_proj",),
    "attention.qkv.kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "attention_norm": ("input_layernorm",),
    "ffn.up": ("mlp.up_proj", "mlp.gate_proj"),
    "ffn.down": ("mlp.down_proj",),
    "ffn_norm": ("post_attention_layernorm",),
}
_OUTPUT_NORMS = {
    "attention_norm": ("post_attention_layernorm",),
    "ffn_norm": ("post_feedforward_layernorm",),
}
_ENDINGS: Mapping[Head, str] = {
    "classification": "ForSequenceClassification",
    "tagging": "ForTokenClassification",
    "embedding": "Model",
}
_NAMES: Mapping[Head, Mapping[str, str]] = {
    "language_model": {"decoder": "lm_head"},
    "classification": {"classifier": "score"},
    "tagging": {"classifier": "score"},
}
_NAMES_OF_ENCODER: Mapping[Head, Mapping[str, str]] = {
    "language_model": {"decoder": "lm_head"},
    "classification": {"pooler": "dense", "classifier": "classifier"},
    "tagging": {"classifier": "classifier"},
}
# The parameters of `Scaling`, and their names there.
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "slow": "low_freq_factor",
        "fast": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "slow": "beta_slow",
        "fast": "beta_fast",
        "attention": "attention_factor",
    },
}
_ABSENT = {("olmo2", "tagging")}
"""Heads that a class in transformers lacks."""
_POOLINGS = {"bos": "first", "mean": "mean", "late": "late"}
# Stored by older versions of transformers.
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq")


def _window(config: ConfigJson, model_type: str) -> int | None:
    """The window of all layers; None: they have none.

    Raises:
        ConfigError: some layers have one.
    """
    kinds = set(config.get("layer_types") or ())
    if model_type == "mistral" and not kinds:
        window: int | None = config.get("sliding_window", 4096)  # the value if it is absent
        return window
    windowed = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    if not kinds and windowed:
        # Qwen's layers from this one on have windows: with 0 all do, with 28 of 28 none does.
        first = config.get("max_window_layers", 28)
        kinds = {"full_attention"} if first > 0 else set()
        kinds |= {"sliding_attention"} if first < config["num_hidden_layers"] else set()
    if not kinds or kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or model_type == "smollm3":
        raise ConfigError(
            f"config.json has layers of the kinds {', '.join(sorted(map(str, kinds)))}. Only one "
            "kind for all layers is supported."
        )
    return int(config["sliding_window"])


def _unplaced_every(config: ConfigJson) -> int:
    """SmolLM3's interval of layers without positions; 0: there are none.

    Raises:
        ConfigError: these layers have no interval.
    """
    # [1, 1, 1, 0, 1, 1, 1, 0] is every fourth: the first 0 is at index 3.
    layers = int(config["num_hidden_layers"])
    every = int(config.get("no_rope_layer_interval") or 4)
    placed = config.get("no_rope_layers")
    if placed is None:
        return every
    if 0 in placed:
        every = list(placed).index(0) + 1
    elif every <= layers:
        # All layers are placed, although an interval is named: the list counts, as in transformers.
        every = 0
    wanted = [int(every == 0 or (index + 1) % every != 0) for index in range(layers)]
    if list(placed)[:layers] != wanted:
        raise ConfigError(
            "config.json has no_rope_layers without an interval. Only every n-th layer is "
            "supported."
        )
    return every


def _rope(config: ConfigJson, model_type: str) -> ConfigJson:
    """The base of the rotary frequencies, and their scaling.

    Raises:
        ConfigError: the kind of scaling is not supported.
    """
    # Older files have "rope_theta" and "rope_scaling" beside the other settings.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    default = 2_000_000.0 if model_type == "smollm3" else 10_000.0
    theta = rope.get("rope_theta") or config.get("rope_theta") or default
    kind = rope.get("rope_type", rope.get("type", "default"))
    # A half would rotate the first 32 of 64 features only. The others below change YaRN's formulas.
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    refused = {"partial_rotary_factor": part not in (None, 1.0)} | {
        name: rope.get(name) not in (None, usual)
        for name, usual in {"mscale": 0, "mscale_all_dim": 0, "truncate": True}.items()
    }
    if wrong := [name for name, is_refused in refused.items() if is_refused]:
        raise ConfigError(f"config.json has {wrong[0]} of rotary positions, which is unsupported.")
    if kind == "default":
        return {"theta": float(theta), "scaling": None}
    if kind not in _SCALINGS:
        raise ConfigError(
            f"config.json has rope_type {kind!r}. Supported are default, {', '.join(_SCALINGS)}."
        )
    # Absent, or null, the length in pre-training is the maximum one.
    name = "original_max_position_embeddings"
    length = config.get(name) or rope.get(name) or config["max_position_embeddings"]
    rope = {**rope, name: length}
    if rope.get("factor") is None:
        raise ConfigError(f"config.json has rope_type {kind!r} without a factor. Add it.")
    scaling = {
        ours: rope[theirs]
        for ours, theirs in _SCALINGS[kind].items()
        if rope.get(theirs) is not None
    }
    # The usual number is null here, so that an export is read as what it was written from.
    if scaling.get("fast") == Scaling(kind, 1.0).most_turns:
        del scaling["fast"]
    return {"theta": float(theta), "scaling": {"kind": kind, **scaling}}


class Codec(codecs.Codec[llama.Config]):
    """Llama, Mistral, Qwen 2 and 3, SmolLM3, OLMo 2 and EuroBERT in Hugging Face files."""

    model_type: ClassVar[str] = "llama"

    @classmethod
    def from_huggingface(
        cls, family: type[llama.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> llama.Config:
        model_type = str(config.get("model_type"))
        if model_type not in _CLASSES:
            raise ConfigError(
                f"config.json has model_type {model_type!r}, and this family has "
                f"{', '.join(_CLASSES)}. Import another checkpoint."
            )
        begin, tied = _CLASSES[model_type]
        config = {**_OFTEN_ABSENT, "tie_word_embeddings": tied, **config}
        # Of files without these, `read_settings` names the key that is absent as well.
        if count := config.get("num_attention_heads"):
            # Without them, each head of queries has its own keys, and heads fill the width.
            usual = {
                "num_key_value_heads": count,
                "head_dim": config.get("hidden_size", 0) // count,
            }
            config |= {key: usual[key] for key in usual if config.get(key) is None}
        fixed = {
            "model_type": model_type,
            "attention_bias": False,
            "mlp_bias": False,
            "use_cache": config.get("use_cache"),
        }
        fields = settings.read_settings(config, _FIELDS, fixed, {"silu": "swiglu"})
        names = {cls._canonical(name) for name in tensors}
        causal = model_type != "eurobert"
        own = {
            "causal": causal,
            "window": _window(config, model_type),
            "unplaced_every": _unplaced_every(config) if model_type == "smollm3" else 0,
            "qkv_bias": model_type == "qwen2",
            "qk_norm": model_type == "qwen3",
            "joint_qk_norm": model_type == "olmo2",
            "output_norm": model_type == "olmo2",
            **_rope(config, model_type),
        }
        modules = _NAMES if causal else _NAMES_OF_ENCODER
        heads = {head: begin + _ENDINGS[head] for head in modules if head in _ENDINGS}
        # The language model's head may be the embeddings.
        needed = {heads[head]: tuple(modules[head].values()) for head in heads}
        settings.check_named(config, names, needed)
        head, labels = settings.read_task(config, heads)
        if head == "language_model" and names and not fields["tied"]:
            head = head if "lm_head.weight" in names else "embedding"  # as `AutoModel` saves it
        if not causal and f"{begin}Model" in (config.get("architectures") or ()):
            head = "embedding"  # a tied one has all that a language model has
        if head == "classification" and not causal:
            # Files for EuroBERT's own code, older than the class of transformers, have another key.
            pooling = config.get("classifier_pooling") or config.get("clf_pooling") or "late"
            if pooling not in _POOLINGS:
                raise ConfigError(
                    f"config.json has classifier_pooling {pooling!r}. Supported are "
                    f"{', '.join(_POOLINGS)}."
                )
            own["pooling"] = _POOLINGS[pooling]
        own |= {"head": head, "labels": list(labels)}
        return decode(family, {**fields, **own}, "config.json")

    @classmethod
    def _canonical(cls, name: str) -> str:
        if name.startswith("transformer."):  # of a question answering model
            return f"model.{name.removeprefix('transformer.')}"
        # A checkpoint of the bare model has no "model." before its names.
        return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        model_type = self._their_type()
        if config.activation != "swiglu":
            raise ConfigError(
                f"activation {config.activation} cannot be exported: transformers' {model_type} "
                "has swiglu. Train with that."
            )
        begin = _CLASSES[model_type][0]
        has_head = config.head in self._head_names() or config.head == "embedding"
        if not has_head or (model_type, config.head) in _ABSENT:
            raise ConfigError(
                f"a {config.head} head cannot be exported for {model_type}. Export the model that "
                "it was fine-tuned from."
            )
        ending = _ENDINGS.get(config.head, "ForCausalLM" if config.causal else "ForMaskedLM")
        fields = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
        content: ConfigJson = {
            "architectures": [begin + ending],
            "model_type": model_type,
            **fields,
            "num_key_value_heads": config.keys,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_theta": config.theta, **self._scaling()},
            # The defaults are ids of published tokenizers, which a smaller vocabulary lacks.
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
            **settings.name_labels(config.labels),
        }
        if model_type == "mistral":
            content["sliding_window"] = config.window
        if model_type == "smollm3":
            content["no_rope_layers"] = [int(config.rotates(n)) for n in range(config.layers)]
        if model_type in ("qwen2", "qwen3"):
            windowed = config.window is not None
            kind = "sliding_attention" if windowed else "full_attention"
            content |= {
                "use_sliding_window": windowed,
                "sliding_window": config.window,
                "max_window_layers": 0 if windowed else config.layers,
                "layer_types": [kind] * config.layers,
            }
        if not config.causal:
            names = {ours: theirs for theirs, ours in _POOLINGS.items()}
            content["classifier_pooling"] = names[config.pooling]
        return content

    def _their_type(self) -> str:
        """The model_type in transformers that computes the same.

        Raises:
            ConfigError: there is none.
        """
        config = self.config
        self._check_one_stack()
        if config.output_norm != config.joint_qk_norm:
            raise ConfigError(
                f"output_norm {config.output_norm} with joint_qk_norm {config.joint_qk_norm} "
                "cannot be exported: transformers' olmo2 has both. Use the checkpoint with "
                "samestep."
            )
        uneven = config.width % config.heads != 0
        of_qwen = config.qkv_bias or config.qk_norm
        wanted = {
            "qwen2": config.qkv_bias,
            "qwen3": config.qk_norm,
            "smollm3": config.unplaced_every > 0,
            "olmo2": config.output_norm,
            "eurobert": not config.causal,
            # Llama takes no width that is not a multiple of the heads; Qwen and OLMo 2 do.
            "mistral": (config.window is not None and not of_qwen)
            or (uneven and not (of_qwen or config.output_norm)),
        }
        found = [name for name, is_wanted in wanted.items() if is_wanted]
        if len(found) > 1:
            settings_of = {
                "qwen2": "qkv_bias",
                "qwen3": "qk_norm",
                "smollm3": "unplaced_every",
                "olmo2": "output_norm",
                "eurobert": "causal: false",
                "mistral": "window" if config.window is not None else "this width of heads",
            }
            both = " and ".join(settings_of[name] for name in found)
            raise ConfigError(
                f"{both} cannot be exported together: transformers has no such model. Use the "
                "checkpoint with samestep."
            )
        return found[0] if found else "llama"

    def _scaling(self) -> ConfigJson:
        scaling = self.config.scaling
        if scaling is None:
            return {"rope_type": "default"}
        values = {
            theirs: scaling.most_turns if ours == "fast" else getattr(scaling, ours)
            for ours, theirs in _SCALINGS[scaling.kind].items()
        }
        return {"rope_type": scaling.kind, **values}

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {
            self._canonical(name): tensor
            for name, tensor in tensors.items()
            if not _BUFFERS.fullmatch(name)
        }
        if self.config.tied:
            keep_one(found, "model.embed_tokens.weight", "lm_head.weight")
        return join_tensors(found, self.tensor_names(), self.config)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return split_tensors(parameters, self.tensor_names(), self.config)

    def _head_names(self) -> Mapping[Head, Mapping[str, str]]:
        return _NAMES if self.config.causal else _NAMES_OF_ENCODER

    def _check_one_stack(self) -> None:
        if self.config.encoder_decoder:
            raise ConfigError(
                f"decoder_layers {self.config.decoder_layers} cannot be exported: transformers has "
                "no encoder-decoder with Llama's layers. Use the checkpoint with samestep."
            )

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        self._check_one_stack()
        table: dict[str, tuple[str, ...]] = {
            "embeddings.tokens.weight": ("model.embed_tokens.weight",),
            "final_norm.weight": ("model.norm.weight",),
        }
        parts = _LAYER | (_OUTPUT_NORMS if config.output_norm else {})
        has_qk_norms = config.qk_norm or config.joint_qk_norm
        for layer in range(config.layers):
            for ours, theirs in parts.items():
                if ours.endswith(("query_norm", "key_norm")) and not has_qk_norms:
                    continue
                kinds = ("weight", "bias") if config.qkv_bias and ".qkv." in ours else ("weight",)
                for kind in kinds:
                    table[f"layers.{layer}.{ours}.{kind}"] = tuple(
                        f"model.layers.{layer}.{name}.{kind}" for name in theirs
                    )
        for part, name in self._head_names().get(config.head, {}).items():
            if part == "decoder" and config.tied:
                continue
            ours = f"head.{part}"
            # A late pooling averages after this layer, so the layer is part of it.
            if part == "pooler" and config.pooling == "late":
                ours = "pooling.dense"
            table[f"{ours}.weight"] = (f"{name}.weight",)
            if part != "decoder" and not (config.causal and config.head in POOLED):
                table[f"{ours}.bias"] = (f"{name}.bias",)
        return table
