"""Knowledge distillation (Hinton et al. 2015): a model, the student, learns what a trained one, the teacher, predicts.

It is put around the student's own objective, which makes the batches and the scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import Kinds
from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.models import Inputs, Outputs
from trainer.objectives import (
    Loss,
    Objective,
    ObjectiveConfig,
    Predictions,
    Task,
    Taught,
    classification,
)

# Those that score each prediction by itself, so that a student's and its teacher's can be compared.
_KINDS = (
    "causal_lm",
    "classification",
    "mlm",
    "prefix_lm",
    "regression",
    "seq2seq",
    "span_corruption",
    "tagging",
)


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Distillation of a trained model, the teacher, which stays as it is. The loss is a weighted sum of terms.

    Attributes:
        teacher: whose predictions are learnt, as of `init_from`: of the same task and tokenizer. Each device holds the
            whole of it.
        of: the student's own objective: causal_lm, classification, mlm, prefix_lm, regression, seq2seq,
            span_corruption or tagging.
        temperature: T, which logits are divided by in `soft`.
        soft: weight of the Kullback-Leibler divergence of the student's softened predictions from the teacher's, times
            T^2 (Hinton et al. 2015, section 2). 0 for regression.
        hard: weight of the student's own objective, with the labels of the dataset.
        mse: weight of the squared distance of both models' logits, summed over classes (Ba & Caruana 2014).
        cosine: weight of 1 - the cosine of both models' last hidden states in all cells that hold a token (Sanh et al.
            2019); for models of equal width.
        cells: what `soft` and `mse` are taken over: the `predicted` cells, or with mlm `all` that hold a token, which
            takes as many logits (the released code of DistilBERT).
    """

    teacher: str
    of: Annotated[Any, Kinds("trainer.objectives")]
    temperature: float = 2.0
    soft: float = 1.0
    hard: float = 0.0
    mse: float = 0.0
    cosine: float = 0.0
    cells: Literal["predicted", "all"] = "predicted"

    def __post_init__(self) -> None:
        kind = type(self.of).__module__.rpartition(".")[2]
        if kind not in _KINDS:
            raise ConfigError(
                f"of is {kind}, whose predictions cannot be compared; use one of: {', '.join(_KINDS)}"
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature must be above 0, not {self.temperature}; use 1 to leave logits as they are"
            )
        for name in ("soft", "hard", "mse", "cosine"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; use 0 to leave the term out, or a weight above 0"
                )
        if kind == "regression" and self.soft:
            raise ConfigError(
                f"soft is {self.soft:g}, and a regression predicts one number; set soft to 0, and mse to 1"
            )
        if not self.soft and not self.mse:
            raise ConfigError(
                "soft and mse are 0, so that nothing the teacher predicts is learnt; set soft to 1"
            )
        if isinstance(self.of, classification.Config) and self.of.lm_weight:
            raise ConfigError(
                f"of.lm_weight is {self.of.lm_weight}, and tokens are not distilled beside classes; set 0"
            )
        if self.cells == "all" and kind != "mlm":
            raise ConfigError(
                f"cells is all, which is for mlm, and of is {kind}; set cells to predicted"
            )

    @property
    def teacher_path(self) -> str | None:
        return self.teacher

    @property
    def task(self) -> ObjectiveConfig:
        own: ObjectiveConfig = self.of
        return own

    @property
    def compares_hidden(self) -> bool:
        return self.cosine > 0

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        settings = self.task.adapted(missing, offers)
        own = ("objective.cosine=0",) if "hidden" in missing else ()
        return own + tuple(
            setting.replace("objective.", "objective.of.", 1) for setting in settings
        )

    def build(self, vocabulary: Vocabulary) -> Objective:
        objective: Objective = self.of.build(vocabulary)
        if isinstance(objective, Task):
            return TaskDistillation(self, objective)
        return Distillation(self, objective)


