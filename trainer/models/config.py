"""The configuration of a Transformer, from which each of its modules is built."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from samestep.config import Kinds, kind_name
from samestep.errors import ConfigError
from trainer.models import Model, ModelConfig, Outputs
from trainer.models.peft import Peft

if TYPE_CHECKING:
    from trainer.models.extras import Extra

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "geglu", "geglu_tanh", "swiglu"]
Pooling: TypeAlias = Literal["tanh", "relu", "gelu"]
"""The activation between the two layers of a head that pools a position."""
Norm: TypeAlias = Literal["post", "pre"]
NormKind: TypeAlias = Literal["layer", "rms"]
TaskHead: TypeAlias = Literal["classification", "multiple_choice", "tagging", "question_answering"]
Head: TypeAlias = Literal["language_model", TaskHead, "embedding"]

_MOST_LAYERS = 10_000
_MOST_HEADS = 2**16

WHOLE_NORMAL = 8.0
"""A truncation in standard deviations that truncates nothing: fp64 has no probability beyond."""

FEWEST_LABELS: dict[Head, int] = {"classification": 1, "tagging": 2}
"""Minimum number of labels of heads with one output per label."""


def check_labels(head: Head, labels: tuple[str, ...]) -> None:
    """Rejects labels that do not fit a head.

    Raises:
        ConfigError: names the labels.
    """
    fewest, count = FEWEST_LABELS.get(head), len(labels)
    if fewest is None and count:
        raise ConfigError(
            f"labels is {list(labels)}, but a {head} head has none. Leave labels "
            "empty, or set head to classification or tagging."
        )
    if fewest is not None and count < fewest:
        raise ConfigError(
            f"labels has {count} names, but a {head} head needs at least {fewest}. Set it "
            "to the dataset's labels."
        )
    for label, times in Counter(labels).most_common(1):
        if times > 1:
            raise ConfigError(f"labels has {label!r} {times} times. Labels must differ.")


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Shape and regularization of all Transformers; each family sets its own defaults.

    A property here is a fact about a family; some families turn it into a setting. Modules build
    their parts through `build_norm`, `build_attention`, ..., so a family with another attention
    overrides one method.

    Attributes:
        vocab_size: rows of the token embeddings; at least the tokenizer's size. A multiple of 64
            is faster on GPUs.
        layers: number of layers.
        width: D, of the hidden states.
        heads: H, attention heads of width / heads each.
        ffn_width: inner width of the feed-forward network.
        dropout: dropout rate of embeddings and of each branch's output.
        attention_dropout: dropout rate of attention probabilities; 0 allows PyTorch's fused
            kernels in training, samestep's own allows any rate.
        norm_eps: added to the variance in norms.
        activation: of the feed-forward network.
        logit_scale: learns the scale of similarities, for `objective: {kind: contrastive,
            learn_temperature: true}`.
        peft: parameter-efficient fine-tuning (a module of trainer/models/peft/kinds): trains added
            parameters and a task's head, and freezes the rest; None trains all.
    """

    vocab_size: int
    layers: int = 12
    width: int = 768
    heads: int = 12
    ffn_width: int = 3072
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-5
    activation: Activation = "gelu"
    logit_scale: bool = False
    peft: Annotated[Peft, Kinds("trainer.models.peft.kinds")] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "ffn_width"):
            self.check_positive(name)
        for name in ("dropout", "attention_dropout"):
            self.check_rate(name)
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps is {self.norm_eps}. Use a number above 0.")
        if self.logit_scale and self.head != "embedding":
            raise ConfigError(
                f"logit_scale is true, but a {self.head} head compares no embeddings. Set "
                "logit_scale to false, or head to embedding."
            )

    def check_heads(self) -> None:
        """Rejects a width that is not a multiple of the number of heads."""
        if self.width % self.heads:
            # Name the divisor of the width that is closest to what was asked for.
            most = min(self.width, 2 * self.heads, _MOST_HEADS)
            divisors = [heads for heads in range(1, most + 1) if self.width % heads == 0]
            nearest = min(divisors, key=lambda heads: abs(heads - self.heads))
            raise ConfigError(
                f"width {self.width} is not a multiple of heads {self.heads}. Use heads={nearest}."
            )

    def check_task(self, *heads: Head) -> None:
        """Rejects a head that the family lacks, and labels that do not fit the head."""
        if self.head not in ("language_model", *heads):
            raise ConfigError(
                f"head is {self.head}, but this kind of model supports only "
                f"{', '.join(heads)}. Use one of these, or another kind of model, such as bert."
            )
        check_labels(self.head, self.labels)

    def check_absent(self, family: str, *names: str, fix: str = "Leave it out.") -> None:
        """Rejects settings of parts that a family lacks."""
        for name in names:
            if getattr(self, name):
                raise ConfigError(f"{name} is {getattr(self, name)}, but {family} has none. {fix}")

    def check_rate(self, name: str) -> None:
        """Rejects a dropout rate outside of [0, 1)."""
        if not 0 <= getattr(self, name) < 1:
            raise ConfigError(f"{name} is {getattr(self, name)}. Use a number in [0, 1).")

    def check_positive(self, name: str) -> None:
        """Rejects a setting below 1, and more layers than can be built in a minute."""
        if getattr(self, name) < 1:
            raise ConfigError(f"{name} is {getattr(self, name)}. Use 1 or more.")
        if name.endswith("layers") and getattr(self, name) > _MOST_LAYERS:
            raise ConfigError(f"{name} is {getattr(self, name)}. Use {_MOST_LAYERS} or fewer.")

    @property
    def head_width(self) -> int:
        """K, the width of an attention head."""
        return self.width // self.heads

    @property
    def projects_embeddings(self) -> bool:
        """Whether a linear layer maps embeddings to hidden states."""
        return self.embedding_width != self.width

    @property
    def embedding_dropout(self) -> float:
        """Dropout rate of embeddings."""
        return self.dropout

    @property
    def normalizes_embeddings(self) -> bool:
        """Whether there is a norm after the sum of the embeddings."""
        return self.type_vocab > 0

    @property
    def ffn_dropout(self) -> float:
        """Dropout rate inside the feed-forward network, at the site `ffn_hidden`."""
        return self.dropout

    @property
    def head_dropout(self) -> float:
        """Dropout rate in a task's head."""
        return self.dropout

    @property
    def attention_scale(self) -> float | None:
        """Factor of the attention scores; None means head_width ** -0.5."""
        return None

    @property
    def norm(self) -> Norm:
        """Whether norms follow each residual sum, or precede each branch (and the head)."""
        return "pre"

    @property
    def norm_kind(self) -> NormKind:
        """Layer normalization, or division by the root mean square (Zhang & Sennrich 2019)."""
        return "layer"

    @property
    def norm_bias(self) -> bool:
        """Whether layer normalization has biases."""
        return True

    @property
    def head_bias(self) -> bool:
        """Whether the dense layer of a language model's head has a bias."""
        return True

    @property
    def position_table(self) -> bool:
        """Whether positions have embeddings; `max_positions` may limit the length without them."""
        return self.max_positions is not None

    @property
    def reads_positions(self) -> bool:
        """Whether layers read `position_columns` in `Context.columns`."""
        return False

    def position_columns(self, positions: Tensor) -> dict[str, Tensor]:
        """What layers read of the positions, int [B, S], once for all of them."""
        return {"positions": positions}

    @property
    def projection_bias(self) -> bool:
        """Whether projections have biases."""
        return True

    @property
    def tied(self) -> bool:
        """Whether the head shares the matrix of the token embeddings."""
        return True

    @property
    def head(self) -> Head:
        """The head: `language_model`, or a task's."""
        return "language_model"

    @property
    def classes(self) -> int:
        """C, the outputs of a task's head."""
        # A score for each choice; one for the first and one for the last token of an answer.
        return {"multiple_choice": 1, "question_answering": 2}.get(self.head, len(self.labels))

    @property
    def predicts(self) -> str:
        """The output of the model's head; see `trainer.models.Outputs`."""
        if self.head != "language_model":
            return self.head
        # A name for each way to attend, so that no objective gets the logits of another way.
        if self.encoder_decoder:
            return "target_tokens"
        if self.prefix_lm:
            return "prefixed_tokens"
        return "next_tokens" if self.causal else "tokens"

    @property
    def causal_outputs(self) -> frozenset[str]:
        """Outputs with causal attention in a model whose other outputs see both directions."""
        return frozenset()

    @property
    def gated(self) -> bool:
        """Whether the feed-forward network multiplies two projections (Shazeer 2020)."""
        return self.activation in ("geglu", "geglu_tanh", "swiglu")

    @property
    def reads(self) -> frozenset[str]:
        """Columns of `Inputs.extra` that the layers read, as `Context.columns`."""
        return frozenset()

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        """Names of the places where a layer applies dropout.

        Their order assigns the random keys, so it must never change.
        """
        return ("attention", "attention_output", "ffn_output")

    @property
    def final_dropout(self) -> bool:
        """Whether there is dropout after the last norm."""
        return False

    @property
    def normal_bound(self) -> float:
        """Truncation of the normal distribution of initial weights, in standard deviations."""
        return WHOLE_NORMAL

    def zero_row(self, name: str) -> int | None:
        """The row of a table that begins with zeros; None: there is none."""
        return None

    @abstractmethod
    def initial_std(self, name: str) -> tuple[float, ...]:
        """Standard deviations of a parameter's initial values.

        One for each of the equally sized matrices stacked in its rows.
        """

    def static(self, index: int) -> Hashable:
        """Identifies the function of layer `index`: layers with equal values compute the same.

        A family with alternating local and global attention returns which one layer `index` has.
        """
        return None

    def build(self) -> Model:
        model = self.build_base()
        if self.peft is not None:
            self.peft.add_to(model)
            # Frozen parameters get no gradient and no optimizer state, and are not in checkpoints.
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self._trains(model, name))
        return model

    def _trains(self, model: Model, name: str) -> bool:
        """Whether a parameter is trained under `peft`."""
        assert self.peft is not None
        if self.peft.owns(name):
            return True
        part, kind = model.role(name)
        if part == "head":
            return self.head != "language_model"  # a task's head is new, a language model's is not
        return self.peft.trains_norms and kind == "norm" and part in ("layer", "shared")

    @abstractmethod
    def build_base(self) -> Model:
        """Builds the module without `peft`."""

    @abstractmethod
    def build_norm(self, width: int | None = None) -> nn.Module:
        """A norm over the last dimension, of the hidden width by default."""

    @abstractmethod
    def build_embeddings(self) -> nn.Module:
        """Input embeddings, called like `trainer.models.layers.embeddings.Embeddings`."""

    @abstractmethod
    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        """Layer `index` of a stack."""

    def build_extras(self) -> Sequence[Extra]:
        """The optional parts, in the order of their parameters in checkpoints."""
        if not self.logit_scale:
            return ()
        from trainer.models.extras.logit_scale import LogitScale

        return (LogitScale(),)

    def build_layers(self) -> Sequence[nn.Module]:
        """The layers of a model with one stack. A module may appear more than once."""
        return [self.build_layer(index) for index in range(self.layers)]

    @abstractmethod
    def build_attention(self, index: int) -> nn.Module:
        """Self-attention of layer `index`: called as attention(hidden, bias, context)."""

    @abstractmethod
    def build_cross_attention(self, index: int) -> nn.Module:
        """Attention to an encoder's output: called as attention(hidden, memory, context)."""

    @abstractmethod
    def build_feed_forward(self, index: int) -> nn.Module:
        """The feed-forward network of layer `index`: called as ffn(hidden, context)."""

    def for_needs(self, needs: Outputs, labels: tuple[str, ...] = ()) -> Self:
        heads: tuple[Head, ...] = (*get_args(TaskHead), "embedding")
        # An objective of a task needs the output of its head; all others need predicted tokens.
        head = next((head for head in heads if head in needs), "language_model")
        # Facts that a family has turned into settings can be changed; the others cannot.
        settings = {field.name for field in fields(self)}
        changes: dict[str, Any] = {"logit_scale": "logit_scale" in needs}
        if "head" in settings:
            changes |= {"head": head, "labels": labels}
        elif head != "language_model":
            raise ConfigError(
                f"a model of kind {kind_name(self)} has no {head} head. Use bert, roberta, t5, "
                "bart, llama, gpt2 or openai_gpt."
            )
        return replace(self, **changes, **self.extras_for(needs))

    def extras_for(self, needs: Outputs) -> dict[str, Any]:
        """The settings with which the family has the extras that an objective needs."""
        return {}

    def without_peft(self) -> Self:
        return replace(self, peft=None)

    def pad_vocabulary(
        self, parameters: Mapping[str, Tensor], size: int
    ) -> tuple[Self, dict[str, Tensor]]:
        name, more = "embeddings.tokens.weight", (0, 0, 0, size - self.vocab_size)
        return replace(self, vocab_size=size), {**parameters, name: F.pad(parameters[name], more)}
