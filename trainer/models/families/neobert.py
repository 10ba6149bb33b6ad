"""NeoBERT (Le Breton et al. 2025): a deep encoder with Llama's layers, for 4,096 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from samestep.errors import ConfigError
from trainer.models.config import Activation, Norm, NormKind
from trainer.models.families import bert
from trainer.models.heads import LanguageModelHead
from trainer.models.layers.rotary import RotaryAttention, check_width

THETA = 10_000.0
"""Base of the rotary frequencies, a constant of the published code."""

_BOUND = 2.0**-6


@dataclass(frozen=True)
class Config(bert.Config):
    """NeoBERT, 250M.

    Pre-norm by root mean squares, rotary positions, a feed-forward network gated by SiLU, no biases
    in layers, and an output matrix apart from the token embeddings.

    Attributes:
        dropout: dropout rate of each branch's output; the published model has none.
        max_positions: maximum sequence length; there is no table of positions.
        initializer_range: initial weights are uniform between minus this number and this number.
        head_dropout: dropout rate in the head of a task.
    """

    codec: ClassVar[str] = "trainer.models.codecs.neobert"
    fewest_types: ClassVar[int] = 0
    classification_drops_first: ClassVar[bool] = True

    layers: int = 28
    ffn_width: int = 2048
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: Activation = "swiglu"
    max_positions: int = 4096
    type_vocab: int = 0
    norm_eps: float = 1e-5
    norm: Norm = "pre"
    tied: bool = False
    head_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rate("head_dropout")
        self.check_absent("NeoBERT", "type_vocab", "nsp", "span_boundary", "tied")
        if (self.norm, self.activation) != ("pre", "swiglu"):
            raise ConfigError(
                f"norm is {self.norm} and activation is {self.activation}, but NeoBERT has norm "
                "pre and swiglu. Leave them out, or use kind: bert."
            )
        check_width(self)

    @property
    def norm_kind(self) -> NormKind:
        return "rms"

    @property
    def projection_bias(self) -> bool:
        return False

    @property
    def embedding_dropout(self) -> float:
        return 0.0

    @property
    def ffn_dropout(self) -> float:
        return 0.0

    @property
    def position_table(self) -> bool:
        return False

    @property
    def reads_positions(self) -> bool:
        return True

    @property
    def normal_bound(self) -> float:
        # A normal distribution that is cut this close to its mean is uniform within 0.02 %.
        return _BOUND

    def initial_std(self, name: str) -> tuple[float, ...]:
        # In the released code, a task's head has normal values with this standard deviation. A
        # uniform distribution has its limit, divided by the root of 3.
        is_task = self.head != "language_model" and name.startswith("head.")
        limit = self.initializer_range * (3**0.5 if is_task else 1)
        return (limit / _BOUND,)

    def build_attention(self, index: int) -> nn.Module:
        return RotaryAttention(self, THETA, None)

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return LanguageModelHead(self, bias=True)
        return super()._build_head()