class Distillation(Taught):
    """The distillation objective; see `trainer.objectives.Taught`.

    To the batch of the student's own objective it adds, where they are needed, for B examples of S cells that the
    head's stack of layers reads:
        cells: float32 [B, S], 1 for a cell that holds a token, in an example of weight 1; else 0.
    """

    def __init__(self, config: Config, of: Objective) -> None:
        self.config, self.of = config, of
        self.predicts = of.predicts
        self.outputs = frozenset({of.predicts, *(["hidden"] if config.cosine else [])})
        self.needs = of.needs | self.outputs
        self.columns = of.columns
        self._all = config.cells == "all"
        self._teacher: nn.Module | None = None

    def attach(self, teacher: nn.Module) -> None:
        """Takes the teacher, in eval mode and without gradients; `loss` needs it, and nothing else does."""
        self._teacher = teacher

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As the student's own."""
        return self.of.pack_spec(sequence_length)

    def predictions(self, sequence_length: int) -> int:
        """As the student's own, or all."""
        return sequence_length if self._all else self.of.predictions(sequence_length)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """As the student's own, and what is needed of the class's arrays."""
        batch = self.of.collate(examples, sequence_length)
        if self._all or self.config.cosine:
            segments = batch.get("target_segments", batch["segments"])
            batch["cells"] = ((segments != 0) * examples.weight[:, None]).astype(np.float32)
        return batch

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """As the student's own, which comes first, and the number of cells."""
        cells = {"cells": float(batch["cells"].sum())} if "cells" in batch else {}
        return self.of.weights(batch) | cells

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """The weighted sum of the terms, in float32, each over the step's predictions, or its number of cells.

        The metric "loss" is this sum; "hard_loss" is the loss of the student's own objective, whatever its weight, and
        "agreement" the share of predictions whose highest score both models give to the same class.
        """
        assert self._teacher is not None, "a distillation has no loss without a teacher"
        config, own = self.config, next(iter(totals.values()))
        with torch.no_grad():
            taught, taught_states = self._run(self._teacher, batch)
        logits, states = self._run(model, batch)
        weights, count = batch["weights"].view(len(logits), -1), own
        if self._all:
            weights, count = batch["cells"], totals["cells"]
        total, metrics = torch.zeros((), device=logits.device), {}

        def add(
            name: str, coefficient: float, each: Tensor, weights: Tensor, count: Tensor
        ) -> None:
            nonlocal total
            term = (each * weights).sum()
            metrics[name] = (term.detach(), weights.sum())
            total = total + coefficient * term / count

        if config.soft:
            add(
                "soft_loss",
                config.soft,
                soft_loss(logits, taught, config.temperature),
                weights,
                count,
            )
        if config.mse:
            add(
                "mse",
                config.mse,
                (logits.float() - taught.float()).square().sum(-1),
                weights,
                count,
            )
        if config.cosine:
            distance = 1 - F.cosine_similarity(states.float(), taught_states.float(), dim=-1)
            add("cosine_loss", config.cosine, distance, batch["cells"], totals["cells"])
        if logits.shape[-1] > 1:
            same = (logits.detach().argmax(-1) == taught.argmax(-1)) * weights
            metrics["agreement"] = (same.sum(), weights.sum())

        # The last to read the logits, since cross-entropy may overwrite them.
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.hard > 0):
            known = _at(logits, batch["predicted"]) if self._all else logits
            hard = self.of.loss(_Known({self.predicts: known}), batch, totals)
        if config.hard:
            total = total + config.hard * hard.total
        own_metrics = {
            "hard_loss" if name == "loss" else name: metric for name, metric in hard.metrics.items()
        }
        # Its denominators differ; so weighted, the micro-batches of a step add up to the loss of the step.
        whole = {"loss": (total.detach() * own, hard.metrics["loss"][1])}
        return Loss(total, whole | metrics | own_metrics, hard.outputs)

    def _run(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The logits of a model, [B, P, C] or [B, S, C]; and hidden states [B, S, D], nothing where none are needed."""
        given = Inputs.of(batch)
        if self._all:
            given = replace(given, predicted=None)
        found = model(given, self.outputs)
        return found[self.predicts], found.get("hidden", torch.empty(0))


class TaskDistillation(Distillation, Task):
    """Distillation for a `trainer.objectives.Task`, with its scores."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """As the student's own."""
        return cast(Task, self.of).score_names

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """As the student's own."""
        return cast(Task, self.of).scores(predictions)

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """As the student's own."""
        return cast(Task, self.of).row_predictions(predictions)


class _Known(nn.Module):
    """Stands in for a model whose outputs are known."""

    def __init__(self, outputs: dict[str, Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, _inputs: Inputs, _outputs: Outputs) -> dict[str, Tensor]:
        return self._outputs


def soft_loss(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T^2 times the Kullback-Leibler divergence of softened predictions from the teacher's: [B, P, C] -> [B, P].

    Its gradient is that of Hinton et al.'s cross-entropy, and it is 0 where both agree.
    """
    log_probabilities, log_taught = (
        F.log_softmax(each.float() / temperature, dim=-1) for each in (logits, taught)
    )
    divergence = F.kl_div(log_probabilities, log_taught, reduction="none", log_target=True)
    return divergence.sum(-1) * temperature**2


def _at(logits: Tensor, cells: Tensor) -> Tensor:
    """Those of some cells, int64 [B, P]: [B, S, V] -> [B, P, V]."""
    first = torch.arange(len(cells), device=cells.device)[:, None] * logits.shape[1]
    return logits.flatten(0, 1).index_select(0, (first + cells).flatten()).view(*cells.shape, -1)
