"""The shape of a Transformer, which every part of one is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from trainer.config import Kinds
from trainer.errors import ConfigError

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "geglu", "geglu_tanh"]
Norm: TypeAlias = Literal["post", "pre"]
Head: TypeAlias = Literal["language_model", "classification", "multiple_choice", "tagging", "question_answering"]

FEWEST_LABELS: dict[Head, int] = {"classification": 1, "tagging": 2}
"""Of the heads that have an output for each label."""


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and regularisation that all families have; each adds its own and sets its defaults.

    What is a property here is a fact about a family; some families make a setting of it.

    Attributes:
        position_offset: rows at the start of the position table that stay unused (RoBERTa); not a setting.
        vocab_size: rows of the token table; at least the tokenizer's size. A multiple of 64 is quicker on GPUs.
        layers: number of layers.
        width: D, of the hidden states.
        heads: H, attention heads of width / heads each.
        ffn_width: inner width of the feed-forward network.
        dropout: probability for embeddings and the output of each branch.
        attention_dropout: probability for attention probabilities; 0 allows the fused attention kernels in training.
        norm_eps: added to the variance in norms.
        activation: of the feed-forward network.
        peft: parameter-efficient fine-tuning (a module of trainer/models/peft): what is added to a model that starts
            from weights, and trained with a task's head, while the rest is frozen; None trains all.
    """

    position_offset: ClassVar[int] = 0

    vocab_size: int
    layers: int = 12
    width: int = 768
    heads: int = 12
    ffn_width: int = 3072
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-5
    activation: Activation = "gelu"
    peft: Annotated[Any, Kinds("trainer.models.peft")] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "ffn_width"):
            self.check_positive(name)
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps must be above 0, not {self.norm_eps}")

    def check_heads(self) -> None:
        """Refuses a width that heads of width / heads each do not fill."""
        if self.width % self.heads:
            divisors = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            nearest = min(divisors, key=lambda heads: abs(heads - self.heads))
            raise ConfigError(f"width {self.width} is not a multiple of heads {self.heads}; use heads={nearest}")

    def check_task(self, *heads: Head) -> None:
        """Refuses a task's head that is none of these, which the family has, and labels that do not go with it."""
        if self.head not in ("language_model", *heads):
            raise ConfigError(
                f"head is {self.head}, and models of this kind have heads for {', '.join(heads)} only; use one of "
                "these, or another kind of model, as bert"
            )
        fewest, count = FEWEST_LABELS.get(self.head), len(self.labels)
        if fewest is None and count:
            raise ConfigError(
                f"a {self.head} head has no labels, and labels is {list(self.labels)}; leave labels empty, or set head "
                "to classification or tagging"
            )
        if fewest is not None and count < fewest:
            raise ConfigError(
                f"labels must name at least {fewest} for a {self.head} head, not {count}; set labels to those of the "
                "dataset"
            )
        twice = [label for label in self.labels if self.labels.count(label) > 1]
        if twice:
            raise ConfigError(f"labels must differ, and {twice[0]!r} is among them {twice.count(twice[0])} times")

    def check_positive(self, name: str) -> None:
        """Refuses a setting below 1."""
        if getattr(self, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def head_width(self) -> int:
        """K, the width of an attention head."""
        return self.width // self.heads

    @property
    def attention_scale(self) -> float | None:
        """What the products of queries and keys are multiplied by; None is head_width ** -0.5."""
        return None

    @property
    def norm(self) -> Norm:
        """Whether norms follow each residual sum, or precede each branch (and follow the last layer)."""
        return "pre"

    @property
    def rms_norm(self) -> bool:
        """Whether norms only scale (Zhang & Sennrich 2019), and projections have no biases."""
        return False

    @property
    def causal(self) -> bool:
        """Whether a token attends to those before it only (a left-to-right language model)."""
        return False

    @property
    def tied(self) -> bool:
        """Whether the head shares the matrix of the token embeddings."""
        return True

    @property
    def head(self) -> Head:
        """What the head predicts: tokens, or what a task asks for."""
        return "language_model"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes or tags that a task's head tells apart."""
        return ()

    @property
    def classes(self) -> int:
        """C, the outputs of a task's head."""
        return {"multiple_choice": 1, "question_answering": 2}.get(self.head, len(self.labels))

    @property
    def decoder(self) -> bool:
        """Whether a decoder reads the sequences: of all their cells, only the last has seen the whole of one."""
        return self.causal

    @property
    def trains_head(self) -> bool:
        """Whether the head is trained whatever `peft` freezes: a task's is new."""
        return self.head != "language_model"

    @property
    def virtual_tokens(self) -> int:
        """n, the positions before a text's first that `peft` takes for a prefix or prompt."""
        return getattr(self.peft, "length", 0)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward network multiplies two projections (Shazeer 2020, "GLU variants")."""
        return self.activation.startswith("geglu")

    @property
    def dropout_places(self) -> int:
        """Where a layer applies dropout, so many of: attention probabilities, attention output, feed-forward output,
        inside the feed-forward network, cross-attention probabilities, cross-attention output.
        """
        return 3

    @property
    def final_dropout(self) -> bool:
        """Whether there is dropout after the last norm."""
        return False

    @property
    def normal_bound(self) -> float:
        """Standard deviations at which the normal distribution of initial weights ends."""
        return 8.0  # beyond which there is nothing left in fp64

    def initial_std(self, name: str) -> tuple[float, ...]:
        """Standard deviations of a parameter's initial values: of its rows, cut into as many equal parts."""
        raise NotImplementedError

    def build(self) -> Any:
        """Makes the module; its parameters still need their values. Those that are frozen require no gradient.

        Raises:
            ConfigError: the model has nothing that `peft` names.
        """
        model = self.build_base()
        if self.peft is not None:
            self.peft.add_to(model)
            for name, parameter in model.named_parameters():
                of_head = self.trains_head and name.startswith("head.")
                parameter.requires_grad_(of_head or self.peft.trains(name))
        return model

    def build_base(self) -> Any:
        """Makes the module without what `peft` adds."""
        raise NotImplementedError
