"""ModernBERT (Warner et al. 2024): rotary positions, and attention that is mostly local."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import huggingface
from trainer.models.config import Activation, Norm
from trainer.models.families import bert
from trainer.models.huggingface import ConfigJson
from trainer.models.layers.dropout import dropout
from trainer.models.layers.layer import Layer
from trainer.models.layers.rotary import RotaryAttention

_THETAS = {"global_theta": "full_attention", "local_theta": "sliding_attention"}
_TASKS = {"dense": "head.dense", "norm": "head.norm", "classifier": "classifier"}


@dataclass(frozen=True)
class Config(bert.Config):
    """ModernBERT-base.

    Pre-norm without biases, a gated feed-forward network, and no norm before the first attention.
    Every `global_every`-th layer, from the first on, attends to all positions, the others to
    `local_window` positions around each.

    Attributes:
        dropout: dropout rate of attention's output, the only place of dropout in its pre-training
            (0.1); `transformers` has no setting for it.
        max_positions: maximum sequence length; there is no table of positions.
        local_window: size of the window of local attention: half of it on each side.
        global_every: one layer in this number attends to all positions.
        global_theta: base of the rotary frequencies in global layers.
        local_theta: base of the rotary frequencies in local layers.
        head_dropout: dropout rate in the head of a task.
    """

    model_type: ClassVar[str] = "modernbert"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "ModernBertForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "head.dense",
        "norm": "head.norm",
        "bias": "decoder.bias",
        "decoder": "decoder",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = dict.fromkeys(
        bert.Config.task_names, _TASKS
    )
    their_settings: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "ffn_width": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "attention_dropout": "attention_dropout",
        "norm_eps": "norm_eps",
        "activation": "hidden_activation",
        "tied": "tie_word_embeddings",
        "initializer_range": "initializer_range",
        "head_dropout": "classifier_dropout",
        "local_window": "local_attention",
    }
    their_constants: ClassVar[Mapping[str, object]] = {
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
    }
    pooled_constants: ClassVar[Mapping[str, object]] = {"classifier_pooling": "cls"}
    their_activations: ClassVar[Mapping[str, Activation]] = {
        "gelu": "geglu",
        "gelu_pytorch_tanh": "geglu_tanh",
    }
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "layers.", "final_norm.")
    fewest_types: ClassVar[int] = 0

    vocab_size: int = 50368
    layers: int = 22
    ffn_width: int = 1152
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: Activation = "geglu"
    max_positions: int = 8192
    type_vocab: int = 0
    norm_eps: float = 1e-5
    norm: Norm = "pre"
    local_window: int = 128
    global_every: int = 3
    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    head_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("local_window", "global_every"):
            self.check_positive(name)
        for name in ("type_vocab", "nsp", "span_boundary"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but ModernBERT has none. Leave it out."
                )
        if self.norm != "pre" or not self.gated:
            raise ConfigError(
                f"norm is {self.norm} and activation is {self.activation}, but ModernBERT has norm "
                "pre and geglu. Leave them out, or use kind: bert."
            )
        if self.head_width % 2:
            raise ConfigError(
                f"width {self.width} by heads {self.heads} gives heads of {self.head_width}, but "
                "rotary positions need an even number. Change heads."
            )

    @property
    def projection_bias(self) -> bool:
        return False

    @property
    def norm_bias(self) -> bool:
        return False

    @property
    def head_bias(self) -> bool:
        return False

    @property
    def normalizes_embeddings(self) -> bool:
        return True

    @property
    def embedding_dropout(self) -> float:
        return 0.0

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        return ("attention", "attention_output")

    @property
    def position_table(self) -> bool:
        return False

    @property
    def reads_positions(self) -> bool:
        return True

    def is_global(self, index: int) -> bool:
        """Whether layer `index` attends to all positions."""
        return index % self.global_every == 0

    def static(self, index: int) -> tuple[bool, bool]:
        # The first layer has no norm. With global_every 3, layers 1, 2 | 3 | 4, 5 | 6 | ... are
        # groups that can run as loops.
        return index == 0, self.is_global(index)

    def initial_std(self, name: str) -> tuple[float, ...]:
        # As in the released code: what is added to the residual stream is smaller, and a new
        # classifier has the scale of its input.
        if name.endswith(("attention.out.weight", "ffn.down.weight", "head.dense.weight")):
            return (self.initializer_range / math.sqrt(2 * self.layers),)
        return (self.width**-0.5 if "classifier" in name else self.initializer_range,)

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        layer = Layer(self, index, cross_attention)
        if index == 0:  # the embeddings are normalized already
            layer.attention_norm = nn.Identity()
        return layer

    def build_attention(self, index: int) -> nn.Module:
        if self.is_global(index):
            return RotaryAttention(self, self.global_theta, None)
        return RotaryAttention(self, self.local_theta, self.local_window // 2)

    def _build_head(self) -> nn.Module:
        own = self.head not in ("language_model", "embedding")
        return PositionHead(self) if own else super()._build_head()

    @classmethod
    def from_huggingface(cls, config: ConfigJson, tensors: Iterable[str] = ()) -> Self:
        found = super().from_huggingface(config, tensors)
        rope = config.get("rope_parameters") or {}
        thetas: dict[str, float] = {}
        for ours, kind in _THETAS.items():
            settings = rope.get(kind) or {}
            if settings.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"config.json has rope_type {settings['rope_type']!r} for {kind}. Only default "
                    "is supported."
                )
            # Older files have "global_rope_theta" and "local_rope_theta" beside the other settings.
            old = config.get(ours.replace("_theta", "_rope_theta"), getattr(cls, ours))
            if old is None:  # null for local layers: as in global ones
                old = thetas.get("global_theta", cls.global_theta)
            thetas[ours] = float(settings.get("rope_theta", old))
        # Newer files list the kind of every layer; older ones have the number.
        every = config.get("global_attn_every_n_layers", 3)
        kinds = config.get("layer_types")
        if kinds is not None:
            others = (n for n in range(1, len(kinds)) if kinds[n] == "full_attention")
            every = next(others, len(kinds))
        found = replace(
            found,
            global_every=int(every),
            global_theta=thetas["global_theta"],
            local_theta=thetas["local_theta"],
        )
        if kinds is not None and list(kinds) != found._layer_types():
            raise ConfigError(
                "config.json has layer_types that do not repeat. Only one global layer in every n, "
                "from the first on, is supported."
            )
        return found

    def _layer_types(self) -> list[str]:
        kinds = ("sliding_attention", "full_attention")
        return [kinds[self.is_global(index)] for index in range(self.layers)]

    def to_huggingface(self) -> ConfigJson:
        self.check_export_of_head()
        if self.causal:
            raise ConfigError(
                "causal is true, but transformers has no causal modernbert. Use the checkpoint "
                "with samestep."
            )
        fields = {theirs: getattr(self, ours) for ours, theirs in self.their_settings.items()}
        names = {ours: theirs for theirs, ours in self.their_activations.items()}
        architecture = self.architecture
        if self.head != "language_model":
            architecture = self._task_architecture(self.head)
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            **self.their_constants,
            **self.pooled_constants,
            "hidden_activation": names[self.activation],
            "layer_types": self._layer_types(),
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": getattr(self, ours)}
                for ours, kind in _THETAS.items()
            },
            # Older versions of transformers read these.
            "global_attn_every_n_layers": self.global_every,
            "global_rope_theta": self.global_theta,
            "local_rope_theta": self.local_theta,
            **self.special_ids,
            # The defaults are ids of the published tokenizer, which a smaller vocabulary lacks.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
            **huggingface.name_labels(self.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ordered = {name: self.import_rows(name, each) for name, each in tensors.items()}
        return super().import_tensors(ordered)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported = super().export_tensors(parameters)
        return {name: self.export_rows(name, each) for name, each in exported.items()}

    def import_rows(self, name: str, rows: Tensor) -> Tensor:
        # The halves of a gated projection: here the second is activated, there the first.
        return torch.cat(rows.chunk(2)[::-1]) if name.endswith("mlp.Wi.weight") else rows

    def export_rows(self, name: str, rows: Tensor) -> Tensor:
        return self.import_rows(name, rows)  # exchanging the halves is its own inverse

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        modules = {
            "embeddings.tokens": "model.embeddings.tok_embeddings",
            "embeddings.norm": "model.embeddings.norm",
            "final_norm": "model.final_norm",
        }
        if self.head != "embedding":
            modules |= {"head.dense": "head.dense", "head.norm": "head.norm"}
        for layer in range(self.layers):
            own = {
                "attention_norm": "attn_norm",
                "attention.qkv": "attn.Wqkv",
                "attention.out": "attn.Wo",
                "ffn_norm": "mlp_norm",
                "ffn.up": "mlp.Wi",
                "ffn.down": "mlp.Wo",
            }
            if layer == 0:
                del own["attention_norm"]
            modules |= {
                f"layers.{layer}.{ours}": f"model.layers.{layer}.{name}"
                for ours, name in own.items()
            }
        table: dict[str, tuple[str, ...]] = {
            f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in modules.items()
        }
        if self.head == "language_model":
            table["head.bias"] = ("decoder.bias",)
            if not self.tied:
                table["head.decoder.weight"] = ("decoder.weight",)
        elif self.head in self.task_names:
            for kind in ("weight", "bias"):
                table[f"head.classifier.{kind}"] = (f"classifier.{kind}",)
        return table

    @classmethod
    def _canonical(cls, name: str) -> str:
        return f"model.{name}" if name.startswith(cls.bare_names) else name


class PositionHead(nn.Module):
    """Scores positions: dense, GELU, norm, dropout, a classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.head_dropout
        self.dense = nn.Linear(config.width, config.width, bias=False)
        self.norm = config.build_norm()
        self.classifier = nn.Linear(config.width, config.classes)

    def forward(self, hidden: Tensor, _embedding: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, P, D] -> logits [B, P, C]; key: int32 [B], None means no dropout."""
        inner = dropout(self.norm(F.gelu(self.dense(hidden))), self.dropout, key)
        logits: Tensor = self.classifier(inner)
        return logits
