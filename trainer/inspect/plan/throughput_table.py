"""`samestep plan --throughput`: predictions as tables and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from samestep.errors import ConfigError
from samestep.progress import Progress
from trainer.inspect.plan.device import ALL
from trainer.inspect.plan.operators import KINDS, Kind
from trainer.inspect.plan.table import table_of
from trainer.inspect.plan.throughput import HOST, Predictor, as_json, check_device

if TYPE_CHECKING:
    from trainer.inspect.plan.throughput import Prediction
    from trainer.inspect.plan.trace import Step
    from trainer.training.experiment import Experiment
    from trainer.training.phases import Phase

_HEADINGS: dict[Kind, str] = {
    "products": "prod",
    "attention": "attn",
    "elementwise": "elem",
    "loss": "loss",
    "optimizer": "optim",
    "other": "other",
}
_NOTES = (
    "seq/s and tokens/s are one device's. Times by class: matrix products of layers, attention, "
    "elementwise operators and norms, head and loss, the update, all else; each kernel takes the "
    "larger of arithmetic and memory traffic. waits: for launches by the host; sends: "
    "communication; exposed: the part of it that no pass hides. eager: a kernel for each operator; "
    "compiled: training.compile fuses elementwise operators; fused: also one kernel for attention, "
    "and a fused loss. Input and checkpoints are not included. How it is predicted: docs/gpu.md."
)


def check(device: str, price: float | None) -> None:
    """Rejects unknown devices and prices before anything is traced.

    Raises:
        ConfigError: naming the option.
    """
    if device != ALL:
        check_device(device)
    if price is not None and not price >= 0:
        raise ConfigError(
            f"--price is {price}. Use the price of a device for an hour, such as 2.5."
        )


def show(
    experiment: Experiment,
    phases: Sequence[Phase],
    step: Step,
    counts: Sequence[int],
    strategy: str,
    device: str,
    price: float | None,
    json_wanted: bool,
) -> None:
    """Prints the predictions of all phases.

    Args:
        counts: numbers of devices.
        device: its name, or `ALL`.
        price: of a device for an hour; None prints no cost.
    """
    from samestep.terminal import Console
    from trainer.inspect.plan.datasheets import DEVICES

    names = list(DEVICES) if device == ALL else [device]
    found: dict[int, list[tuple[Phase, list[Prediction]]]] = {}
    with Progress("running steps without memory", len(phases) * len(counts)) as progress:
        for count in counts:
            predictor = Predictor(experiment, step, count, strategy)
            found[count] = list(progress.track(predictor.predictions(phases, names)))
    # Before the first line of output: a phase that fails leaves no half of a table.
    totals = {count: list(_totals(found[count], count, price)) for count in counts}
    if json_wanted:
        trees = [_tree(count, strategy, found[count], totals[count]) for count in counts]
        sys.stdout.write(json.dumps(trees if len(trees) > 1 else trees[0], indent=1) + "\n")
        return
    console = Console(highlight=False, markup=False)
    for count in counts:
        for phase, rows in found[count]:
            title = f"length {phase.sequence_length}, {experiment.training.precision}, {strategy}"
            title = f"Predicted throughput, {title} on {count}"
            console.print(table_of(title, map(_rates, rows)))
            console.print(table_of("Milliseconds of a step", map(_times, rows)))
        for total in totals[count]:
            devices = f"{total['device']}, {total['implementation']}"
            line = f"All steps, {devices}: {_time(total['hours'])}"
            if price is not None:
                line += f", {total['cost']:,.0f} for {count} at {price:g} an hour each"
            console.print(line + ".")
    if any(not each.fits for of_count in found.values() for _, rows in of_count for each in rows):
        console.print("* One example does not fit the memory of the device under this strategy.")
    console.print(_NOTES, style="dim")
    if device == HOST:
        console.print("The rates of the CPU were measured now.", style="dim")


def _tree(
    devices: int,
    strategy: str,
    found: Sequence[tuple[Phase, list[Prediction]]],
    totals: Sequence[dict[str, object]],
) -> dict[str, object]:
    phases = [
        {"sequence_length": phase.sequence_length, "predictions": list(map(as_json, rows))}
        for phase, rows in found
    ]
    return {"devices": devices, "strategy": strategy, "phases": phases, "run": totals}


def _totals(
    found: Sequence[tuple[Phase, list[Prediction]]], devices: int, price: float | None
) -> Iterator[dict[str, object]]:
    """The whole run on each device, with each implementation."""
    # Each phase has the same devices and implementations, in the same order.
    for rows in zip(*(rows for _, rows in found), strict=True):
        hours = sum(each.hours for each in rows)
        total: dict[str, object] = {
            "device": rows[0].device,
            "implementation": rows[0].implementation,
            "hours": hours,
        }
        if price is not None:
            total["cost"] = hours * devices * price
        yield total


def _rates(each: Prediction) -> dict[str, str]:
    return {
        # The note under the tables explains the mark.
        "device": each.device + ("" if each.fits else "*"),
        "": each.implementation,
        "batch": f"{each.micro_batch} x {each.micro_batches}",
        "step, ms": _ms(each.seconds),
        "launches": f"{each.step.launches:,}",
        "seq/s": _three(each.sequences),
        "tokens/s": _three(each.tokens),
        "MFU": f"{each.mfu:.1%}",
    }


def _times(each: Prediction) -> dict[str, str]:
    return {
        "device": each.device,
        "": each.implementation,
        **{_HEADINGS[kind]: _ms(each.step.seconds.get(kind, 0.0)) for kind in KINDS},
        "waits": _ms(each.step.waiting),
        "sends": _ms(each.communication),
        "exposed": _ms(each.exposed),
    }


def _ms(seconds: float) -> str:
    return _three(1000 * seconds)


def _three(number: float) -> str:
    """Three digits, or all before the point: 0.12, 12.3, 12,345."""
    if number < 1:
        return f"{number:.2f}" if number else "0"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _time(hours: object) -> str:
    assert isinstance(hours, float)
    # From two days on, hours are hard to read.
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"
