"""Left-to-right language modelling: each token is predicted from those before it.

With a decoder this is GPT's objective (Radford et al. 2018, 2019). With a causal BERT it is the ablation "LTR & No NSP"
of Devlin et al. 2019, section 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.objectives import Loss, Objective, ObjectiveConfig
from trainer.objectives.rows import Rows, check_z_loss, language_model_loss, pack_spec


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Left-to-right language modelling; needs a model that is causal: gpt2, or bert with `causal: true`.

    Attributes:
        z_loss: coefficient of log(Z)^2, where Z is the softmax's denominator, in the loss; 1e-4 in T5 v1.1.
    """

    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_z_loss(self.z_loss)

    def build(self, vocabulary: Vocabulary) -> Objective:
        return CausalLM(self, vocabulary)


class CausalLM(Objective):
    """The left-to-right objective; see `trainer.objectives.Objective`.

    A sequence is text between [CLS] and [SEP], or where the tokenizer has none between tokens that end a text, as
    GPT-2's <|endoftext|>.

    To the rows of `rows.Rows` it adds, for B examples of S cells, of which the first S - 1 predict:
        predicted: int64 [B, S - 1], the cells 0 to S - 2.
        labels: int64 [B, S - 1], the token after each.
        weights: float32 [B, S - 1], 1 where that token is of the same sequence, in an example of weight 1. The end of
            text that was cut because a row was full does not count.

    Raises:
        ConfigError: the vocabulary has no token that ends a text.
    """

    predicts = "next_tokens"
    needs = frozenset({"next_tokens"})

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        end = vocabulary.end
        if end is None:
            raise ConfigError(
                "left-to-right language modelling needs a tokenizer with [SEP], </s> or <|endoftext|>, to end texts "
                "with; use one made for BERT, RoBERTa, GPT-2 or T5"
            )
        begin = end if vocabulary.cls is None else vocabulary.cls
        self._rows = Rows(begin, end, end if vocabulary.pad is None else vocabulary.pad)
        self.config = config

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As `rows.pack_spec`."""
        return pack_spec(sequence_length)

    def predictions(self, sequence_length: int) -> int:
        """All cells but the last one."""
        return sequence_length - 1

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the pieces out; see the class for the arrays."""
        rows = self._rows.lay_out(examples, sequence_length)
        segments = rows["segments"]
        follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        # A piece that fills an example, or under `concat` is its last, may go on in another one.
        after = examples.column + examples.length
        cut = after == sequence_length - 1
        if examples.isolated:
            cut &= examples.column == 1
        follows[examples.row[cut], sequence_length - 2] = False
        return {
            **rows,
            "predicted": np.broadcast_to(np.arange(sequence_length - 1), follows.shape).copy(),
            "labels": rows["tokens"][:, 1:].astype(np.int64),
            "weights": follows * examples.weight[:, None],
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of predictions that count."""
        return {"lm": float(batch["weights"].sum())}

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """As `rows.language_model_loss`."""
        return language_model_loss(model, self.predicts, batch, totals, self.config.z_loss)
