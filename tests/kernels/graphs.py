"""Counts the graphs of compiled layers in short runs, with a back-end that compiles nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.config import load
from tests.conformance import worker
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.monitoring import Tracker
from trainer.strategies.world import World
from trainer.training.compute import compiled
from trainer.training.evaluation import score
from trainer.training.experiment import Experiment
from trainer.training.passes import MicroBatch, MicroBatches
from trainer.training.recorder import Destinations


@dataclass(frozen=True)
class Counts:
    """What torch.compile did in a run.

    Attributes:
        losses: of each step, then of each evaluation.
        graphs: number of graphs handed to the back-end.
        symbolic: number of their inputs with a symbolic size.
        recompilations: number of graphs of code that had one already.
        breaks: reasons for graph breaks.
        reported: the metric `perf/compilations` of each row.
    """

    losses: list[float]
    graphs: int
    symbolic: int
    recompilations: int
    breaks: list[str]
    reported: list[float]


class _Rows(Tracker):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.reported: list[float] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.losses += [metrics[k] for k in ("train/loss", "heldout/loss") if k in metrics]
        self.reported += [metrics[k] for k in ("perf/compilations",) if k in metrics]

    def close(self) -> None: ...


class _CountingBackend:
    """Runs graphs as they are, and keeps the symbolic inputs of each."""

    def __init__(self) -> None:
        self.symbolic: list[int] = []

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[Any]
    ) -> Callable[..., tuple[Tensor, ...]]:
        self.symbolic.append(sum(map(_is_symbolic, inputs)))
        return graph.forward


def _is_symbolic(value: object) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


def run(file: str, overrides: list[str]) -> Counts:
    """Trains as a rank of a run with compiled layers."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    backend = _CountingBackend()
    CpuAccelerator.compile_options = {"backend": backend}
    world = World.start(60)
    world.connect("gloo")
    experiment = load(Experiment, file, overrides)
    trainer = worker.make_trainer(experiment, world)
    rows = _Rows()
    trainer.fit(Destinations([rows]))
    trainer.close()
    world.close()
    metrics = get_compilation_metrics()
    return Counts(
        losses=rows.losses,
        graphs=len(backend.symbolic),
        symbolic=sum(backend.symbolic),
        recompilations=sum(each.recompile_reason is not None for each in metrics),
        breaks=[re.sub(r"\s+", " ", reason)[:200] for reason in counters["graph_break"]],
        reported=rows.reported,
    )


def count_with_rare_batches(file: str, overrides: list[str]) -> list[int]:
    """Number of graphs after each step, then after each evaluation.

    The rows of a step are full, padded or packed, in another order on each rank. From the fourth
    step on, the micro-batches of a rank differ, too.
    """
    backend = _CountingBackend()
    CpuAccelerator.compile_options = {"backend": backend}
    world = World.start(60)
    world.connect("gloo")
    trainer = worker.make_trainer(load(Experiment, file, overrides), world)
    trainer.model.train()
    batches, counts = iter(trainer.loader), []
    for step in range(6):
        kinds = [step + world.rank + (number if step > 2 else 0) for number in range(10)]
        step_batches = [_laid_out(*each) for each in zip(next(batches), kinds, strict=False)]
        assert len(step_batches) > 1
        trainer.train_step(step_batches)
        counts.append(len(backend.symbolic))
    trainer.model.eval()
    for step in range(3):
        given = _Given([[_laid_out(step_batches[0], step + world.rank)]])
        score(trainer.model, trainer.objectives[0], trainer.strategy, given, None)  # type: ignore[arg-type]
        counts.append(len(backend.symbolic))
    trainer.close()
    world.close()
    return counts


class _Given(list[MicroBatches]):
    """A loader of given steps."""

    examples = 1

    def close(self) -> None: ...


def _laid_out(batch: MicroBatch, kind: int) -> MicroBatch:
    """A batch whose rows are full, padded or packed."""
    changed = dict(batch)
    for name in changed.keys() & {"segments", "target_segments"}:
        segments = torch.ones_like(changed[name])
        if kind % 3 == 1:
            segments[0, -1] = 0
        elif kind % 3 == 2:
            segments[:, segments.shape[1] // 2 :] = 2
        changed[name] = segments
    return changed


def run_with_limit(file: str, overrides: list[str], limit: int) -> Counts:
    """`run` with fewer graphs per layer than `compiled.LIMIT`."""
    compiled.LIMIT = limit
    return run(file, overrides)
