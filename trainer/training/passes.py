"""Forward and backward passes over this replica's part of a global batch, which comes in micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from trainer.examples import HOST_COLUMNS, LoaderState, TaskRow
from trainer.monitoring.meter import Meter
from trainer.objectives import Objective, Predictions, Task
from trainer.objectives.predictions import Gatherer
from trainer.strategies import Strategy

MicroBatches: TypeAlias = Sequence[Mapping[str, Tensor]]
Metrics: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""(sum, weight) scalars by name, as in `objectives.Loss`."""


class Gradients(NamedTuple):
    """What is known of a step's gradients, which the parameters hold.

    Attributes:
        metrics: of each micro-batch of this replica.
        norm: global, before clipping, as `Strategy.clip_grad_norm` returns it.
    """

    metrics: list[Metrics]
    norm: Tensor


class Loader(Protocol):
    """An iterable over steps, whose state is where the consumer stands.

    Attributes:
        examples: of one pass over the split.
        fed: the examples of its last step.
        corrupt: the shards that it passes over: digest of the dataset, name, first global example.
    """

    @property
    def examples(self) -> int: ...
    @property
    def consumed(self) -> Sequence[Sequence[int]]: ...
    @property
    def corrupt(self) -> Sequence[tuple[str, str, int]]: ...
    def __iter__(self) -> Iterator[MicroBatches]: ...
    def state_dict(self) -> LoaderState: ...
    def load_state_dict(self, state: LoaderState) -> None: ...
    def exclude(self, first: int, end: int) -> None: ...
    def task_rows(self) -> tuple[list[list[TaskRow]], tuple[str, ...]]: ...
    def close(self) -> None: ...


class Evaluation(NamedTuple):
    """What an evaluation gave.

    Attributes:
        scores: means by name, and a task's scores, or else the perplexity of the predicted tokens.
        predictions: that the scores of a `Task` are of; None for other objectives.
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
) -> Evaluation:
    """Scores a model over the batches of a loader, which it closes.

    Args:
        model: as `strategy.prepare` returns it; left in eval mode.
        objective: what it is scored by.
        strategy: that of the model.
        loader: whose batches; this replica's part of them.
        batches: how many global batches to take; None takes all.
        work: the name of this for `Accelerator.graph`.
    """
    model.eval()
    meter = Meter(strategy.accelerator.to_device)
    gatherer = Gatherer(loader.examples)
    for micro_batches in itertools.islice(loader, batches):
        with strategy.accelerator.graph(work):
            totals = _totals(objective, strategy, micro_batches)
            for host_batch in micro_batches:
                batch = _to_device(strategy, host_batch)
                with strategy.autocast():
                    loss = objective.loss(model, batch, totals)
                meter.add(loss.metrics)
                if loss.outputs is not None:
                    gatherer.add(host_batch, strategy.keep_rows(loss.outputs))
    loader.close()
    with strategy.accelerator.graph(f"metrics of {work}"):
        means = meter.compute(strategy.all_reduce)
    if isinstance(objective, Task):
        predictions = gatherer.predictions(
            strategy.rows_on_host, strategy.all_reduce, *loader.task_rows()
        )
        return Evaluation(means | objective.scores(predictions), predictions)
    # Where another task is part of the loss, or a teacher.
    of_tokens = next(means[name] for name in ("mlm_loss", "hard_loss", "loss") if name in means)
    return Evaluation({**means, "perplexity": math.exp(min(of_tokens, 700.0))})


def accumulate_gradients(
    model: nn.Module,
    objective: Objective,
    strategy: Strategy,
    micro_batches: MicroBatches,
    lap: Callable[[str], None] = lambda name: None,
) -> list[Metrics]:
    """Runs forward and backward passes over this replica's rows of a global batch; returns each one's metrics.

    Args:
        model: as `strategy.prepare` returns it.
        objective: what is predicted.
        strategy: that of the model.
        micro_batches: this replica's part of the batch.
        lap: is told what the time since it was last told has gone into.
    """
    totals = _totals(objective, strategy, micro_batches)
    lap("waiting")
    metrics = []
    for i, host_batch in enumerate(micro_batches):
        batch = _to_device(strategy, host_batch)
        with strategy.accumulate(last=i == len(micro_batches) - 1):
            with strategy.autocast():
                loss = objective.loss(model, batch, totals)
            lap("forward")
            strategy.backward(loss.total)
            lap("backward")
        metrics.append(loss.metrics)
    return metrics


@torch.no_grad()
def score_each(
    model: nn.Module, objective: Objective, strategy: Strategy, micro_batches: MicroBatches
) -> list[tuple[float, float]]:
    """The loss of each micro-batch of a step as (sum, weight), with the step's denominators and the model as it is."""
    totals = _totals(objective, strategy, micro_batches)
    found = []
    for host_batch in micro_batches:
        batch = _to_device(strategy, host_batch)
        with strategy.autocast():
            total, weight = objective.loss(model, batch, totals).metrics["loss"]
        found.append((float(total), float(weight)))
    return found


def step_numbers(gradients: Gradients, strategy: Strategy) -> tuple[float, float]:
    """The loss of a step over all replicas, and its gradient norm: one small collective. Waits for the device.

    All replicas' norms are averaged: they decide alike even if a device of one has gone wrong.
    """
    loss = torch.stack([torch.stack(each["loss"]) for each in gradients.metrics]).double().sum(0)
    norm = gradients.norm.detach().double().reshape(1)
    total, weight, norm_mean = strategy.all_reduce(
        torch.cat((loss.detach(), norm)), "mean"
    ).tolist()
    return total / weight if weight else total, norm_mean


def _totals(
    objective: Objective, strategy: Strategy, micro_batches: MicroBatches
) -> dict[str, Tensor]:
    """Each loss term's weight over the whole global batch; one small collective, no wait for the device."""
    sums: dict[str, float] = {}
    for batch in micro_batches:
        for name, weight in objective.weights(batch).items():
            sums[name] = sums.get(name, 0.0) + weight
    totals = strategy.all_reduce(
        torch.tensor(list(sums.values()), dtype=torch.float64)
    )  # float32 counts to 2**24
    # Where nothing is predicted, as in a tiny batch of words too long to mask, the loss is 0 and not 0 / 0.
    totals = totals.clamp_(min=1).float().to(strategy.accelerator.device, non_blocking=True)
    return dict(zip(sums, totals, strict=True))


def _to_device(strategy: Strategy, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies what the device needs; without segments where each row is one, so that attention needs no mask.

    (Where graphs are compiled, they must not depend on that.)
    """
    columns = {name: column for name, column in batch.items() if name not in HOST_COLUMNS}
    segments = columns.keys() & {"segments", "target_segments"}
    if not strategy.accelerator.compiles and all(
        bool((columns[name] == 1).all()) for name in segments
    ):
        columns = {name: column for name, column in columns.items() if name not in segments}
    return strategy.to_device(columns)
