"""The table of a suite's results, for a terminal and as a page."""

from __future__ import annotations

import html
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from trainer.finetune.runs import Run
from trainer.finetune.suite import Result
from trainer.finetune.task import Task
from trainer.storage import write_text

_HEADINGS = ("task", "score", "median", "range", "std", "runs", "settings", "published")
_OF_RUNS = ("task", "runs", "settings")
"""The columns that are the same for all scores of a task."""


@dataclass(frozen=True)
class Row:
    """A metric of a task, of the settings whose median is best by the task's score.

    Attributes:
        task, metric: which.
        scratch: whether these runs start from random weights.
        values: of the runs that are not degenerate, or of all where all are.
        runs: how many there are, degenerate ones included.
        degenerate: how many of them are no better than chance.
        settings: of the grid, where it has several values for one.
        published: what others have reported; None where nobody is named.
        published_by: who.
        evaluations: how many a run has, of which the best counts.
    """

    task: str
    metric: str
    scratch: bool
    values: Sequence[float]
    runs: int
    degenerate: int
    settings: Mapping[str, float]
    published: float | None
    published_by: str
    evaluations: int

    def columns(self) -> tuple[str, ...]:
        """As text; scores in percent."""
        spread = statistics.stdev(self.values) if len(self.values) > 1 else 0.0
        return (
            f"{self.task}, random" if self.scratch else self.task,
            self.metric,
            f"{100 * statistics.median(self.values):.1f}",
            f"{100 * min(self.values):.1f}-{100 * max(self.values):.1f}",
            f"{100 * spread:.1f}",
            f"{self.runs - self.degenerate} of {self.runs}" if self.degenerate else str(self.runs),
            ", ".join(
                f"{name.rpartition('_')[2].rpartition('.')[2]} {value:g}"
                for name, value in self.settings.items()
            ),
            "" if self.published is None else f"{self.published:g}",
        )


def summarise(
    tasks: Sequence[Task], runs: Sequence[Run], results: Mapping[str, Result]
) -> list[Row]:
    """A row for each task and each of its metrics, that by which runs are compared first.

    Then the scores of further rows.

    Args:
        tasks: in the order of the rows.
        runs: theirs.
        results: results by digest of the run; results of other runs are ignored.
    """
    return [
        row
        for task in tasks
        for scratch in (False, True)
        for row in _rows_of(
            task, [run for run in runs if (run.task, run.scratch) == (task.name, scratch)], results
        )
    ]


def _rows_of(task: Task, runs: Sequence[Run], results: Mapping[str, Result]) -> Iterator[Row]:
    points: dict[tuple[tuple[str, float], ...], list[Run]] = {}
    for run in runs:
        if run.digest in results:
            points.setdefault(tuple(run.settings.items()), []).append(run)
    if not points:
        return

    def learnt(point: Sequence[Run]) -> Sequence[Run]:
        return [run for run in point if results[run.digest].scores[run.score] > run.chance + 1e-6]

    def compared(point: Sequence[Run]) -> float:
        return statistics.median(
            results[run.digest].scores[run.score] for run in learnt(point) or point
        )

    best = max(points.values(), key=compared)
    varied = {name for name in best[0].settings if len({run.settings[name] for run in runs}) > 1}
    config = task.config
    names = dict.fromkeys((config.score, *best[0].metrics))  # as a set, but in this order
    for metric in (
        f"{prefix}{name}" for prefix in ("", *(f"{also}/" for also in task.also)) for name in names
    ):
        found = [results[run.digest].scores.get(metric) for run in learnt(best) or best]
        values = [value for value in found if value is not None]
        if not values:  # such as of further rows, where a task that is based on another has none
            continue
        yield Row(
            task=task.name,
            metric=metric,
            scratch=best[0].scratch,
            values=values,
            runs=len(best),
            degenerate=len(best) - len(learnt(best)),
            settings={name: value for name, value in best[0].settings.items() if name in varied},
            published=None if best[0].scratch else config.published.get(metric),
            evaluations=config.evaluations,
            published_by=config.published_by,
        )


def as_table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    headings, *lines = _columns(rows)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in headings:
        wraps = name in ("task", "settings")  # where a terminal is narrow
        table.add_column(
            name, no_wrap=not wraps, overflow="fold", min_width=10 if name == "settings" else None
        )
    for row in lines:
        table.add_row(*row)
    return table


def _columns(rows: Sequence[Row]) -> list[list[str]]:
    """The headings and the texts of each row, without columns that are empty, and without what the
    row above says.
    """
    lines: list[Sequence[str]] = [_HEADINGS]
    for above, row in zip([None, *rows], rows, strict=False):
        same = above is not None and (above.task, above.scratch) == (row.task, row.scratch)
        of_heading = zip(_HEADINGS, row.columns(), strict=True)
        lines.append(["" if same and name in _OF_RUNS else text for name, text in of_heading])
    full = [any(column) for column in zip(*lines[1:], strict=True)] or [True] * len(_HEADINGS)
    return [list(itertools.compress(line, full)) for line in lines]


def notes(rows: Sequence[Row]) -> str:
    """What a reader of the table has to know."""
    compared: dict[
        str, dict[str, None]
    ] = {}  # the tasks of each who has published, in the order of the rows
    for row in rows:
        if row.published is not None:
            compared.setdefault(row.published_by, {})[row.task] = None
    whose = "; ".join(f"{', '.join(tasks)}: {who}" for who, tasks in compared.items())
    return (
        "Scores are percentages of the held-out rows, of the runs that learnt something"
        + (
            "; the others scored no more than a constant answer"
            if any(row.degenerate for row in rows)
            else ""
        )
        + (
            "; of several evaluations of a run, the best counts"
            if any(row.evaluations > 1 for row in rows)
            else ""
        )
        + (f". Published: {whose}." if whose else ".")
    )


def write_page(rows: Sequence[Row], title: str, file: Path) -> None:
    """Writes the table as a page of its own."""
    headings, *lines = _columns(rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in lines
    )
    write_text(
        file,
        _PAGE.format(
            title=html.escape(title), notes=html.escape(notes(rows)), head=head, body=body
        ),
    )


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 70rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ padding: .3rem .6rem; text-align: right }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left }}
td {{ border-top: 1px solid #ddd }}
td:first-child:empty, td:first-child:empty ~ td {{ border-top: 0 }}
tbody {{ border-top: 2px solid #444; border-bottom: 1px solid #ddd }}
</style>
<h1>{title}</h1>
<p>{notes}</p>
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></html>
"""
