"""The table of a suite's results, for a terminal and as an HTML page."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from rich import box
from rich.table import Table

from trainer.finetune.runs import Run
from trainer.finetune.suite import Result
from trainer.finetune.task import Task
from trainer.storage import write_text

_HEADINGS = ("task", "score", "median", "range", "std", "runs", "settings", "published")
_REPEATED = ("task", "runs", "settings")  # equal in all rows of a task, shown in the first


@dataclass(frozen=True)
class Row:
    """A metric of a task, for the point of the grid with the best median score.

    Attributes:
        scratch: whether these runs start from random weights.
        values: of the runs that are not degenerate, or of all if all are.
        runs: number of runs, including degenerate ones.
        degenerate: number of runs that are no better than chance (Mosbach et al. 2021).
        settings: of the grid, if it has several values for one.
    """

    task: Task
    metric: str
    scratch: bool
    values: Sequence[float]
    runs: int
    degenerate: int
    settings: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.task.name}, random" if self.scratch else self.task.name

    @property
    def published(self) -> float | None:
        """What others have reported, in percent; with random weights, nothing is comparable."""
        return None if self.scratch else self.task.config.published.get(self.metric)

    def columns(self) -> tuple[str, ...]:
        """The row as text, with scores in percent."""
        spread = statistics.stdev(self.values) if len(self.values) > 1 else 0.0
        settings = []
        for name, value in self.settings.items():
            last_word = name.rpartition("_")[2].rpartition(".")[2]  # global_batch_size: size
            settings.append(f"{last_word} {value:g}")
        return (
            self.name,
            self.metric,
            f"{100 * statistics.median(self.values):.1f}",
            f"{100 * min(self.values):.1f}-{100 * max(self.values):.1f}",
            f"{100 * spread:.1f}",
            f"{self.runs - self.degenerate} of {self.runs}" if self.degenerate else str(self.runs),
            ", ".join(settings),
            "" if self.published is None else f"{self.published:g}",
        )


def summarise(
    tasks: Sequence[Task], runs: Sequence[Run], results: Mapping[str, Result]
) -> list[Row]:
    """Returns the rows of each task, first of the score that its runs are compared by.

    Args:
        tasks: in the order of the rows.
        runs: of these tasks.
        results: by the digest of the run; results of other runs are ignored.
    """
    rows: list[Row] = []
    for task, scratch in itertools.product(tasks, (False, True)):
        of_task = [run for run in runs if (run.task, run.scratch) == (task.name, scratch)]
        rows += _rows_of(task, of_task, results)
    return rows


def _rows_of(
    task: Task,
    runs: Sequence[Run],
    results: Mapping[str, Result],
) -> Iterator[Row]:
    points: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.digest in results:
            points[str(run.settings)].append(run)
    if not points:
        return

    def score(run: Run) -> float:
        return results[run.digest].scores[run.score]

    def learned(point: Sequence[Run]) -> list[Run]:
        return [run for run in point if score(run) > run.chance + 1e-6]

    # Example: with values 0.7, 0.9 and 0.5 where chance is 0.5, the median is 0.8 of "2 of 3".
    # A degenerate run is a failure to train (it often happens with few rows) and says nothing
    # about the others, so the median leaves it out and the table counts it.
    best = max(
        points.values(),
        key=lambda point: statistics.median(map(score, learned(point) or point)),
    )
    first, counted = best[0], learned(best) or best
    varied = {
        name: value
        for name, value in first.settings.items()
        if any(run.settings[name] != value for run in runs)
    }
    # The score that runs are compared by comes first, and once.
    names = list(dict.fromkeys((first.score, *first.metrics)))
    metrics = [f"{prefix}{name}" for prefix in _prefixes(task) for name in names]
    for metric in metrics:
        scores = [results[run.digest].scores for run in counted]
        values = [of_run[metric] for of_run in scores if metric in of_run]
        if values:  # a task file's `also` may be newer than the results
            degenerate = len(best) - len(learned(best))
            yield Row(task, metric, first.scratch, values, len(best), degenerate, varied)


def _prefixes(task: Task) -> list[str]:
    """Of metrics: none for the task's own held-out rows, and one for each further set."""
    return ["", *(f"{name}/" for name in task.also)]


def as_table(rows: Sequence[Row]) -> Table:
    """Returns the table for a terminal."""
    headings, *lines = _columns(rows)
    table = Table(*headings, box=box.SIMPLE)
    for line in lines:
        table.add_row(*line)
    return table


def _columns(rows: Sequence[Row]) -> list[list[str]]:
    """The headings and the text of each row, without repetitions and empty columns."""
    lines = [list(row.columns()) for row in rows]
    for above, row, line in zip(rows, rows[1:], lines[1:], strict=False):
        if row.name == above.name:
            for name in _REPEATED:
                line[_HEADINGS.index(name)] = ""
    # A suite without a grid or published scores needs no column for them.
    shown = [any(column) for column in zip(*lines, strict=True)] or [True] * len(_HEADINGS)
    return [list(itertools.compress(line, shown)) for line in (_HEADINGS, *lines)]


def notes(rows: Sequence[Row]) -> str:
    """Returns what a reader of the table has to know about its numbers."""
    text = "Scores are percentages of the held-out rows, of the runs that learnt something"
    if any(row.degenerate for row in rows):
        text += "; the others scored no more than a constant answer"
    if any(row.task.config.evaluations > 1 for row in rows):
        text += "; of several evaluations of a run, the best counts"
    tasks_of: dict[str, list[str]] = defaultdict(list)  # by who has published scores
    for row in rows:
        tasks = tasks_of[row.task.config.published_by]
        if row.published is not None and row.name not in tasks:
            tasks.append(row.name)
    sources = [f"{', '.join(tasks)}: {who}" for who, tasks in tasks_of.items() if tasks]
    return f"{text}. Published: {'; '.join(sources)}." if sources else f"{text}."


def write_page(
    rows: Sequence[Row],
    title: str,
    file: Path,
) -> None:
    """Writes the table as an HTML page."""
    headings, *lines = _columns(rows)
    page = jinja2.Template(_PAGE, autoescape=True, keep_trailing_newline=True)
    content = page.render(title=title, notes=notes(rows), headings=headings, lines=lines)
    write_text(file, content)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 70rem }
table { border-collapse: collapse; width: 100% }
th, td { padding: .3rem .6rem; text-align: right }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
td { border-top: 1px solid #ddd }
td:first-child:empty, td:first-child:empty ~ td { border-top: 0 }
tbody { border-top: 2px solid #444; border-bottom: 1px solid #ddd }
</style>
<h1>{{ title }}</h1>
<p>{{ notes }}</p>
<table><thead><tr>{% for name in headings %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for line in lines -%}
<tr>{% for text in line %}<td>{{ text }}</td>{% endfor %}</tr>
{% endfor -%}
</tbody></table></html>
"""
