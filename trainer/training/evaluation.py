"""Scores a model on held-out batches, and each micro-batch of a step."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn

from samestep.progress import Progress
from trainer.monitoring.meter import Meter
from trainer.objectives import Objective, Predictions, Task
from trainer.objectives.predictions import Gatherer
from trainer.strategies import Strategy
from trainer.training.passes import Loader, MicroBatches, forward, global_columns, global_weights


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
        scores: means by name, plus the scores of a task, or else the perplexity.
        predictions: the basis of a `Task`'s scores; None for other objectives.
    """

    scores: dict[str, float]
    predictions: Predictions | None = None


@torch.no_grad()
def score(
    model: nn.Module,
    objective: Objective,
    strategy: Strategy,
    loader: Loader,
    batches: int | None,
    work: str = "evaluation",
    progress: Progress | None = None,
) -> Evaluation:
    """Scores a model on the batches of a loader, and closes the loader. Collective.

    Args:
        model: as `strategy.prepare` returns it; left in eval mode.
        batches: number of global batches; None takes all.
        work: name for `Accelerator.graph`.
        progress: counts the batches; None shows nothing.
    """
    model.eval()
    meter = Meter(strategy.accelerator.to_device, is_exact=strategy.exact)
    gatherer = Gatherer(loader.examples)
    chosen = itertools.islice(loader, batches)
    for micro_batches in chosen if progress is None else progress.track(chosen):
        with strategy.accelerator.graph(work):
            totals = global_weights(objective, strategy, micro_batches)
            columns = global_columns(model, objective, strategy, micro_batches)
            for host_batch, own in zip(micro_batches, columns, strict=True):
                loss = forward(model, objective, strategy, host_batch, totals, own)
                meter.add(loss.metrics)
                if loss.outputs is not None:
                    gatherer.add(host_batch, strategy.keep_rows(loss.outputs))
    loader.close()
    with strategy.accelerator.graph(f"metrics of {work}"):
        means = meter.compute(strategy.all_reduce)
    if means:  # none if nothing was predicted
        means["loss"] = objective.loss_of(means)
    if isinstance(objective, Task):
        predictions = gatherer.predictions(
            strategy.rows_on_host, strategy.all_reduce, *loader.task_rows()
        )
        return Evaluation(means | objective.scores(predictions), predictions)
    # Perplexity is of the predicted tokens only. `loss` also holds the loss of another task (next
    # sentence prediction) or of a teacher, if there is one; the token loss has its own name then.
    names = [name for name in ("mlm_loss", "hard_loss", "loss") if name in means]
    if not names:  # no position of the held-out documents was predicted
        return Evaluation(means)
    token_loss = means[names[0]]
    return Evaluation({**means, "perplexity": math.exp(min(token_loss, 700.0))})


@torch.no_grad()
def score_each(
    model: nn.Module, objective: Objective, strategy: Strategy, micro_batches: MicroBatches
) -> list[tuple[float, float]]:
    """Returns the loss of each micro-batch of a step as (sum, weight), with the step's weights.

    The model's mode (train or eval) stays as it is.
    """
    totals = global_weights(objective, strategy, micro_batches)
    columns = global_columns(model, objective, strategy, micro_batches)
    found = []
    for host_batch, own in zip(micro_batches, columns, strict=True):
        loss = forward(model, objective, strategy, host_batch, totals, own)
        total, weight = loss.metrics["loss"]
        found.append((float(total), float(weight)))
    return found
