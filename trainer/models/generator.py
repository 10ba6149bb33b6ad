"""A model beside a small generator, which replaces some of the tokens that it reads (ELECTRA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

from torch import Tensor, nn

from trainer.models import Outputs, Start, Stored
from trainer.models.base import matrix_flops
from trainer.models.config import Activation, TransformerConfig
from trainer.models.extras import Extra
from trainer.models.inputs import Inputs
from trainer.models.layers.dropout import split_key
from trainer.models.layers.layer import activate
from trainer.models.sampling import sample
from trainer.models.transformer import Transformer

GENERATOR = "generator."
"""Prefix of the generator's parameters; all others are the main model's, or shared."""
PRETRAINING = (GENERATOR, "copy_head.")
"""Prefixes of parameters that neither fine-tuning nor other libraries use."""
FIRST = frozenset({"tokens", "sampled"})
"""Outputs of the generator."""


class HasGenerator(Protocol):
    """Further members of the configuration of a model with a generator.

    Attributes:
        generator_setting: the setting that decides whether there is one; 0: none.
    """

    generator_setting: str

    def build_generator(self) -> Transformer | None: ...


class ReplacedTokenHead(nn.Module):
    """Scores each position: dense, activation, one number."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        # Never gated: the gate would halve the width that `out` reads.
        self.activation: Activation = "gelu" if config.gated else config.activation
        self.dense = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, 1)

    def forward(self, hidden: Tensor, _embedding: Tensor, _key: Tensor | None = None) -> Tensor:
        """[B, S, D] -> logits [B, S] that the token was replaced."""
        logits: Tensor = self.out(activate(self.dense(hidden), self.activation))
        return logits[..., 0]


class Discriminator(Transformer):
    """The discriminator with the head of a task, or a generator alone."""

    def start_from(self, stored: Stored) -> Start:
        start = super().start_from(stored)
        unused = {name for name in stored.shapes if name.startswith(PRETRAINING)}
        return replace(start, unused=start.unused | unused)


class WithGenerator(Discriminator):
    """The main model, and in pre-training the generator.

    With the output `sampled`, int64 [B, P], tokens at the predicted positions are replaced by
    samples from the generator before the main model reads them. Without it, both read the tokens
    as they are: `tokens` fills masks, `replaced` judges a text, `layer.N` are features.

    Attributes:
        generator: None without one.
    """

    def __init__(
        self, config: TransformerConfig, head: nn.Module, extras: Sequence[Extra] = ()
    ) -> None:
        super().__init__(config, head, extras)
        own = cast(HasGenerator, config)
        self.generator = own.build_generator()
        if self.generator is not None:
            self.offers |= FIRST
            self.trains = {**self.trains, "tokens": f"model.{own.generator_setting}=0"}

    def reads_for(self, outputs: Outputs) -> frozenset[str]:
        own = {"sample_key"} if "sampled" in outputs else set()
        return super().reads_for(outputs) | own

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if not outputs.isdisjoint(FIRST):
            assert self.generator is not None, "the model was built without a generator"
            # With one key, both models would drop the same elements of their shared embeddings.
            keys = None if inputs.dropout_key is None else split_key(inputs.dropout_key, 2)
            first = inputs if keys is None else replace(inputs, dropout_key=keys[0])
            found = self.generator(first, frozenset({"tokens"}))
            if "sampled" in outputs:
                logits = found["tokens"]  # samples need them: objectives set no target for these
                assert inputs.predicted is not None, "samples replace predicted positions"
                at = inputs.predicted.long()
                found["sampled"] = sample(logits, inputs.extra["sample_key"], at)
                # Unused entries are position 0, [CLS], which stays.
                kept = inputs.tokens.gather(1, at).long()
                new = found["sampled"].where(at > 0, kept).to(inputs.tokens.dtype)
                tokens = inputs.tokens.scatter(1, at, new)
                key = inputs.dropout_key if keys is None else keys[1]
                # All positions are judged, unless only the replaced tokens are predicted.
                only = "original" in outputs and "copied" not in outputs
                at_positions = inputs.predicted if only else None
                inputs = replace(inputs, tokens=tokens, predicted=at_positions, dropout_key=key)
        rest = outputs - FIRST
        return found | self.main(inputs, rest) if rest else found

    def main(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """The outputs of the main model."""
        return super().forward(inputs, outputs)

    def start_from(self, stored: Stored) -> Start:
        start = super().start_from(stored)
        if self.generator is None:
            return start
        unused = frozenset(name for name in start.unused if not name.startswith(PRETRAINING))
        return replace(start, unused=unused)

    def head_flops(self) -> int:
        if self.config.predicts != "replaced":
            return super().head_flops()
        return matrix_flops(self.head)

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """Both models; the main one predicts at every position, unless only replaced tokens."""
        only = self.config.predicts == "original" and "copied" not in self.offers
        own = super().flops_per_token(sequence_length, predicted_per_token if only else 1.0)
        if self.generator is None:
            return own
        return own + self.generator.flops_per_token(sequence_length, predicted_per_token)
