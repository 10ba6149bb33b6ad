"""The command `samestep plan`."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from samestep.command import OVERRIDES, Commands, add_command, in_typed_order
from samestep.errors import EXIT_DONE, ConfigError
from samestep.progress import Progress
from trainer.inspect.plan.device import ALL, H100, Device
from trainer.inspect.plan.table import table_of

if TYPE_CHECKING:
    from trainer.inspect.plan.plan import Plan
    from trainer.inspect.plan.trace import Step
    from trainer.inspect.plan.work import Work
    from trainer.training.experiment import Experiment
    from trainer.training.phases import Phase

logger = logging.getLogger(__name__)

_NOTES = (
    "Batch: examples of a micro-batch x micro-batches of a step. Peak of a step on the device that "
    "holds most: parameters, gradients, optimizer state, and the larger of activations with "
    "buffers and the update's temporary tensors; counted by running the model's passes and the "
    "optimizer's update on tensors without memory. Sent: by a device in a step, by the ring "
    "algorithm."
)
_FUSED = (
    "Attention: fused by a kernel that keeps scores out of memory, which the accelerator's setting "
    "fused_attention turns off."
)
_FITS = (
    "Fits: the largest micro-batch for 90 % of the memory; the rest is for fragmentation and "
    "libraries. Between one example and a device's share of the batch, activations are "
    "interpolated linearly, which never underestimates them."
)


_ASSUMED = "80GiB"  # an H100's or A100's, the devices that large runs mostly have


def register(commands: Commands) -> None:
    """Adds `plan` to the `samestep` command."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        "compute a run's memory per device, its traffic, throughput and energy",
        "example:\n  samestep plan configs/pretrain/t5_11b.yaml --devices 64 --memory 80GiB",
        "Computes how much memory a run takes of each device under each strategy, and what it "
        "sends between devices in a step; and estimates the time, energy and CO2 of all steps. "
        "Needs no GPU and no dataset, and allocates nothing.",
    )
    parser.add_argument("file", metavar="EXPERIMENT", help="the experiment, a YAML file")
    parser.add_argument(
        "--devices",
        required=True,
        metavar="N[,N]|here",
        help="number of devices for the run (or several numbers), or the devices of this machine",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        metavar="NAME",
        default=[],
        help="single, ddp, fsdp, hsdp, zero1, zero2 or zero3 (default: all of them; with "
        "--throughput one, by default the experiment's)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a device, such as 24GiB; also prints which micro-batch fits (default with "
        f"micro_batch_size: auto on GPUs: {_ASSUMED}, an H100's)",
    )
    for name, metavar, text in (
        (
            "tflops",
            "N",
            "peak of a device in 1e12 FLOP/s (default: %(default)g, an H100's)",
        ),
        (
            "utilization",
            "FRACTION",
            "fraction of the peak that training reaches (default: %(default)g)",
        ),
        ("watts", "N", "power of a device under load (default: %(default)g, an H100's)"),
    ):
        default = getattr(H100, name)
        parser.add_argument(f"--{name}", type=float, metavar=metavar, default=default, help=text)
    parser.add_argument(
        "--throughput",
        nargs="?",
        const=ALL,
        metavar="DEVICE",
        help="predict throughput instead, on a100, h100, h200, b200, v4, v5e, v6e or cpu, which is "
        "measured (default: all but cpu); --memory, --tflops, --utilization and --watts do not "
        "count then",
    )
    parser.add_argument(
        "--price", type=float, metavar="N", help="with --throughput: price of one device per hour"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, or a list of them for several numbers of devices; sizes are "
        "in bytes",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


def _plan(args: argparse.Namespace) -> int:
    # Importing torch takes longer than anybody waits in silence.
    logger.info("planning %s: its steps run on tensors without memory", args.file)
    from samestep.config import parse_size
    from samestep.terminal import Console
    from trainer.accelerators import detect
    from trainer.accelerators.kinds import cpu
    from trainer.inspect.plan import throughput_table
    from trainer.inspect.plan.plan import STRATEGIES, Planner
    from trainer.inspect.plan.trace import Step
    from trainer.inspect.plan.work import work
    from trainer.monitoring import costs
    from trainer.training.model import with_labels
    from trainer.training.starting import load_experiment

    # --strategy takes all arguments that follow, so overrides may be among them.
    names = [name for name in args.strategy if "=" not in name]
    swallowed = [name for name in args.strategy if "=" in name]
    if args.throughput is not None and "=" in args.throughput:
        swallowed.append(args.throughput)
        args.throughput = ALL
    overrides = in_typed_order(args, [*args.overrides, *swallowed])
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"--strategy {name} is unknown. Use {', '.join(STRATEGIES)}")
    memory = parse_size(args.memory, "--memory") if args.memory else None
    device = _device(args)
    if args.throughput is not None:
        throughput_table.check(args.throughput, args.price)
    elif args.price is not None:
        raise ConfigError("--price is for predictions of throughput. Add --throughput.")
    experiment = load_experiment(args.file, overrides, offline=True)
    experiment = with_labels(experiment, experiment.model.labels, None)
    counts = detect.device_counts(args.devices, experiment.accelerator)
    if args.throughput is not None:
        _show_throughput(args, experiment, counts, names)
        return EXIT_DONE
    phases, assumption = list(experiment.resolved_phases()), ""
    if memory is None and any(phase.micro_batch_size == "auto" for phase in phases):
        if experiment.accelerator is None or experiment.accelerator.measures_memory:
            memory = parse_size(_ASSUMED, "--memory")
            assumption = (
                f"micro_batch_size is auto: assuming {_ASSUMED} per device, as an H100 or A100 "
                "has. --memory sets it."
            )
        else:
            phases = [_without_probe(experiment, phase) for phase in phases]
            assumption = (
                "micro_batch_size is auto, and this accelerator's memory is not measured: the "
                "batch is the one that training takes there. --memory SIZE shows what fits."
            )
    phases = _distinct(phases)
    tried = {count: names or _strategies(experiment, count) for count in counts}
    found: dict[int, list[tuple[Phase, list[Plan]]]] = {count: [] for count in counts}
    # The first unit is the optimizer's update, the others are plans.
    units = 1 + len(phases) * sum(map(len, tried.values()))
    with Progress("running steps without memory", units) as progress:
        step = Step(experiment, on_cpu=isinstance(experiment.accelerator, cpu.Config))
        progress.advance()
        for count, phase in itertools.product(counts, phases):
            planner = Planner(experiment, phase, count, step)
            plans = [planner.plan(name, memory) for name in progress.track(tried[count])]
            found[count].append((phase, plans))
    needed = {count: work(experiment, count, device, costs.Config()) for count in counts}
    if args.json:
        assumed = memory is not None and not args.memory
        _write_json({"memory": memory, "memory_assumed": assumed}, needed, found)
        return EXIT_DONE
    console = Console(highlight=False, markup=False)
    if assumption:
        console.print(assumption)
    for count, rows in found.items():
        for phase, plans in rows:
            console.print(table_of(_title(experiment, phase, step, count), _rows(plans)))
        console.print(_work_line(needed[count], count, device))
    fused = _FUSED if step.fuses_attention else ""
    notes = [_NOTES, _FITS if memory else "", fused, experiment.strategy.plan_note]
    console.print("\n".join(filter(None, notes)), style="dim")
    return EXIT_DONE


