"""Models, and the contract between a model and everything that runs it.

`kind: bert` is the module `bert`. Its `Config` describes a model and builds it, usually under
`torch.device("meta")`: parameters get their values later, from `Model.initial_values` or a
checkpoint, after a strategy has partitioned them. Parameter names are the names in checkpoints.

A new architecture is one module, in `families` or in another package, with a `Config` that extends
`ModelConfig` and builds a `Model`. Strategies, objectives and the trainer use nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.fused import FusedAttention
from trainer.models.inputs import Inputs
from trainer.models.peft import Peft
from trainer.models.stack import LayerPlace, ScanGroup

Outputs: TypeAlias = frozenset[str]
"""Names of a model's outputs. The set is open; these are in use:

    tokens             logits [B, P, V] of the predicted tokens, from both directions
    next_tokens        logits [B, P, V] of the tokens after the predicted positions; beside a
                       task's head [B, S - 1, V], after every position except the last
    previous_tokens    logits [B, P, V] of the predicted tokens from the ones after them; without
                       predictions [B, S - 1, V], of every token except the last
    prefixed_tokens    like next_tokens, with bidirectional attention in a prefix
    target_tokens      logits [B, P, V], or [B, T, V], of an encoder-decoder
    next_sentence      logits [B, 2]: B follows A, or not (it is random, or both are swapped)
    replaced           logits [B, S] that a token was replaced
    sampled            int64 [B, P], the tokens that replace the predicted ones (ELECTRA)
    original           logits [B, P, V] of the original tokens, or [B, S, V] beside `copied`
    copied             logits [B, S] that the token is the original one
    span_boundary      logits [B, P, V] of predicted tokens, from the states outside of their spans
    permuted_tokens    logits [B, P, V] of the predicted tokens, from those before them in a
                       factorization order (XLNet)
    embedding          [B, S, D], hidden states, whose mean is the embedding of a text
    tag_transitions    [C + 1, C + 1], scores of transitions between tags (`crf`)
    logit_scale        [1], 1 and the logarithm of the change of similarities' scale
    mix_scores         [layers + 1], scores of a learned mean of layers (`scalar_mix`)
    classification, multiple_choice, tagging, question_answering
                       logits [B, P, C] of a task's head
    inputs.noise       no output: the model reads `Inputs.noise`
    hidden             [B, S, D], the head's input; [B, T, D] for an encoder-decoder
    compared.N         like layer.N, projected to the teacher's width if the model does that
    attention.N        [B, H, S, S], attention scores of layer N, from 1, before the softmax; minus
                       infinity where attention is not allowed. The n keys of a prefix come first,
                       [B, H, S, n + S], as do a prompt's positions, [B, H, n + S, n + S]
    layer.N            [B, S, D], hidden states after layer N of the stack that reads `tokens`;
                       0 is the embeddings; the last layer's include the final norm
    scores.NAME        float32 [5], in place of the logits NAME: see `TokenScore.unpack`
