"""Models, and the contract between a model and everything that runs it.

`kind: bert` is the module `bert`: its `Config` describes a model and builds it, best under
`torch.device("meta")`, because parameters get their values afterwards, from
`Model.initial_values` or a checkpoint. Parameter names are the names in checkpoints.

A new architecture is one module here, or in a package of its own, with a `Config` that is a
`ModelConfig` and builds a `Model`. Strategies, objectives and the trainer know nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.cache import Cache
from trainer.models.stack import LayerPlace, ScanGroup


@dataclass(frozen=True)
class Inputs:
    """What a batch gives to a model; None where the batch has no such column.

    B is the number of rows, S of positions in a row, P of predictions in a row. A row may hold
    several packed sequences.

    Attributes:
        tokens: int [B, S].
        segments: int [B, S]; 0 is padding, 1, 2, ... number the sequences of a row. A position
            attends within its segment. None: each row is one sequence without padding.
        positions: int [B, S], counted from 0 in each sequence.
        predicted: int [B, P], the positions that the head reads; None means all.
        token_types: int [B, S]; None means type 0 everywhere.
        prefix: bool [B, S], positions of a causal model that are visible to their whole segment.
        target_tokens: int [B, T], what a decoder beside an encoder reads.
        target_segments, target_positions: int [B, T], like those of `tokens`. A target position
            attends to the source positions of the same segment number.
        dropout_key: int32 [B], a random key for each row; None means no dropout.
        extra: the batch's other columns, by name. A model reads those that it lists in `reads`.
    """

    tokens: Tensor
    segments: Tensor | None = None
    positions: Tensor | None = None
    predicted: Tensor | None = None
    token_types: Tensor | None = None
    prefix: Tensor | None = None
    target_tokens: Tensor | None = None
    target_segments: Tensor | None = None
    target_positions: Tensor | None = None
    dropout_key: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> Self:
        """Takes a model's inputs out of a batch."""
        given = {name: batch[name] for name in _COLUMNS if name in batch}
        return cls(**given, extra={name: batch[name] for name in batch if name not in given})

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Applies a function to every column but `extra`."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        changed = {name: change(column) for name, column in columns.items() if column is not None}
        return type(self)(**changed, extra=self.extra)


_COLUMNS = tuple(column.name for column in fields(Inputs) if column.name != "extra")

Outputs: TypeAlias = frozenset[str]
"""Names of what a model computes. The set is open; these are in use:

    tokens             logits [B, P, V] of the predicted tokens, seen from both sides
    next_tokens        logits [B, P, V] of the tokens after the predicted positions; beside a
                       task's head [B, S - 1, V], after each position but the last
    prefixed_tokens    like next_tokens, for a model whose positions see a whole prefix
    target_tokens      logits [B, P, V], or [B, T, V], of a decoder beside an encoder
    next_sentence      logits [B, 2] of "B follows A" and "B is from elsewhere"
    classification, multiple_choice, tagging, question_answering
                       logits [B, P, C] of a task's head
    hidden             [B, S, D], the hidden states that the head reads, of all positions; a
                       decoder's beside an encoder are [B, T, D]
    layer.N            [B, S, D], hidden states after layer N of the stack that reads `tokens`;
                       0 is the embeddings, and the last layer's include the final norm
"""


class Role(NamedTuple):
    """What a parameter is for.

    Attributes:
        part: where it is: below the layers, in a layer, in a head, or shared by several of these
            (as a final norm, or T5's position biases).
        kind: what it is: a weight (a matrix or an embedding table), the weight or bias of a norm,
            another bias, or an addition of parameter-efficient fine-tuning.
    """

    part: Literal["embedding", "layer", "shared", "head"]
    kind: Literal["weight", "norm", "bias", "adapter"]


