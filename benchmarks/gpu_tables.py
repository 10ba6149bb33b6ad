"""The tables of `benchmarks.gpu` in Markdown, and their place in a page."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.sides import Measured, Turn

BEGIN, END = "<!-- bench-gpu -->", "<!-- /bench-gpu -->"
REFERENCE = "Hugging Face Trainer, compiled"


@dataclass
class Row:
    """The figures of a side.

    Attributes:
        failure: why there are no figures.
        micro_batch: sequences of a forward and backward pass.
        rates: sequences per second in each round.
        mfu: model FLOPs utilization.
        peak_memory: bytes.
        launches: kernel launches of a step.
        waiting: fraction of the time in which the host waited for batches.
        predicted: sequences per second.
    """

    side: str
    failure: str | None = None
    micro_batch: int | None = None
    rates: list[float] = field(default_factory=list)
    mfu: float | None = None
    peak_memory: int | None = None
    launches: int | None = None
    waiting: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class TakenTurn:
    """A turn that a side has taken.

    Attributes:
        purpose: "warm-up", "measured" or "profiled".
    """

    side: str
    purpose: str
    measured: Measured


@dataclass
class Result:
    """A recipe's table.

    Attributes:
        turns: of all sides, in their order.
    """

    title: str
    batch: int
    rows: list[Row]
    turns: list[TakenTurn] = field(default_factory=list)


def report(found: Mapping[str, str], results: Sequence[Result], turn: Turn, repeats: int) -> str:
    """The text between the markers."""
    head = (
        f"Measured on {found['date']}: {found['device']}; {found['versions']}. Medians of "
        f"{repeats} rounds of {turn.timed} steps."
    )
    return "\n\n".join([head, *(table(result) for result in results)])


def table(result: Result) -> str:
    """A recipe's table in Markdown."""
    columns = (
        "",
        "sequences/s",
        "from, to",
        "times Trainer, compiled",
        "MFU",
        "peak memory, GiB",
        "micro-batch",
        "kernel launches per step",
        "waiting for data",
        "predicted, sequences/s",
    )
    reference = next((row.rates for row in result.rows if row.side == REFERENCE), [])
    lines = [
        f"**{result.title}**, {result.batch} sequences per step:",
        "",
        _line(columns),
        _line(["---"] * len(columns)),
    ]
    for row in result.rows:
        if row.failure is not None:
            reason = row.failure.replace("|", "/")
            lines.append(_line([row.side, reason, *[""] * (len(columns) - 2)]))
            continue
        ratios = [ours / theirs for ours, theirs in zip(row.rates, reference, strict=False)]
        cells = [
            row.side,
            _number(statistics.median(row.rates)),
            f"{_number(min(row.rates))}, {_number(max(row.rates))}",
            f"{statistics.median(ratios):.2f}" if ratios else None,
            None if row.mfu is None else f"{row.mfu:.1%}",
            None if row.peak_memory is None else f"{row.peak_memory / 2**30:.1f}",
            str(row.micro_batch),
            None if row.launches is None else f"{row.launches:,}",
            None if row.waiting is None else f"{row.waiting:.1%}",
            None if row.predicted is None else _number(row.predicted),
        ]
        lines.append(_line([cell or "-" for cell in cells]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def replace_tables(page: Path, text: str) -> None:
    """Replaces what a page has between the markers; makes a page that does not exist.

    Raises:
        SystemExit: it has no markers.
    """
    content = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(
            f"bench-gpu: {page} has no place for the tables. Add the lines {BEGIN} and {END} to "
            "it, or name another file with --page."
        )
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
