"""Llama (Touvron et al. 2023), and its relatives.

Mistral, Qwen 2 and 3, SmolLM, OLMo 2 and EuroBERT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Model, Outputs
from trainer.models.base import POOLED
from trainer.models.config import Activation, Head, NormKind, TaskHead
from trainer.models.extras import Extra
from trainer.models.families import Family
from trainer.models.heads import EmbeddingHead, LanguageModelHead, PooledHead, TokenHead
from trainer.models.layers.frequencies import Scaling, angles
from trainer.models.layers.grouped import (
    GroupedAttention,
    GroupedCrossAttention,
    Grouping,
    OutputNormLayer,
)
from trainer.models.transformer import Transformer

_TASKS: tuple[Head, ...] = (*get_args(TaskHead), "embedding")


@dataclass(frozen=True)
class Config(Family):
    """A Llama of SmolLM-135M's shape.

    Pre-norm by root mean square without biases, rotary positions, gated units, and fewer heads of
    keys and values than of queries.

    Attributes:
        heads: H, heads of queries.
        kv_heads: heads of keys and values, a divisor of `heads`; null: as many.
        head_width: K, the width of a head; heads need not fill the width.
        max_positions: maximum sequence length; there is no table of positions.
        causal: whether tokens attend only to earlier ones; false: in both directions (EuroBERT,
            or a causal model that goes on with masked tokens).
        window: positions attend only to this many ones up to themselves (Mistral); with `causal:
            false`, to as many on the other side. Null: to all.
        theta: base of the rotary frequencies.
        scaling: stretches rotary positions to longer texts; null: it does not.
        unplaced_every: the last of this many layers has no positions (4 in SmolLM3); 0: all have.
        qkv_bias: whether the projections to queries, keys and values have biases (Qwen 2).
        qk_norm: whether queries and keys are normalized in each head (Qwen 3).
        joint_qk_norm: whether they are normalized over all heads at once (OLMo 2).
        output_norm: whether layers normalize the output of attention and of the feed-forward
            network instead of their input (OLMo 2).
        tied: whether the head shares the token embeddings.
        initializer_range: standard deviation of the initial weights.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, the class of a text
            (`classification`) or a score for choosing among texts (`multiple_choice`), from the
            last position, or with `causal: false` the first; a tag for each token (`tagging`); the
            first and last token of an answer (`question_answering`); or embeds texts (`embedding`).
        decoder_layers: number of layers of a decoder that attends to the output of the `layers`,
            which then are an encoder; null: there is one stack. With `init_from` a model of one
            stack, both start from its layers (`causal: false`, without norms of queries and keys).
        start_token: id of the decoder's first input token, before each target: the tokenizer's
            padding token or the one that ends texts; null without `decoder_layers`.
        pooling: what the first position holds for such a head of a model with `causal: false`: its
            own state (`first`), the mean of the text's (`mean`), or the mean after the head's dense
            layer (`late`, EuroBERT's).
        labels: names of classes or tags; `classification` with a single label is a regression.
    """

    codec: ClassVar[str] = "trainer.models.codecs.llama"

    vocab_size: int = 49152
    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int | None = 3
    head_width: int = 64
    ffn_width: int = 1536
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    activation: Activation = "swiglu"
    max_positions: int = 2048
    causal: bool = True
    window: int | None = None
    theta: float = 10_000.0
    scaling: Scaling | None = None
    unplaced_every: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    output_norm: bool = False
    tied: bool = True
    initializer_range: float = 0.02
    head: Head = "language_model"
    decoder_layers: int | None = None
    start_token: int | None = None
    pooling: Literal["first", "mean", "late"] = "first"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_positions", "head_width"):
            self.check_positive(name)
        if self.head_width % 2:
            raise ConfigError(
                f"head_width is {self.head_width}, but rotary positions need an even number. "
                "Change it."
            )
        if self.keys < 1 or self.heads % self.keys:
            raise ConfigError(
                f"kv_heads is {self.keys}, which does not divide heads {self.heads}. Use a divisor."
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}. Use 1 or more, or null.")
        if self.unplaced_every < 0:
            raise ConfigError(f"unplaced_every is {self.unplaced_every}. Use 0 or more.")
        for name in ("theta", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use a number above 0.")
        if self.qk_norm and self.joint_qk_norm:
            raise ConfigError("qk_norm and joint_qk_norm are true. Set one of them.")
        self.check_task(*_TASKS)
        self._check_decoder()
        if self.pooling != "first" and (self.causal or self.head not in POOLED):
            raise ConfigError(
                f"pooling is {self.pooling}, which is for causal: false and a classification head. "
                "Leave it out."
            )

    def _check_decoder(self) -> None:
        if self.decoder_layers is None:
            self.check_absent("a Llama without decoder_layers", "start_token")
            return
        self.check_positive("decoder_layers")
        if self.causal or self.head != "language_model":
            raise ConfigError(
                f"decoder_layers is {self.decoder_layers}, which needs causal: false for the "
                "encoder and head: language_model. Set these, or leave decoder_layers out."
            )
        if self.start_token is None or not 0 <= self.start_token < self.vocab_size:
            raise ConfigError(
                f"start_token is {self.start_token}, and vocab_size {self.vocab_size}. With "
                "decoder_layers, set it to the id of the tokenizer's padding or last token."
            )
        self.check_absent(
            "a Llama with decoder_layers",
            *("qkv_bias", "qk_norm", "joint_qk_norm", "output_norm", "unplaced_every"),
        )

    @property
    def keys(self) -> int:
        """The value of `kv_heads`."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def encoder_decoder(self) -> bool:
        return self.decoder_layers is not None

    @property
    def decoder(self) -> bool:
        return self.causal or self.encoder_decoder

    @property
    def sets_start(self) -> bool:
        return self.encoder_decoder

    @property
    def reads_sources(self) -> bool:
        return self.encoder_decoder

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        more = ("cross_attention", "cross_attention_output") if self.encoder_decoder else ()
        return (*super().dropout_sites, *more)

    @property
    def norm_kind(self) -> NormKind:
        return "rms"

    @property
    def projection_bias(self) -> bool:
        return False

    @property
    def position_table(self) -> bool:
        return False

    @property
    def reads_positions(self) -> bool:
        return True

    @property
    def settings_for(self) -> Mapping[str, str]:
        heads = {head: f"model.head={head}" for head in _TASKS}
        if self.head != "language_model":
            return heads | dict.fromkeys(("tokens", "next_tokens"), "model.head=language_model")
        targets = {"target_tokens": f"model.decoder_layers={self.layers}"}
        if self.encoder_decoder:
            return heads | dict.fromkeys(("tokens", "next_tokens"), "model.decoder_layers=null")
        return (
            heads
            | targets
            | {
                "tokens": "model.causal=false",
                "next_tokens": "model.causal=true",
            }
        )

    def position_columns(self, positions: Tensor) -> dict[str, Tensor]:
        return angles(positions, self.head_width, self.theta, self.scaling)

    def rotates(self, index: int) -> bool:
        """Whether layer `index` has positions."""
        # Every fourth: layers 0 1 2 rotate, 3 does not, 4 5 6 do.
        return self.unplaced_every == 0 or (index + 1) % self.unplaced_every != 0

    def static(self, index: int) -> bool:
        return self.rotates(index)

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (self.initializer_range,)

    def build_attention(self, index: int) -> nn.Module:
        # A window of 4 is the position itself and 3 before it: distances 0 to 3.
        window = None if self.window is None else self.window - 1
        return GroupedAttention(
            self,
            Grouping(
                self.keys,
                bias=self.qkv_bias,
                norm=self.qk_norm,
                joint_norm=self.joint_qk_norm,
                rotates=self.rotates(index),
                window=window,
            ),
        )

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        if self.output_norm:
            return OutputNormLayer(self, index)
        return super().build_layer(index, cross_attention)

    def build_cross_attention(self, index: int) -> nn.Module:
        return GroupedCrossAttention(self, self.keys)

    def build_base(self) -> Model:
        if self.decoder_layers is not None:
            from trainer.models.halves import Halves

            return Halves(self, self._build_head(), decoder_layers=self.decoder_layers)
        return Transformer(self, self._build_head(), self.build_extras())

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return LanguageModelHead(self)
        if self.head == "embedding":
            return EmbeddingHead()
        if self.head in POOLED and not self.causal and self.pooling != "late":
            # EuroBERT's classifier: a dense layer with GELU before the matrix.
            return PooledHead(self, self.classes, activation="gelu")
        # Causal models score the last position by a matrix alone.
        return TokenHead(self.width, self.classes, bias=not (self.head in POOLED and self.causal))

    def extras_for(self, needs: Outputs) -> dict[str, object]:
        return {} if needs & {*POOLED} else {"pooling": "first"}

    def build_extras(self) -> Sequence[Extra]:
        if self.pooling != "first":
            from trainer.models.extras.mean_pooling import MeanPooling

            pooling = MeanPooling(self.width if self.pooling == "late" else None)
            return (pooling, *super().build_extras())
        # An untied head is not among the weights of a task.
        if self.head not in POOLED or not (self.causal and self.tied):
            return super().build_extras()
        from trainer.models.extras.auxiliary_lm import AuxiliaryLanguageModel

        return (AuxiliaryLanguageModel(self),)