@dataclass(frozen=True)
class Stored:
    """Trained weights that a model may start from.

    Attributes:
        config: configuration of the model that they belong to.
        shapes: shape of each tensor, by parameter name.
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Start:
    """Where the parameters of a model come from when it starts from trained weights.

    Attributes:
        sources: the stored tensor for each parameter; None: the parameter is initialized.
        unused: stored tensors that may be left out.
        reason: why they are, for the log.
    """

    sources: Mapping[str, str | None]
    unused: frozenset[str] = frozenset()
    reason: str = ""


@runtime_checkable
class UsesKernel(Protocol):
    """An attention module whose kernel can be replaced.

    Attributes:
        kernel: called like `scaled_dot_product_attention`.
        dropout: probability of dropping attention probabilities, which fused kernels cannot do.
    """

    kernel: Callable[..., Tensor]
    dropout: float


class Model(nn.Module, ABC):
    """An architecture.

    Attributes:
        offers: outputs that it can compute, and capabilities that an objective may need.
        trains: offered outputs with parameters of their own, and the setting that removes them if
            there is one. An objective has to need them, or these parameters get no gradient.
        reads: columns of `Inputs.extra` that it needs.
    """

    config: ModelConfig
    offers: Outputs
    trains: Mapping[str, str] = MappingProxyType({})
    reads: frozenset[str] = frozenset()

    @abstractmethod
    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes the outputs, by name."""

    @property
    @abstractmethod
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens; `sys.maxsize` if any length will do."""

    @abstractmethod
    def sharding_units(self) -> Sequence[nn.Module]:
        """Modules whose parameters are gathered and freed together, in the order of the forward
        pass: the layers of every stack; a shared layer once."""

    @abstractmethod
    def layer_of(self, name: str) -> LayerPlace | None:
        """The layer that a parameter belongs to; None: no layer."""

    @abstractmethod
    def role(self, name: str) -> Role:
        """What a parameter is for."""

    @abstractmethod
    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter: fp32 [stop - start].

        A pure function of its arguments, so every process can make just its own partition.
        """

    @abstractmethod
    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs of the matrix products in a forward and backward pass, for each position.

        Args:
            sequence_length: S.
            predicted_per_token: P / S.
        """

    @property
    def token_embeddings(self) -> Tensor:
        """The table of token embeddings, [V, D].

        Raises:
            ConfigError: the model has none.
        """
        raise ConfigError(f"{type(self).__name__} has no table of token embeddings")

    def columns(self, inputs: Inputs) -> dict[str, Tensor]:
        """The columns that the model reads, for the `Context` of its layers."""
        return {name: inputs.extra[name] for name in sorted(self.reads)}

    def scan_groups(self) -> Sequence[ScanGroup]:
        """Groups of layers that can run as a loop. They are declared from static configuration."""
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

    def stacked(self) -> dict[str, int]:
        """Number of equally sized matrices stacked in the rows of a parameter (3 for fused QKV).

        Parameters that hold one matrix are left out.
        """
        return {}

    def layers_above(self) -> dict[str, int]:
        """Number of layers between each parameter and the heads, its own layer included.

        0 for heads and what follows the last layer; one more than the first layer's for
        embeddings.
        """
        found = {
            name: (self.layer_of(name), self.role(name)) for name, _ in self.named_parameters()
        }
        above = {name: place.depth - place.number for name, (place, _) in found.items() if place}
        below = max(above.values(), default=0) + 1
        return {
            name: above.get(name, below if role.part == "embedding" else 0)
            for name, (_, role) in found.items()
        }

    def last_layers(self, count: int) -> frozenset[str]:
        """The parameters of the last `count` layers of each stack."""
        places = {name: self.layer_of(name) for name, _ in self.named_parameters()}
        return frozenset(
            name for name, place in places.items() if place and place.depth - place.number <= count
        )

    def start_from(self, stored: Stored) -> Start:
        """Chooses the tensor that each parameter starts from: by default the one of its name."""
        return Start({name: name for name, _ in self.named_parameters()})


@runtime_checkable
class Generates(Protocol):
    """A model that writes text: an encoder-decoder, or a causal one."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def max_sequence_length(self) -> int: ...

    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        """Reads what comes before the text, which `step` then writes.

        Args:
            inputs: tokens with their segments; a causal model wants them padded at the left, and an
                encoder-decoder the start of its targets, too.
            capacity: of the cache, in positions.

        Returns:
            The logits [B, V] of the next tokens, and what `step` needs.
        """
        ...

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Reads one more token of each text: int [B] -> the logits [B, V] of those after."""
        ...


@runtime_checkable
class Recomputes(Protocol):
    """A module that can recompute activations in the backward pass instead of keeping them."""

    checkpointing: bool


class Peft(Protocol):
    """Parameter-efficient fine-tuning: the `Config` of a module of `trainer.models.peft`."""

    @property
    def length(self) -> int:
        """Positions that it puts before a text's first."""
        ...

    @property
    def trains_norms(self) -> bool:
        """Whether the norms of the layers are trained, too."""
        ...

    @property
    def merges(self) -> bool:
        """Whether `merge` can add what it learned to plain weights."""
        ...

    def add_to(self, model: nn.Module) -> None:
        """Adds its parameters to a model, on the model's device, without values.

        Raises:
            ConfigError: the model has nothing to add them to.
        """
        ...

    def owns(self, name: str) -> bool:
        """Whether it has added the parameter `name`."""
        ...

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        """Standard deviation of an added parameter's initial values; None: not its parameter."""
        ...

    def merge(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, by name, of a plain model that computes the same."""
        ...


class ModelConfig(ABC):
    """Describes a model, and builds it. Families are frozen dataclasses that derive from this.

    What is a property here is a fact about a family, with the value that most families have;
    some families make a setting of it.

    Attributes:
        model_type: the family's name in Hugging Face's `config.json`.
        position_offset: rows at the start of the position table that stay unused (RoBERTa).
        start_token: id of the token that a decoder reads first; None: no such token.
        vocab_size: rows of the token table.
        width: D, of the hidden states.
    """

    model_type: ClassVar[str] = ""
    position_offset: ClassVar[int] = 0
    start_token: ClassVar[int | None] = None

    vocab_size: int
    width: int

    @property
    def layers(self) -> int:
        """Number of layers (of the encoder, where there are two stacks).

        0: it is not known here.
        """
        return 0

    @property
    def heads(self) -> int:
        """Number of attention heads; 0: the model has no attention."""
        return 0

    @property
    def head(self) -> str:
        """What the head predicts: tokens (`language_model`), or what a task asks for."""
        return "language_model"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes or tags of a task's head."""
        return ()

    @property
    def causal(self) -> bool:
        """Whether a position attends to those before it only."""
        return False

    @property
    def prefix_lm(self) -> bool:
        """Whether the positions of a prefix attend to all of it, in a causal model."""
        return False

    @property
    def encoder_decoder(self) -> bool:
        """Whether a decoder reads targets beside an encoder."""
        return False

    @property
    def decoder(self) -> bool:
        """Whether a decoder reads the text: only its last position has seen all of a sequence."""
        return self.causal

    @property
    def decoder_layers(self) -> int | None:
        """Number of layers of a decoder beside an encoder, if it can differ from `layers`."""
        return None

    @property
    def nsp(self) -> bool:
        """Whether there is a next-sentence head."""
        return False

    @property
    def type_vocab(self) -> int:
        """Number of token types; 0: the model has none."""
        return 0

    @property
    def reads_sources(self) -> bool:
        """Whether a text that it reads is a source: no token before it, and one that ends it."""
        return False

    @property
    def max_positions(self) -> int | None:
        """Rows of the position table that sequences can use; None: there is no table."""
        return None

    @property
    def peft(self) -> Peft | None:
        """Parameter-efficient fine-tuning; None: all parameters are trained."""
        return None

    @property
    def virtual_tokens(self) -> int:
        """Positions before a text's first that `peft` uses for a prefix or prompt."""
        return 0 if self.peft is None else self.peft.length

    @property
    def settings_for(self) -> Mapping[str, str]:
        """Settings, as key=value, that make a model of this family offer an output."""
        return {}

    @abstractmethod
    def build(self) -> Model:
        """Makes the module, without values. Frozen parameters require no gradient.

        Raises:
            ConfigError: the model has nothing that `peft` could change.
        """

    def for_needs(self, needs: Outputs, labels: tuple[str, ...] = ()) -> Self:
        """The same model with the heads that an objective needs.

        Args:
            needs: of the objective.
            labels: of the dataset; empty if the head has none.

        Raises:
            ConfigError: the family has no such head.
        """
        return self

    def without_peft(self) -> Self:
        """The model that `peft` was added to."""
        return self

    def pad_vocabulary(
        self, parameters: Mapping[str, Tensor], size: int
    ) -> tuple[Self, dict[str, Tensor]]:
        """Grows the token table to `size` rows, filled with zeros.

        Returns:
            The configuration and the parameters of the larger model.
        """
        raise self._unpublished()

    def to_huggingface(self) -> dict[str, object]:
        """The content of a `config.json` for transformers.

        Raises:
            ConfigError: transformers has no such model.
        """
        raise self._unpublished()

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turns the tensors of a Hugging Face checkpoint into parameters.

        Raises:
            CheckpointError: tensors are missing, unexpected or of another shape.
        """
        raise self._unpublished()

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turns parameters into the tensors of a Hugging Face checkpoint.

        Raises:
            CheckpointError: parameters are missing, unexpected or of another shape.
        """
        raise self._unpublished()

    def _unpublished(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__module__} has no Hugging Face format; use the checkpoint with samestep"
        )
