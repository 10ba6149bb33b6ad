"""Predicted and measured steps on this machine's CPU, side by side, as Markdown.

    python -m benchmarks.roofline    # a minute or two

A step is both passes over one micro-batch and the optimizer's update, in fp32, eager. Times are CPU
times of one thread, because other programs disturb these less than wall times. The rates of the CPU
are measured right before each step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.models import initialized
from samestep.config import load
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.fusion import EAGER, kernels
from trainer.inspect.plan.host import HostRates, measure
from trainer.inspect.plan.roofline import estimate
from trainer.inspect.plan.trace import Step
from trainer.optim import Structure
from trainer.training.experiment import Experiment

_CONFIGS = Path(__file__).parents[1] / "configs" / "pretrain"
_COMMON = [
    "training.precision=fp32",
    "training.steps=10",
    "schedule.warmup_steps=0",
    "accelerator=cpu",
]


@dataclass(frozen=True)
class Shape:
    """A step to measure: a recipe with settings, and the examples of its micro-batch."""

    recipe: str
    settings: tuple[str, ...]
    examples: int

    def experiment(self) -> Experiment:
        """The experiment of the step."""
        file = str(_CONFIGS / f"{self.recipe}.yaml")
        return load(Experiment, file, [*_COMMON, *self.settings])


def _length(length: int) -> str:
    return f"phases=[{{steps: 10, sequence_length: {length}}}]"


SHAPES = {
    "BERT-tiny 128 x 32": Shape("bert_tiny", (_length(128),), 32),
    "BERT-mini 128 x 16": Shape("bert_mini", (_length(128),), 16),
    "BERT-mini 512 x 4": Shape("bert_mini", (_length(512),), 4),
    "BERT-small 128 x 8": Shape("bert_small", (_length(128),), 8),
    "T5-small 128 x 8": Shape("t5_small", ("data.sequence_length=128",), 8),
    "RoBERTa, 4 layers, 256 x 2": Shape(
        "roberta_base", ("model.layers=4", "data.sequence_length=256"), 2
    ),
}


def predicted(shape: Shape, rates: HostRates) -> float:
    """Predicted seconds of a step."""
    experiment = shape.experiment()
    phase = experiment.resolved_phases()[0]
    objective = phase.objective.build(stand_in(experiment.model.vocab_size))
    step = Step(experiment, on_cpu=True)
    operators = step.operators(objective, example(experiment, objective, phase), shape.examples)
    found = kernels([*operators, *step.update_operators()], EAGER)
    # Gradients of the only micro-batch are not added to others.
    first = [kernel for kernel in found if not kernel.accumulates]
    return estimate(first, rates, "fp32", EAGER).total


def measured(shape: Shape, repeats: int) -> float:
    """Median CPU seconds of a real step."""
    experiment = shape.experiment()
    train = _real(experiment, shape.examples)
    times = []
    for _ in range(repeats + 1):
        began = time.process_time()
        train()
        times.append(time.process_time() - began)
    return statistics.median(times[1:])


def _real(experiment: Experiment, size: int) -> Callable[[], None]:
    """A function that takes a real step."""
    phase = experiment.resolved_phases()[0]
    objective = phase.objective.build(stand_in(experiment.model.vocab_size))
    model = initialized(experiment.model).train()
    columns = example(experiment, objective, phase)
    batch = {
        name: torch.from_numpy(column).repeat_interleave(size, 0)
        for name, column in columns.items()
    }
    totals = {name: torch.ones(()) for name in objective.weights(columns)}
    optimizer = experiment.optimizer.build(model.named_parameters(), Structure.of(model))

    def train() -> None:
        objective.loss(model, batch, totals).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return train


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="some only"
    )
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    print("| step | predicted, ms | measured, ms | predicted / measured |\n|---|---:|---:|---:|")
    for name in options.shape:
        rates = measure()  # a busy machine is slower from minute to minute
        ours, real = predicted(SHAPES[name], rates), measured(SHAPES[name], options.repeats)
        print(f"| {name} | {1e3 * ours:.0f} | {1e3 * real:.0f} | {ours / real:.2f} |", flush=True)


if __name__ == "__main__":
    main()