def _strategies(experiment: Experiment, devices: int) -> list[str]:
    """All strategies, without hsdp where its copies do not divide the devices."""
    from trainer.inspect.plan.plan import STRATEGIES, copies_of

    divides = devices % copies_of(experiment, devices) == 0
    return [name for name in STRATEGIES if divides or name != "hsdp"]


def _write_json(
    facts: dict[str, object],
    needed: Mapping[int, Work],
    found: Mapping[int, Sequence[tuple[Phase, list[Plan]]]],
) -> None:
    from trainer.inspect.plan.plan import as_json

    trees: list[dict[str, object]] = []
    for count, rows in found.items():
        phases = [
            {"sequence_length": phase.sequence_length, "plans": list(map(as_json, plans))}
            for phase, plans in rows
        ]
        trees.append({"devices": count, **facts, "work": asdict(needed[count]), "phases": phases})
    # One object for one number, as programs read it.
    sys.stdout.write(json.dumps(trees if len(trees) > 1 else trees[0], indent=1) + "\n")


def _show_throughput(
    args: argparse.Namespace, experiment: Experiment, counts: Sequence[int], names: Sequence[str]
) -> None:
    from trainer.inspect.plan import throughput_table
    from trainer.inspect.plan.throughput import HOST
    from trainer.inspect.plan.trace import Step

    throughput_table.show(
        experiment,
        experiment.resolved_phases(),
        Step(experiment, on_cpu=args.throughput == HOST),
        counts,
        names[0] if names else experiment.strategy.plan or "ddp",
        args.throughput,
        args.price,
        args.json,
    )


