"""Prints tables of large models, as Markdown.

What they take of each device, and what FSDP2 and HSDP exchange.

    python -m benchmarks.plans           # what `samestep plan` says: a few minutes
    python -m benchmarks.plans --count   # the collectives of 512 ranks, one by one

Each device has 8 examples of 512 tokens in a step of one micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.collectives import count_fake
from samestep.config import load
from trainer.inspect.plan.plan import STRATEGIES, Planner, divide
from trainer.inspect.plan.trace import Step
from trainer.strategies.kinds import fsdp
from trainer.training.experiment import Experiment
from trainer.training.phases import Phase

_CONFIGS = Path(__file__).parents[1] / "configs" / "pretrain"
RECIPES = {
    "BERT-large": "bert_large",
    "RoBERTa-large": "roberta_large",
    "T5-3B": "t5_3b",
    "T5-11B": "t5_11b",
}
DEVICES = (8, 64, 512)
_ROWS = 8
_NODES = 64  # of 512 devices


def recipe(name: str) -> tuple[Experiment, Phase]:
    """A recipe in bf16, and its phase of full length."""
    experiment = load(Experiment, str(_CONFIGS / f"{RECIPES[name]}.yaml"), [])
    return experiment, experiment.resolved_phases()[-1]


def plans() -> str:
    """Peaks and traffic of each model, strategy and number of devices, in GiB."""
    columns = [f"{what} {devices}" for what in ("peak,", "sent,") for devices in DEVICES]
    lines = [
        f"| model | strategy | activations | {' | '.join(columns)} |",
        f"|---|---|{'---:|' * 7}",
    ]
    for name in RECIPES:
        experiment, phase = recipe(name)
        step = Step(experiment, on_cpu=False)
        planners = [
            Planner(
                experiment,
                replace(phase, micro_batch_size=_ROWS, global_batch_size=_ROWS * devices),
                devices,
                step,
            )
            for devices in DEVICES
        ]
        for strategy in STRATEGIES[1:]:
            made = [planner.plan(strategy) for planner in planners]
            sizes = [made[0].held.activations, *(plan.held.total for plan in made)]
            sizes += [round(sum(each.sent for each in plan.exchanged)) for plan in made]
            lines.append(f"| {name} | {strategy} | {' | '.join(map(_gib, sizes))} |")
    return "\n".join(lines)


def counts() -> str:
    """The collectives of a step of 512 ranks as FSDP2 calls for them, and as the plan has them, in
    GiB.
    """
    lines = ["| model | strategy | collective | counted | planned |", "|---|---|---|---:|---:|"]
    for name in RECIPES:
        experiment, phase = recipe(name)
        step = Step(experiment, on_cpu=False)
        for strategy, copies in (("fsdp", 1), ("hsdp", _NODES)):
            config = fsdp.Config(replicas=copies)
            counted = count_fake(experiment, phase, config, DEVICES[-1], micro_batches=1)
            for each in divide(
                strategy, replace(experiment, strategy=config), step, DEVICES[-1]
            ).exchanged(1):
                both = f"{counted.get(each.kind, 0) / 2**30:.3f} | {each.nbytes / 2**30:.3f}"
                lines.append(f"| {name} | {strategy} | {each.kind} | {both} |")
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    size = nbytes / 2**30
    return f"{size:,.0f}" if size >= 100 else f"{size:.2f}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true", help="count collectives instead")
    print(counts() if parser.parse_args(given).count else plans())


if __name__ == "__main__":
    main()
