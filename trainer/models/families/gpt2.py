"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from samestep.errors import ConfigError
from trainer.models.config import Activation, Head
from trainer.models.extras import Extra
from trainer.models.families import Family
from trainer.models.heads import LanguageModelHead, TokenHead
from trainer.models.transformer import Transformer


@dataclass(frozen=True)
class Config(Family):
    """GPT-2 small.

    Attributes:
        max_positions: maximum sequence length, in tokens.
        initializer_range: standard deviation of the initial weights; for projections into the
            residual stream it is divided by sqrt(2 * layers), the root of their number.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, from the last position
            of a sequence, its class (`classification`), or a score for choosing among texts
            (`multiple_choice`).
        labels: names of classes; `classification` with a single label is a regression.
    """

    codec: ClassVar[str] = "trainer.models.codecs.gpt2"

    vocab_size: int = 50257
    activation: Activation = "gelu_tanh"
    max_positions: int = 1024
    initializer_range: float = 0.02
    head: Head = "language_model"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_positions")
        if not self.initializer_range > 0:
            raise ConfigError(
                f"initializer_range is {self.initializer_range}. Use a number above 0."
            )
        self.check_heads()
        self.check_task("classification", "multiple_choice")

    @property
    def causal(self) -> bool:
        return True

    @property
    def settings_for(self) -> Mapping[str, str]:
        return {head: f"model.head={head}" for head in ("classification", "multiple_choice")}

    def initial_std(self, name: str) -> tuple[float, ...]:
        into_residual = name.endswith((".attention.out.weight", ".ffn.down.weight"))
        # Radford et al. 2019, section 2.3: two projections per layer add to the residual stream.
        divisor = (2 * self.layers) ** 0.5 if into_residual else 1.0
        return (self.initializer_range / divisor,)

    def build_base(self) -> Transformer:
        if self.head == "language_model":
            return Transformer(self, LanguageModelHead(self))
        head = TokenHead(self.width, self.classes, bias=False)
        return Transformer(self, head, self.build_extras())

    def build_extras(self) -> Sequence[Extra]:
        if self.head == "language_model":
            return ()
        # Fine-tuning may go on predicting tokens (Radford et al. 2018, section 3.2).
        from trainer.models.extras.auxiliary_lm import AuxiliaryLanguageModel

        return (AuxiliaryLanguageModel(self),)
