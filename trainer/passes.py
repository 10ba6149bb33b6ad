"""Forward and backward passes over this replica's part of a global batch, which comes in micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from trainer.examples import HOST_COLUMNS
from trainer.monitoring.meter import Meter
from trainer.objectives import Objective
from trainer.strategies import Strategy

MicroBatches: TypeAlias = Sequence[Mapping[str, Tensor]]


class Loader(Protocol):
    """An iterable over steps, whose state is where the consumer stands."""

    def __iter__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


@torch.no_grad()
def score(
    model: nn.Module, objective: Objective, strategy: Strategy, loader: Loader, batches: int | None
) -> dict[str, float]:
    """Scores a model: means over the batches of a loader, which it closes, and the loss as perplexity.

    Args:
        model: as `strategy.prepare` returns it; left in eval mode.
        objective: what it is scored by.
        strategy: that of the model.
        loader: whose batches; this replica's part of them.
        batches: how many global batches to take; None takes all.

    Returns:
        Means by name, and the perplexity of the predicted tokens.
    """
    model.eval()
    meter = Meter()
    for micro_batches in itertools.islice(loader, batches):
        totals = _totals(objective, strategy, micro_batches)
        for host_batch in micro_batches:
            batch = _to_device(strategy, host_batch)
            with strategy.autocast():
                meter.add(objective.loss(model, batch, totals).metrics)
    loader.close()
    means = meter.compute(strategy.all_reduce)
    of_tokens = means.get("mlm_loss", means["loss"])  # where another task is part of the loss
    return {**means, "perplexity": math.exp(min(of_tokens, 700.0))}


def accumulate_gradients(
    model: nn.Module, objective: Objective, strategy: Strategy, micro_batches: MicroBatches
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Runs forward and backward passes over this replica's rows of a global batch; returns each one's metrics."""
    totals = _totals(objective, strategy, micro_batches)
    metrics = []
    for i, host_batch in enumerate(micro_batches):
        batch = _to_device(strategy, host_batch)
        with strategy.accumulate(last=i == len(micro_batches) - 1):
            with strategy.autocast():
                loss = objective.loss(model, batch, totals)
            strategy.backward(loss.total)
        metrics.append(loss.metrics)
    return metrics


def _totals(objective: Objective, strategy: Strategy, micro_batches: MicroBatches) -> dict[str, Tensor]:
    """Each loss term's weight over the whole global batch; one small collective, no wait for the device."""
    sums: dict[str, float] = {}
    for batch in micro_batches:
        for name, weight in objective.weights(batch).items():
            sums[name] = sums.get(name, 0.0) + weight
    totals = torch.tensor(list(sums.values()), dtype=torch.float64)  # float32 cannot count beyond 2**24
    totals = totals.to(strategy.accelerator.device, non_blocking=True)
    # Where nothing is predicted, as in a tiny batch of words too long to mask, the loss is 0 and not 0 / 0.
    return dict(zip(sums, strategy.all_reduce(totals).clamp_(min=1).float(), strict=True))


def _to_device(strategy: Strategy, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies what the device needs; without segments where each row is one, so that attention needs no mask."""
    columns = {name: column for name, column in batch.items() if name not in HOST_COLUMNS}
    if "segments" in columns and bool((columns["segments"] == 1).all()):
        del columns["segments"]
    return strategy.accelerator.to_device(columns)
