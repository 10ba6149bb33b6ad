"""Replaced-token detection: ELECTRA's objective (Clark et al. 2020, section 2).

A generator predicts masked tokens, samples from it replace them, and the model says for every token
whether it is the original one. A sample that happens to be the original token counts as original.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from samestep.hashing import combine, name_key
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, Objective, Tensors
from trainer.objectives.kinds import mlm
from trainer.objectives.rows import score_output, token_target

_SAMPLE = name_key("replaced_tokens.sample")


@dataclass(frozen=True)
class Config(mlm.Config):
    """Replaced-token detection with a generator. Masks as in ELECTRA's code.

    Attributes:
        generator_weight: factor of the generator's masked-language-modeling loss.
        discriminator_weight: factor of the discriminator's loss (50 in the paper).
        masked_only: whether only masked positions count in the discriminator's loss ("ELECTRA 15%"
            in section 3.4).
    """

    replace_mask: float = 0.85
    replace_random: float = 0.0
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    masked_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generator_weight", "discriminator_weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use a number above 0.")

    def build(self, vocabulary: Vocabulary) -> Objective:
        return ReplacedTokens(self, vocabulary)


class ReplacedTokens(mlm.MaskedLM):
    """The weighted sum of two losses, each a mean over its own predictions.

    To a batch of `mlm.MaskedLM` it adds, for B examples of S positions:
        sample_key: int32 [B], the key of the samples.
        real_weights: float32 [B, S], 1 for a token that counts, 0 for padding; with `masked_only`,
            0 for tokens that are not masked.

    Attributes:
        main: name of the second loss.
    """

    predicts = "replaced"
    main = "rtd_loss"
    needs = frozenset({"tokens", "sampled", "replaced"})
    columns = frozenset({"sample_key"})
    config: Config

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = super().collate(examples, sequence_length)
        # Another key than the masks', but from the same example: new samples in each epoch.
        key = combine(examples.key, _SAMPLE)
        real = np.not_equal(batch["segments"], 0) * examples.weight[:, None]
        if self.config.masked_only:
            # Unused entries write 0 at position 0, [CLS], which is never predicted.
            real = np.zeros_like(real)
            np.put_along_axis(real, batch["predicted"].astype(np.int64), batch["weights"], 1)
        return {
            **batch,
            "sample_key": (key >> np.uint64(32)).astype(np.uint32).view(np.int32),
            "real_weights": real,
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        return {**super().weights(batch), "rtd": float(batch["real_weights"].sum())}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The weighted sum of both losses in float32, each over its predictions in the step."""
        outputs = model(Inputs.of(batch), self.needs)
        config, weights, real = self.config, batch["weights"], batch["real_weights"]
        tokens = score_output(outputs, "tokens", token_target(batch))
        # In the words of the paper: a sample that is the original token counts as original.
        changed = (outputs["sampled"] != batch["labels"]) * weights
        # fp32: with a weight of 50, bf16 would lose the small losses of easy tokens.
        logits = outputs["replaced"].float()
        # Unused entries write 0 at position 0, [CLS], which is never predicted.
        replaced = torch.zeros_like(logits).scatter(1, batch["predicted"].long(), changed)
        nll = F.binary_cross_entropy_with_logits(logits, replaced, reduction="none")
        rtd_nll, count = (nll * real).sum(), real.sum()
        correct = ((logits.detach() > 0) == (replaced > 0)) * real
        total = config.generator_weight * tokens.loss / totals["mlm"]
        total = total + config.discriminator_weight * rtd_nll / totals["rtd"]
        metrics = {
            # As in `mlm_nsp`: a sum over predictions whose mean is the step's loss.
            "loss": (total.detach() * totals["mlm"], tokens.weight),
            "mlm_loss": (tokens.nll, tokens.weight),
            "rtd_loss": (rtd_nll.detach(), count),
            "accuracy": (tokens.correct, tokens.weight),
            "rtd_accuracy": (correct.sum(), count),
            "replaced": (changed.sum(), tokens.weight),
        }
        return Loss(total, metrics)

    def terms(self) -> Mapping[str, float]:
        config = self.config
        return {"mlm_loss": config.generator_weight, self.main: config.discriminator_weight}
