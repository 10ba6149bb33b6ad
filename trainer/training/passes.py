"""Forward and backward passes over this replica's share of a global batch, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from samestep.errors import DataError
from samestep.examples import HOST_COLUMNS, LoaderState, TaskRow
from trainer.monitoring.meter import Meter
from trainer.objectives import Loss, Objective, OverBatch
from trainer.strategies import Strategy

MicroBatch: TypeAlias = Mapping[str, Tensor]
MicroBatches: TypeAlias = Sequence[MicroBatch]
"""A replica's examples of one step, in host memory."""

Metrics: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""(sum, weight) scalars by name, as in `objectives.Loss`."""


class Gradients(NamedTuple):
    """The result of the passes of a step; the gradients themselves are in the parameters.

    Attributes:
        metrics: of each micro-batch of this replica.
        norm: global, before clipping, as `Strategy.clip_grad_norm` returns it.
    """

    metrics: list[Metrics]
    norm: Tensor


class Loader(Protocol):
    """An iterable over steps; its state is the position of the consumer, not of the prefetcher.

    Attributes:
        examples: number of examples of the split.
        consumed: ranges [first, end) of global examples in the step taken last.
        corrupt: skipped shards: digest of the dataset, name, first global example.
    """

    @property
    def examples(self) -> int: ...
    @property
    def consumed(self) -> Sequence[Sequence[int]]: ...
    @property
    def corrupt(self) -> Sequence[tuple[str, str, int]]: ...
    def __iter__(self) -> Iterator[MicroBatches]: ...
    def state_dict(self) -> LoaderState: ...
    def load_state_dict(
        self, state: LoaderState, step: int | None = None, as_recorded: bool = False
    ) -> None: ...
    def exclude(self, first: int, end: int) -> None:
        """Skips the global examples [first, end) from the next step on."""

    def task_rows(self) -> tuple[list[list[TaskRow]], tuple[str, ...]]:
        """The rows of a task in each dataset of the split, and the task's labels."""

    def error_ahead(self, steps: int) -> DataError | None:
        """Returns the error that one of the next `steps` will raise, if it is known."""

    def close(self) -> None: ...


