"""How costs grow with size: measured sizes, fitted exponents, tables and plots.

A cost of c * n**e is a line of slope e in a plot with logarithmic axes. The exponent is fitted to
the last three sizes that were measured (least squares), since constant costs hide growth at small
ones. Sizes that would take too long are extrapolated with it, and marked with "~".
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import numpy as np

Figures: TypeAlias = dict[str, float]
"""What one size costs, by name; the name has the unit, as in "open, s"."""

P = ParamSpec("P")
T = TypeVar("T")

_FITTED = 3  # sizes


@dataclass
class Growth:
    """One cost against a size.

    Attributes:
        title: the cost, with its unit.
        size: what is counted, such as "shards".
        measured: size -> cost.
        extrapolated: the same for sizes that were not measured.
    """

    title: str
    size: str
    measured: dict[int, float] = field(default_factory=dict)
    extrapolated: dict[int, float] = field(default_factory=dict)

    @property
    def exponent(self) -> float:
        """Slope of cost over size on logarithmic axes; not a number for a single size."""
        return self._line()[0]

    def extrapolate(self, sizes: Iterable[int]) -> None:
        """Continues the fitted line to sizes that were not measured."""
        slope, begin = self._line()
        missing = [size for size in sizes if size not in self.measured]
        self.extrapolated = {size: float(np.exp(begin + slope * np.log(size))) for size in missing}

    def _line(self) -> tuple[float, float]:
        """Slope and constant of log(cost) over log(size)."""
        if len(self.measured) < 2:
            return float("nan"), float("nan")
        sizes, costs = np.log(np.array(list(self.measured.items())[-_FITTED:])).T
        slope, begin = np.polyfit(sizes, costs, 1)
        return float(slope), float(begin)


def measure(
    size: str, sizes: Sequence[int], work: Callable[[int], Figures], seconds: float
) -> list[Growth]:
    """Measures each size in turn, until the next one would take too long.

    Args:
        size: what the sizes count.
        sizes: in ascending order.
        work: measures one size; its figures are positive.
        seconds: most that `work` may take, as far as the sizes before predict.
    """
    growths: dict[str, Growth] = {}
    taken = Growth("the measurement itself", size)
    for number in sizes:
        taken.extrapolate([number])
        if taken.extrapolated[number] > seconds:  # not a number before there are two
            break
        began = time.perf_counter()
        for title, cost in work(number).items():
            growths.setdefault(title, Growth(title, size)).measured[number] = cost
        taken.measured[number] = time.perf_counter() - began
    for growth in growths.values():
        growth.extrapolate(sizes)
    return list(growths.values())


def in_fresh_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function in a process of its own, whose memory and caches are empty."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


def cpu_timed(work: Callable[[], T]) -> tuple[float, T]:
    """Calls a function; returns the CPU time of all threads in seconds, and its result.

    Other programs disturb it little. A start that waits for neither disk nor network takes about as
    long on an idle machine.
    """
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Calls a function; returns its wall time in seconds, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def resident(before: float = 0.0) -> float:
    """Memory of this process, in MiB, beyond what it had before; at least 0.1. Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return max(0.1, pages * os.sysconf("SC_PAGE_SIZE") / 2**20 - before)


def table(growths: Sequence[Growth]) -> str:
    """Markdown, a row for each cost; all have the same sizes."""
    sizes = sorted({size for each in growths for size in (*each.measured, *each.extrapolated)})
    lines = [
        f"| by {growths[0].size} | {' | '.join(f'{size:,}' for size in sizes)} | exponent |",
        f"|---|{'---:|' * (len(sizes) + 1)}",
    ]
    for each in growths:
        cells = [_cell(each, size) for size in sizes]
        lines.append(f"| {each.title} | {' | '.join(cells)} | {each.exponent:.2f} |")
    return "\n".join(lines)


def _cell(growth: Growth, size: int) -> str:
    if size in growth.measured:
        return _number(growth.measured[size])
    return f"~{_number(growth.extrapolated[size])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot(title: str, growths: Sequence[Growth], png: Path) -> None:
    """Draws the costs on logarithmic axes; extrapolated sizes are hollow."""
    from matplotlib.figure import Figure  # the extra `plot`

    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    for each in growths:
        (line,) = axes.plot(*zip(*each.measured.items(), strict=True), "o-", label=each.title)
        # From the last measured size on, so that the line has no gap.
        last = max(each.measured)
        beyond = [(last, each.measured[last])]
        beyond += [(size, cost) for size, cost in each.extrapolated.items() if size > last]
        axes.plot(*zip(*beyond, strict=True), "o:", color=line.get_color(), fillstyle="none")
    axes.set(title=title, xlabel=growths[0].size)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(png)
