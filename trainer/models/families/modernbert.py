"""ModernBERT (Warner et al. 2024): rotary positions, and attention that is mostly local."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.config import Activation, Norm
from trainer.models.families import bert
from trainer.models.layers.dropout import dropout
from trainer.models.layers.layer import Layer
from trainer.models.layers.rotary import RotaryAttention, check_width


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

    codec: ClassVar[str] = "trainer.models.codecs.modernbert"
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
        self.check_absent("ModernBERT", "type_vocab", "nsp", "span_boundary")
        if self.norm != "pre" or not self.gated:
            raise ConfigError(
                f"norm is {self.norm} and activation is {self.activation}, but ModernBERT has norm "
                "pre and geglu. Leave them out, or use kind: bert."
            )
        check_width(self)

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