def evaluation_batches(loader: Loader, global_batch_size: int, batches: int | None) -> int:
    """Returns the number of global batches that `score` takes from a loader."""
    every = -(-loader.examples // global_batch_size)  # rounded up: the last one is smaller
    return min(every, batches or every)


def accumulate_gradients(
    model: nn.Module,
    objective: Objective,
    strategy: Strategy,
    micro_batches: MicroBatches,
    end_section: Callable[[str], None] = lambda section: None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> list[Metrics]:
    """Adds the gradients of a step to the parameters; returns the metrics of each micro-batch.

    Args:
        model: as `strategy.prepare` returns it.
        end_section: records the time since the last call under a section's name.
        all_reduce: of the weights, in place of the strategy's.
    """
    totals = global_weights(objective, strategy, micro_batches, all_reduce)
    end_section("waiting")
    columns = global_columns(model, objective, strategy, micro_batches)
    metrics = []
    for i, (host_batch, own) in enumerate(zip(micro_batches, columns, strict=True)):
        # Gradients are exchanged between replicas once, in the last backward pass of the step.
        with strategy.accumulate(last=i == len(micro_batches) - 1):
            loss = forward(model, objective, strategy, host_batch, totals, own)
            end_section("forward")
            strategy.backward(loss.total)
            end_section("backward")
        metrics.append(loss.metrics)
    return metrics


def means(metrics: Sequence[Metrics], strategy: Strategy) -> dict[str, float]:
    """Returns the means of a step's metrics over all replicas. Collective; waits for the device.

    Args:
        metrics: from `accumulate_gradients`.
    """
    meter = Meter(strategy.accelerator.to_device, is_exact=strategy.exact)
    for each in metrics:
        meter.add(each)
    return meter.compute(strategy.all_reduce)


def loss_and_norm(gradients: Gradients, strategy: Strategy) -> tuple[float, float]:
    """Returns a step's loss over all replicas and its gradient norm. Waits for the device.

    One small collective, two for exact sums. The norm is global already. It is averaged, or the
    largest taken, so that all replicas make the same decision even if one device computed it
    wrongly.
    """
    if strategy.exact:
        meter = Meter(strategy.accelerator.to_device, is_exact=True)
        for each in gradients.metrics:
            meter.add({"loss": each["loss"]})
        total, weight = meter.totals(strategy.all_reduce)["loss"]
        largest = float(strategy.all_reduce(gradients.norm.detach().clone(), "max"))
        return total / weight if weight else total, largest
    loss = torch.stack([torch.stack(each["loss"]) for each in gradients.metrics]).double().sum(0)
    norm = gradients.norm.detach().double().reshape(1)
    mine = torch.cat((loss.detach(), norm))
    total, weight, norm_mean = strategy.all_reduce(mine, "mean").tolist()
    return total / weight if weight else total, norm_mean


def global_weights(
    objective: Objective,
    strategy: Strategy,
    micro_batches: MicroBatches,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Sums each loss term's weight over the global batch, before any forward pass.

    One small collective; the host does not wait for the device.
    """
    weights = [objective.weights(batch) for batch in micro_batches]
    # float32 counts exactly to 2**24 only; a large batch has more predictions.
    by_term = [[found[name] for found in weights] for name in weights[0]]
    all_reduce = all_reduce or strategy.all_reduce
    if strategy.exact:
        from trainer.partition import exact

        each = torch.tensor(by_term, dtype=torch.float64)  # [terms, micro-batches]
        totals = exact.total(all_reduce(exact.split_metric(each).sum(2)))
    else:
        totals = all_reduce(torch.tensor(list(map(sum, by_term)), dtype=torch.float64))
    # 1 where nothing is predicted, as in a tiny batch of words too long to mask: the loss is 0
    # instead of 0 / 0.
    totals = torch.where(totals > 0, totals, 1.0).float()
    totals = totals.to(strategy.accelerator.device, non_blocking=True)
    return dict(zip(weights[0], totals, strict=True))


@torch.no_grad()
def global_columns(
    model: nn.Module, objective: Objective, strategy: Strategy, micro_batches: MicroBatches
) -> list[dict[str, Tensor]]:
    """The columns that an objective adds to each micro-batch from the whole global batch."""
    if not isinstance(objective, OverBatch):
        return [{} for _ in micro_batches]
    found = []
    for host_batch in micro_batches:
        with strategy.autocast():
            found.append(objective.summary(model, on_device(strategy, host_batch)).float())
    rows = strategy.own_rows(objective.over_batch(strategy.all_rows(torch.cat(found))))
    parts = torch.split(rows, [len(part) for part in found])
    return [{"over_batch": part} for part in parts]


def forward(
    model: nn.Module,
    objective: Objective,
    strategy: Strategy,
    host_batch: MicroBatch,
    totals: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
) -> Loss:
    """Runs the forward pass of a micro-batch; its loss terms are divided by the global weights.

    Args:
        own: columns on the device, from `global_columns`.
    """
    batch = {**on_device(strategy, host_batch), **own}
    with strategy.autocast():
        return objective.loss(model, batch, totals)


def on_device(strategy: Strategy, host_batch: MicroBatch) -> Mapping[str, Tensor]:
    """The columns of a micro-batch that are for the device."""
    columns = {name: column for name, column in host_batch.items() if name not in HOST_COLUMNS}
    # Without segments, attention needs no mask and takes its fastest kernel. So they are left out
    # if every row is one sequence. Where graphs are compiled, segments stay: a rank would compile
    # another graph, alone, at its first micro-batch of the rarer kind, and all others would wait.
    if strategy.compiles_layers or strategy.accelerator.compiles:
        return strategy.to_device(columns)
    segments = columns.keys() & {"segments", "target_segments"}
    if all(bool((columns[name] == 1).all()) for name in segments):
        for name in segments:
            del columns[name]
    return strategy.to_device(columns)