"""


def scores_of(output: str) -> str:
    """The output that a model may return in place of logits with a target."""
    return f"scores.{output}"


class Role(NamedTuple):
    """The function of a parameter.

    Attributes:
        part: below the layers, in a layer, in a head, or shared by several of these (a final norm,
            T5's position biases).
        kind: a weight (matrix or embedding table), a norm's weight or bias, another bias, or a
            parameter added by parameter-efficient fine-tuning.
    """

    part: Literal["embedding", "layer", "shared", "head"]
    kind: Literal["weight", "norm", "bias", "adapter"]


@dataclass(frozen=True)
class Stored:
    """Trained weights from which a model can be initialized.

    Attributes:
        config: configuration of their model.
        shapes: shape of each tensor, by parameter name.
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Start:
    """How a model's parameters are initialized from trained weights.

    Attributes:
        sources: the stored tensor for each parameter; None: initialized randomly.
        unused: stored tensors that may be left out.
        reason: the reason for leaving them out, for the log.
        added: stored tensors -> others that are added to them.
    """

    sources: Mapping[str, str | None]
    unused: frozenset[str] = frozenset()
    reason: str = ""
    added: Mapping[str, str] = field(default_factory=dict)


class Model(nn.Module, ABC):
    """An architecture.

    Attributes:
        offers: outputs that it can compute, and capabilities that an objective may need.
        trains: offered outputs with parameters of their own -> the setting that removes these, if
            there is one. An objective must need these outputs, or the parameters get no gradient.
        reads: columns of `Inputs.extra` that its layers need.
        fuses_attention: whether training and evaluation use the fused kernel.
    """

    config: ModelConfig
    offers: Outputs
    trains: Mapping[str, str] = MappingProxyType({})
    reads: frozenset[str] = frozenset()
    fuses_attention: bool = False

    @abstractmethod
    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes outputs by name, of the shapes in `trainer.models.Outputs`."""

    @property
    @abstractmethod
    def max_sequence_length(self) -> int:
        """Maximum sequence length in tokens; `sys.maxsize` if there is none."""

    @abstractmethod
    def sharding_units(self) -> Sequence[nn.Module]:
        """Modules: the parameters of each are gathered and freed together.

        The layers of all stacks in the order of the forward pass, each once.
        """

    def compiled_units(self) -> Sequence[nn.Module]:
        """Modules that `training.compile` compiles, each by itself."""
        return self.sharding_units()

    @abstractmethod
    def layer_of(self, name: str) -> LayerPlace | None:
        """The layer of a parameter; None if it is in no layer."""

    @abstractmethod
    def role(self, name: str) -> Role:
        """The function of a parameter."""

    @abstractmethod
    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter: fp32 [stop - start].

        A pure function of its arguments, so each process computes only its own partition.
        """

    @abstractmethod
    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs of the matrix products in a forward and backward pass, per position.

        Args:
            sequence_length: S.
            predicted_per_token: P / S.
        """

    @property
    def token_embeddings(self) -> Tensor:
        """The token embeddings, [V, E]; E is D unless embeddings are projected.

        Raises:
            ConfigError: the model has none.
        """
        raise ConfigError(
            f"{type(self).__name__} has no token_embeddings, which init_embeddings and samestep "
            "neighbors need. Define this property."
        )

    @torch.no_grad()
    def token_table(self) -> Tensor:
        """The embedding of each token, [V, E]: the parameter, or computed if there is none."""
        return self.token_embeddings.detach()

    def reads_for(self, outputs: Outputs) -> frozenset[str]:
        """The columns of `Inputs.extra` that these outputs need; by default those in `reads`."""
        return self.reads

    def columns(self, inputs: Inputs) -> dict[str, Tensor]:
        """The columns in `reads`, [B, ...] by name, for the `Context` of its layers."""
        return {name: inputs.extra[name] for name in sorted(self.reads)}

    def scan_groups(self) -> Sequence[ScanGroup]:
        """Groups of layers that can run as a loop, derived from static configuration."""
        return ()

    @property
    def activation_checkpointing(self) -> bool:
        """Whether layers recompute their activations in the backward pass."""
        return any(
            module.checkpointing for module in self.modules() if isinstance(module, Recomputes)
        )

    @activation_checkpointing.setter
    def activation_checkpointing(self, enabled: bool) -> None:
        for module in self.modules():
            if isinstance(module, Recomputes):
                module.checkpointing = enabled

    def fuse_attention(self, kernel: FusedAttention | None) -> bool:
        """Computes attention of `forward` by the kernel, or unfused again without one.

        Returns:
            False if the model cannot, the default.
        """
        return False

    def use_dropout_version(self, version: int) -> None:
        """Chooses the masks of attention dropout (`training.dropout_version`), if it has any."""

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """The dtype of the residual stream; None: as the modules compute it, fp32 after norms."""
        found = (module for module in self.modules() if isinstance(module, FeedsResidual))
        return next((module.stream_dtype for module in found), None)

    @residual_dtype.setter
    def residual_dtype(self, dtype: torch.dtype | None) -> None:
        # A sum of two 16-bit tensors is 16-bit. So the stream keeps the dtype of its sources, which
        # are the embeddings and, in a post-norm layer, norms; branches are 16-bit by autocast.
        for module in self.modules():
            if isinstance(module, FeedsResidual):
                module.stream_dtype = dtype

    def stacked(self) -> dict[str, int]:
        """Number of equally sized matrices stacked in the rows of a parameter (3 for fused QKV).

        Parameters that are a single matrix are omitted.
        """
        return {}

    def layers_above(self) -> dict[str, int]:
        """Number of layers between each parameter and the heads, its own layer included.

        In a model of 12 layers: 0 for the head and the final norm, 1 for the last layer, 12 for the
        first, 13 for the embeddings. A layer that is used several times counts at its last use.
        """
        names = [name for name, _ in self.named_parameters()]
        above = self._above()
        depths = [place.depth for name in above if (place := self.layer_of(name))]
        below = max(depths, default=0) + 1
        return {
            name: above.get(name, below if self.role(name).part == "embedding" else 0)
            for name in names
        }

    def last_layers(self, count: int) -> frozenset[str]:
        """The parameters of the last `count` layers of each stack."""
        return frozenset(name for name, above in self._above().items() if above <= count)

    def _above(self) -> dict[str, int]:
        """`layers_above` of the layers' parameters. Each stack counts its own from the top."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        found: dict[str, int] = {}
        # A shared layer has a name for each use: with ALBERT's, layers.0 to layers.11 are one.
        for name, parameter in self.named_parameters(remove_duplicate=False):
            if (place := self.layer_of(name)) is not None:
                # Layer 11 of 12 is the last: depth - number is 1.
                own, above = names[parameter], place.depth - place.number
                found[own] = min(above, found.get(own, above))
        return found

    def start_from(self, stored: Stored) -> Start:
        """Chooses the stored tensor for each parameter: by default the one of the same name."""
        return Start({name: name for name, _ in self.named_parameters()})


class ModelConfig(ABC):
    """Describes a model and builds it. Families are frozen dataclasses that extend this class.

    A property here is a fact about a family, with the most common value as its default; some
    families turn it into a setting.

    Attributes:
        codec: the module that converts Hugging Face files, see `trainer.models.codecs`; "": none.
        position_offset: unused rows at the start of the position table (RoBERTa).
        vocab_size: rows of the token table.
        width: D, of the hidden states.
    """

    codec: ClassVar[str] = ""
    position_offset: ClassVar[int] = 0

    vocab_size: int
    width: int

    @property
    def embedding_width(self) -> int:
        """E, of the token embeddings."""
        return self.width

    @property
    def layers(self) -> int:
        """Number of layers, of the encoder if there are two stacks; 0 if unknown."""
        return 0

    @property
    def heads(self) -> int:
        """Number of attention heads; 0 without attention."""
        return 0

    @property
    def head(self) -> str:
        """The head: `language_model`, or a task's."""
        return "language_model"

    @property
    def predicts(self) -> str:
        """The output of the model's head, one of `Outputs`."""
        return "next_tokens" if self.causal else "tokens"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes or tags of a task's head."""
        return ()

    @property
    def causal(self) -> bool:
        """Whether a position attends only to itself and earlier ones."""
        return False

    @property
    def prefix_lm(self) -> bool:
        """Whether attention is bidirectional within a causal model's prefix."""
        return False

    @property
    def encoder_decoder(self) -> bool:
        """Whether the model has both an encoder and a decoder."""
        return False

    @property
    def decoder(self) -> bool:
        """Whether the head reads a decoder: only its last position sees a whole sequence."""
        return self.causal

    @property
    def start_token(self) -> int | None:
        """Id of the first input token of a decoder beside an encoder; None: there is none."""
        return None

    @property
    def sets_start(self) -> bool:
        """Whether each target begins with `start_token`, whatever token the batch has there."""
        return False

    @property
    def decoder_layers(self) -> int | None:
        """Number of the decoder's layers in an encoder-decoder, if it can differ from `layers`."""
        return None

    @property
    def type_vocab(self) -> int:
        """Number of token types; 0 without token types."""
        return 0

    @property
    def reads_sources(self) -> bool:
        """Whether a prompt is formatted as a source: without a start token, with an end token."""
        return False

    @property
    def max_positions(self) -> int | None:
        """Usable rows of the position table; None without a table."""
        return None

    @property
    def scalar_mix_l2(self) -> float:
        """Coefficient of the penalty on the scores of a learned mean of layers."""
        return 0.0

    @property
    def logit_scale(self) -> bool:
        """Whether the scale of similarities is learned."""
        return False

    @property
    def peft(self) -> Peft | None:
        """Parameter-efficient fine-tuning; None trains all parameters."""
        return None

    @property
    def virtual_tokens(self) -> int:
        """Number of positions that `peft` inserts before a text, for a prefix or prompt."""
        return 0 if self.peft is None else self.peft.length

    @property
    def settings_for(self) -> Mapping[str, str]:
        """Output -> the setting, as key=value, with which this family offers it."""
        return {}

    @abstractmethod
    def build(self) -> Model:
        """Builds the module, without values. Frozen parameters require no gradient.

        Raises:
            ConfigError: the model has no place for `peft`.
        """

    def for_needs(self, needs: Outputs, labels: tuple[str, ...] = ()) -> Self:
        """The same model with the heads that an objective needs.

        Args:
            needs: the objective's `needs`.
            labels: the dataset's labels; empty if the head has none.

        Raises:
            ConfigError: the family has no such head.
        """
        return self

    def with_settings(self, **settings: object) -> Self:
        """The same model with other values of some settings."""
        changed: Self = replace(self, **settings)  # type: ignore[type-var]  # all are dataclasses
        return changed

    def without_peft(self) -> Self:
        """The same model without `peft`."""
        return self

    def pad_vocabulary(
        self, parameters: Mapping[str, Tensor], size: int
    ) -> tuple[Self, dict[str, Tensor]]:
        """Pads the token embeddings [V, E] with zeros to [size, E].

        Returns:
            The configuration and the parameters of the larger model.

        Raises:
            ConfigError: the family cannot.
        """
        raise ConfigError(f"{type(self).__module__} cannot pad its vocabulary.")


@runtime_checkable
class UsesKernel(Protocol):
    """An attention module whose kernel a strategy can replace.

    Attributes:
        kernel: called like `scaled_dot_product_attention`.
        dropout: dropout rate of attention probabilities; with dropout, `kernel` is not called.
    """

    kernel: Callable[..., Tensor]
    dropout: float


@runtime_checkable
class Recomputes(Protocol):
    """A module that supports activation checkpointing."""

    checkpointing: bool


@runtime_checkable
class FeedsResidual(Protocol):
    """A module whose output enters the residual stream or a projection: embeddings, norms.

    Attributes:
        stream_dtype: the dtype of its output; None: as it is computed.
    """

    stream_dtype: torch.dtype | None


@runtime_checkable
class ReadsSpellings(Protocol):
    """A module that computes with the characters of tokens."""

    def read_spellings(self, spellings: Sequence[str]) -> None:
        """Takes the spelling of each token, before the first forward pass."""


def give_spellings(model: nn.Module, load: Callable[[], Sequence[str]]) -> None:
    """Gives the spelling of each token, from `load`, to the modules that read it."""
    for module in model.modules():
        if isinstance(module, ReadsSpellings):
            module.read_spellings(load())