def _device(args: argparse.Namespace) -> Device:
    device = Device(args.tflops, args.utilization, args.watts)
    for name, value in asdict(device).items():
        if not value > 0:
            raise ConfigError(f"--{name} is {value}. Use a number above 0.")
    if device.utilization > 1:
        raise ConfigError(f"--utilization is {device.utilization}. Use at most 1, the whole peak.")
    return device


def _work_line(needed: Work, devices: int, device: Device) -> str:
    hours = f"{needed.hours:,.1f} hours" if needed.hours < 48 else f"{needed.hours / 24:,.1f} days"
    return (
        f"All steps: {needed.flops:.2e} FLOPs. With {devices} devices at {device.utilization:.0%} "
        f"of {device.tflops:g} TFLOP/s and {device.watts:g} W each: {hours}, "
        f"{needed.kwh:,.0f} kWh, {needed.kilograms:,.0f} kg CO2."
    )


def _without_probe(experiment: Experiment, phase: Phase) -> Phase:
    """The phase with the micro-batch of training where memory is not measured."""
    from trainer.inspect.plan.batch import stand_in
    from trainer.training.phases import without_probe

    if phase.micro_batch_size != "auto":
        return phase
    objective = phase.objective.build(stand_in(experiment.model.vocab_size))
    positions = objective.pack_spec(phase.sequence_length).positions
    size = without_probe(phase.global_batch_size, positions)
    return replace(phase, micro_batch_size=size)


def _distinct(phases: Sequence[Phase]) -> list[Phase]:
    """Returns one phase for each size of a step."""
    kept: list[Phase] = []
    names = ("sequence_length", "global_batch_size", "micro_batch_size", "objective")
    for phase in phases:
        alike = [all(getattr(phase, n) == getattr(other, n) for n in names) for other in kept]
        if not any(alike):
            kept.append(phase)
    return kept


def _title(experiment: Experiment, phase: Phase, step: Step, devices: int) -> str:
    from samestep.config import kind_name

    training = experiment.training
    total = sum(each.elements for each in step.parameters.values())
    trained = sum(each.elements for each in step.parameters.values() if each.trained)
    parameters = f"{total / 1e6:,.0f}M parameters"
    if trained < total:
        parameters += f", {trained / 1e6:,.2f}M trained"
    checkpointing = ", activation checkpointing" if training.activation_checkpointing else ""
    kind = kind_name(experiment.optimizer)
    return (
        f"{parameters}, {kind}, {training.precision}, length {phase.sequence_length}"
        f"{checkpointing}: {phase.global_batch_size} examples a step on {devices} devices, "
        "GiB of each"
    )


def _rows(plans: Sequence[Plan]) -> Iterator[dict[str, str]]:
    for plan in plans:
        held = plan.held
        row = {
            "": plan.strategy,
            "batch": f"{plan.micro_batch} x {plan.micro_batches}",
            "params": _gib(held.parameters),
            "grads": _gib(held.gradients),
            "optim": _gib(held.optimizer),
            "activ": _gib(held.activations),
            "buffers": _gib(held.buffers),
            "update": _gib(held.update),
            "peak": _gib(held.total),
            "sent": _gib(sum(each.sent for each in plan.exchanged)),
        }
        if plan.largest is not None:  # the memory of a device is known, or assumed
            row["fits"] = str(plan.largest or "none")
        yield row


def _gib(nbytes: float) -> str:
    size = nbytes / 2**30
    return f"{size:,.1f}" if size >= 100 else f"{size:.2f}"
