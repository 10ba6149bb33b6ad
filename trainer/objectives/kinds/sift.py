"""Scale-invariant fine-tuning (He et al. 2021, section 4): predictions that bear small noise.

A form of virtual adversarial training (Miyato et al. 2018; Jiang et al. 2020): the model should
predict the same where noise is added to the embeddings, in the direction that changes predictions
most. The embeddings are normalized first, so the noise has the same size for all tokens and models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.config import Kinds, kind_name
from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from trainer.models import Model, Outputs
from trainer.models.inputs import Inputs
from trainer.models.sampling import normal
from trainer.objectives import Loss, ObjectiveConfig, Task, Tensors, adapted_inside
from trainer.objectives.around import AroundTask
from trainer.objectives.class_weights import ClassLossConfig
from trainer.objectives.task_rows import PairConfig

_KINDS = ("classification", "regression", "tagging")
_SCALE = 2.0**10  # of the gradient of the noise, most of which would be 0 in fp16


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """A task with a second loss, the change of its predictions under noise. A step takes three
    forward and two backward passes.

    Attributes:
        of: the task's own objective: classification, regression or tagging.
        weight: factor of the second loss.
        noise: standard deviation of the noise at first, in normalized embeddings.
        step: the noise moves by this much in the direction that changes predictions most.
    """

    of: Annotated[Any, Kinds("trainer.objectives.kinds")]
    weight: float = 1.0
    noise: float = 1e-2
    step: float = 1e-4

    def __post_init__(self) -> None:
        kind = kind_name(self.of)
        if kind not in _KINDS:
            raise ConfigError(
                f"of is {kind}, which sift does not support. Use one of {', '.join(_KINDS)}."
            )
        if isinstance(self.of, PairConfig) and self.of.both_orders:
            raise ConfigError(
                "of.both_orders is true, and sift adds noise to one sequence a row. Set it to "
                "false."
            )
        if isinstance(self.of, ClassLossConfig) and self.of.class_weights is not None:
            raise ConfigError(
                "of.class_weights is set, and the second loss of sift is of all rows alike. Leave "
                "it out."
            )
        for name in ("weight", "noise", "step"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use a number above 0.")

    @property
    def task(self) -> ObjectiveConfig:
        own: ObjectiveConfig = self.of
        return own

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        return adapted_inside(self.task, missing, offers)

    def build(self, vocabulary: Vocabulary) -> Task:
        return Sift(self, self.of.build(vocabulary))


class Sift(AroundTask):
    """Adds the second loss to a task's objective, which makes the batches and the scores."""

    def __init__(self, config: Config, of: Task) -> None:
        super().__init__(of)
        self.config = config
        self.needs = of.needs | {"inputs.noise"}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The task's loss plus `weight` times the mean divergence; evaluations have the former.

        The metric "loss" is the sum, "task_loss" the task's own.
        """
        clean = _Remembered(model, self.predicts)
        own = self.of.loss(clean, batch, totals)
        if not torch.is_grad_enabled():
            return own
        noise = self._noise(model, clean)
        # From the clean prediction, a second gradient reaches the weights.
        logits = model(replace(clean.inputs, noise=noise), clean.outputs)[self.predicts]
        change = self._divergence(logits, clean.logits, batch["weights"])
        total = own.total + self.config.weight * change / totals[self.denominator]
        weight = batch["weights"].sum()
        metrics = {
            **own.metrics,
            "loss": (total.detach() * totals[self.denominator], weight),
            "task_loss": own.metrics["loss"],
            "sift_loss": (change.detach(), weight),
        }
        return Loss(total, metrics, own.outputs)

    def loss_of(self, means: Mapping[str, float]) -> float:
        if "sift_loss" not in means:  # of an evaluation
            return self.of.loss_of(means)
        own = self.of.loss_of({**means, "loss": means["task_loss"]})
        return own + self.config.weight * means["sift_loss"]

    def _noise(self, model: nn.Module, clean: _Remembered) -> Tensor:
        """Noise in the direction in which predictions change: float [B, S, E]."""
        config, inputs = self.config, clean.inputs
        inner = next(each for each in model.modules() if isinstance(each, Model))
        key = inputs.dropout_key
        assert key is not None, "training batches have dropout keys"
        shape = (inputs.tokens.shape[1], inner.config.embedding_width)
        noise = normal(key, shape, config.noise).requires_grad_()
        logits = model(replace(inputs, noise=noise), clean.outputs)[self.predicts]
        ones = torch.ones(logits.shape[:2], device=logits.device)
        change = self._divergence(logits, clean.logits.detach(), ones)
        # The gradient of the noise alone: gradients of weights stay as they are.
        (slope,) = torch.autograd.grad(change * _SCALE, noise)
        slope = slope / _SCALE
        # The step is relative to the largest element of a position, as in the released code.
        largest = slope.abs().amax(-1, keepdim=True)
        return noise.detach() + config.step * slope / (largest + 1e-6)

    def _divergence(self, logits: Tensor, clean: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of divergences of [B, P, C] predictions, a scalar in float32."""
        noisy, clean = logits.float(), clean.float()
        if logits.shape[-1] == 1:
            each = (noisy - clean)[..., 0].square()
        else:
            each = _symmetric_divergence(noisy.log_softmax(-1), clean.log_softmax(-1))
        return (each * weights.view(len(each), -1)).sum()


class _Remembered(nn.Module):
    """Runs a model, and keeps what it has read and predicted."""

    inputs: Inputs
    outputs: Outputs
    logits: Tensor

    def __init__(self, model: nn.Module, predicts: str) -> None:
        super().__init__()
        self._model, self._predicts = (model,), predicts

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._model[0](inputs, outputs)
        self.inputs, self.outputs, self.logits = inputs, outputs, found[self._predicts]
        return found


def _symmetric_divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) + KL(second || first) of log-probabilities: [..., C] -> [...]."""
    there = F.kl_div(first, second, reduction="none", log_target=True)
    back = F.kl_div(second, first, reduction="none", log_target=True)
    return (there + back).sum(-1)
