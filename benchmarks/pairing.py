"""Paired measurements: ours and others do the same work in turn, so that a busy machine slows all
of them alike.

Each round runs every contender once, every other round in reverse; a figure is the median over the
rounds, and a ratio is the median of the rounds' own ratios. Data pipelines are compared by CPU
time, child processes included, which other programs on the machine disturb little; training steps
by wall time, because a device works beside the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from rich.console import Console
from rich.table import Table

Clock: TypeAlias = Literal["CPU", "wall"]
T = TypeVar("T")


@dataclass(frozen=True)
class Contender:
    """Something to measure.

    Attributes:
        name: what the tables call it.
        work: does a fixed piece of work and returns its amount; called once before the measured
            rounds.
    """

    name: str
    work: Callable[[], float]


@dataclass(frozen=True)
class Comparison:
    """What was measured; the first contender is ours, to which the others are compared.

    Attributes:
        title: the work.
        unit: of its amount.
        clock: whose seconds were counted.
        rates: contender -> amount a second in each round.
        notes: contender -> what else there is to say.
    """

    title: str
    unit: str
    clock: Clock
    rates: dict[str, list[float]]
    notes: dict[str, str] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """Median amount a second of a contender."""
        return statistics.median(self.rates[name])

    def ratio(self, name: str) -> float:
        """How many times as fast as a contender ours is."""
        ours = next(iter(self.rates.values()))
        return statistics.median(a / b for a, b in zip(ours, self.rates[name], strict=True))

    def table(self) -> Table:
        """For the terminal."""
        columns = ("", f"{self.unit} a {self.clock}-second", "from", "to", "the first is", "")
        table = Table(*columns, title=self.title, title_justify="left")
        for name, rates in self.rates.items():
            figures = [
                f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
                for rate in (self.rate(name), min(rates), max(rates))
            ]
            table.add_row(name, *figures, f"{self.ratio(name):.2f} x", self.notes.get(name, ""))
        return table


def compare(
    title: str,
    unit: str,
    contenders: Sequence[Contender],
    repeats: int,
    clock: Clock = "CPU",
    warm: bool = True,
) -> Comparison:
    """Measures contenders in turn, ours first.

    Args:
        title: the work.
        unit: of the amount that `work` returns.
        contenders: ours, then the others.
        repeats: measured rounds.
        clock: whose seconds count.
        warm: whether each does its work once before, unmeasured.
    """
    now = cpu_seconds if clock == "CPU" else time.perf_counter
    rates: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number, contender in in_rounds(contenders, range(-1 if warm else 0, repeats)):
        began = now()
        amount = contender.work()
        seconds = now() - began
        if number >= 0:
            rates[contender.name].append(amount / seconds)
    return Comparison(title, unit, clock, rates)


def in_rounds(contenders: Sequence[T], rounds: Sequence[int]) -> Iterator[tuple[int, T]]:
    """Yields the round and the contender of each turn; odd rounds are in reverse."""
    for number in rounds:
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            yield number, contender


def cpu_seconds() -> float:
    """CPU time of this process, its threads, and its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def arguments(description: str | None, repeats: int = 3) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take; `repeats` is the default number of rounds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        help=f"measured rounds (default: {repeats})",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def publish(comparisons: Sequence[Comparison], path: Path | None) -> None:
    """Prints the tables with machine, date and versions; writes all measurements to `path`."""
    conditions = {"date": date.today().isoformat(), "hardware": hardware(), "versions": versions()}
    console = Console()
    for comparison in comparisons:
        console.print(comparison.table())
    console.print(
        *(f"{name}: {value}" for name, value in conditions.items()), sep="\n", highlight=False
    )
    if path is not None:
        measured = [dataclasses.asdict(comparison) for comparison in comparisons]
        path.write_text(
            json.dumps({**conditions, "measured": measured}, indent=1) + "\n", encoding="utf-8"
        )


def hardware() -> str:
    """The processor and how many cores of it this process may use."""
    from trainer.training.compute.arithmetic import processor  # it imports torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of {processor()}"


def versions() -> str:
    """Python and the packages that matter here, as far as they are installed."""
    packages = (
        *("torch", "triton", "numpy", "tokenizers", "transformers", "accelerate", "datasets"),
        *("sentence-transformers", "webdataset", "litdata"),
    )
    found = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    return ", ".join(
        [
            f"Python {platform.python_version()}",
            *(f"{p} {found[p]}" for p in packages if p in found),
        ]
    )
