"""`samestep plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.command import Commands, add_command
from trainer.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.inspect.plan.plan import Plan
    from trainer.inspect.plan.trace import Step
    from trainer.training.experiment import Experiment
    from trainer.training.phases import Phase

_NOTES = (
    "Batch: examples of a micro-batch x micro-batches of a step. Peak of a step on the device that "
    "holds most: "
    "parameters, gradients, optimizer state, and the larger of activations with buffers and the "
    "update's temporary "
    "tensors; counted by running the model's passes and the optimizer's update on tensors without "
    "memory. Sent: by a "
    "device in a step, by the ring algorithm."
)
_FITS = (
    "Fits: the largest micro-batch for 90 % of the memory; the rest is for fragmentation and "
    "libraries. Between one "
    "example and a device's share of the batch, activations are interpolated linearly, which is "
    "never too little."
)


def register(commands: Commands) -> None:
    """Adds `plan` to the `samestep` command."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        "say what a run will take of each device's memory and send between devices",
        "example:\n  samestep plan configs/pretrain/t5_11b.yaml --devices 64 --memory 80GiB",
        "Says what a run will take of each device's memory under each strategy, and what it will "
        "send between devices "
        "in a step. Needs no GPU and no dataset, and allocates nothing.",
    )
    parser.add_argument("file", help="the experiment, a YAML file")
    parser.add_argument(
        "--devices", type=int, required=True, metavar="N", help="devices to spread the run over"
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME",
        default=[],
        help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3 (default: all of them)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="of a device, as 80GiB: which micro-batch fits into it?"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace those of the file"
    )


def _plan(args: argparse.Namespace) -> int:
    from rich.console import Console

    from trainer.config.sizes import parse_size
    from trainer.inspect.plan.plan import STRATEGIES, Planner, as_json, copies_of
    from trainer.inspect.plan.trace import Step, on_cpu
    from trainer.training.starting import load_experiment

    names = [name for name in args.strategy if "=" not in name]
    overrides = [*args.overrides, *(name for name in args.strategy if "=" in name)]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"--strategy {name} is not known; use {', '.join(STRATEGIES)}")
    if args.devices < 1:
        raise ConfigError(f"--devices must be at least 1, not {args.devices}")
    memory = parse_size(args.memory, "--memory") if args.memory else None
    experiment = load_experiment(args.file, overrides)
    names = names or [
        name
        for name in STRATEGIES
        if name != "hsdp" or args.devices % copies_of(experiment, args.devices) == 0
    ]
    console = Console(highlight=False, markup=False)
    found: list[tuple[Phase, list[Plan]]] = []
    with Console(stderr=True).status("running a step without memory"):
        step = Step(experiment, on_cpu(experiment))
        for phase in _distinct(experiment.resolved_phases()):
            planner = Planner(experiment, phase, args.devices, step)
            found.append((phase, [planner.plan(name, memory) for name in names]))
    if args.json:
        listed = [
            {"sequence_length": phase.sequence_length, "plans": list(map(as_json, plans))}
            for phase, plans in found
        ]
        sys.stdout.write(json.dumps({"devices": args.devices, "phases": listed}, indent=1) + "\n")
        return EXIT_DONE
    parameters = _count(step)
    for phase, plans in found:
        console.print(
            _table(_title(experiment, phase, parameters, args.devices), plans, memory is not None)
        )
    notes = [_NOTES, _FITS * (memory is not None), experiment.strategy.plan_note]
    console.print("\n".join(filter(None, notes)), style="dim")
    return EXIT_DONE


def _distinct(phases: Sequence[Phase]) -> list[Phase]:
    """The phases that differ in what a step of them is."""
    kept = {
        (phase.sequence_length, phase.global_batch_size, phase.micro_batch_size): phase
        for phase in phases
    }
    return list(kept.values())


def _count(step: Step) -> str:
    sizes = [(each.elements, each.trained) for each in step.parameters.values()]
    counts = sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
    said = f"{counts[0] / 1e6:,.0f}M parameters"
    return said if counts[0] == counts[1] else f"{said}, {counts[1] / 1e6:,.2f}M trained"


def _title(experiment: Experiment, phase: Phase, parameters: str, devices: int) -> str:
    training = experiment.training
    checkpointing = ", activation checkpointing" if training.activation_checkpointing else ""
    kind = type(experiment.optimizer).__module__.rpartition(".")[2]
    return (
        f"{parameters}, {kind}, {training.precision}, length {phase.sequence_length}"
        f"{checkpointing}: {phase.global_batch_size} examples a step on {devices} devices, GiB of "
        "each"
    )


def _table(title: str, plans: Sequence[Plan], asked: bool) -> Table:
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 0, 0, 1),
    )
    headings = [
        "",
        "batch",
        "params",
        "grads",
        "optim",
        "activ",
        "buffers",
        "update",
        "peak",
        "sent",
    ]
    for heading in headings + ["fits"] * asked:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for plan in plans:
        held = plan.held
        parts = [
            held.parameters,
            held.gradients,
            held.optimizer,
            held.activations,
            held.buffers,
            held.update,
        ]
        cells = [
            plan.strategy,
            f"{plan.micro_batch} x {plan.micro_batches}",
            *map(_gib, parts),
            _gib(held.total),
        ]
        cells.append(_gib(sum(each.sent for each in plan.exchanged)))
        if asked:
            cells.append("none" if plan.largest == 0 else str(plan.largest))
        table.add_row(*cells)
    return table


def _gib(nbytes: float) -> str:
    size = nbytes / 2**30
    return f"{size:,.1f}" if size >= 100 else f"{size:.2f}"
