"""Left-to-right language modelling: each token is predicted from those before it.

With a causal BERT this is the ablation "LTR & No NSP" of Devlin et al. 2019, section 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.objectives import Loss, Objective
from trainer.objectives.rows import Rows, inputs, pack_spec, score_tokens


@dataclass(frozen=True)
class Config:
    """Left-to-right language modelling; needs a model with `causal: true`."""

    def build(self, vocabulary: Vocabulary) -> Objective:
        return CausalLM(vocabulary)


class CausalLM:
    """The left-to-right objective; see `trainer.objectives.Objective`.

    To the rows of `rows.Rows` it adds, for B examples of S cells, of which the first S - 1 predict:
        predicted: int64 [B, S - 1], the cells 0 to S - 2.
        labels: int64 [B, S - 1], the token after each.
        weights: float32 [B, S - 1], 1 where that token is of the same sequence, in an example of weight 1.

    Raises:
        ConfigError: the vocabulary has no [CLS], [SEP] or [PAD].
    """

    model_settings: Mapping[str, bool] = {"causal": True}

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rows = Rows(vocabulary)

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
        return {
            **rows,
            "predicted": np.broadcast_to(np.arange(sequence_length - 1), follows.shape).copy(),
            "labels": rows["tokens"][:, 1:].astype(np.int64),
            "weights": follows * examples.weight[:, None],
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of predictions that count."""
        return {"lm": float(batch["weights"].sum())}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]) -> Loss:
        """Cross-entropy in float32, over the step's number of predictions, totals["lm"]."""
        nll, correct, weight = score_tokens(model(**inputs(batch)), batch)
        return Loss(nll / totals["lm"], {"loss": (nll.detach(), weight), "accuracy": (correct, weight)})
