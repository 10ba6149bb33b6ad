"""The rows of a suite's results and their statistics, and the table for a terminal."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from trainer.studies.finetune.runs import Run
from trainer.studies.finetune.suite import Result, ranked
from trainer.studies.finetune.task import Task
from trainer.studies.statistics import estimate

HEADINGS = (
    *("task", "score", "mean", "std", "95 % interval", "constant", "learned", "of each seed"),
    *("settings", "published"),
)
_REPEATED = ("task", "learned", "settings")  # equal in all rows of a point, shown in the first
_MOST_SEEDS = 8  # whose scores a terminal has room for


@dataclass(frozen=True)
class Row:
    """A metric of a task at a point of its grid.

    Attributes:
        scratch: whether these runs start from random weights.
        runs: of the point, one for each seed; those that have the metric.
        values: of these runs.
        constant: the score of a constant answer.
        learned: number of runs that have learned something; see `upper_end`.
        settings: of the grid, if it has several values for one.
        best: whether the point is the task's best, or the only one.
        published: the score that others have reported, in percent; None if none is comparable.
    """

    task: Task
    metric: str
    scratch: bool
    runs: Sequence[Run]
    values: Sequence[float]
    constant: float
    learned: int
    settings: Mapping[str, float]
    best: bool
    published: float | None

    @property
    def name(self) -> str:
        return f"{self.task.name}, random" if self.scratch else self.task.name

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean over seeds, by Student's t; None for a single seed."""
        found = estimate(self.values)
        return None if found.low is None or found.high is None else (found.low, found.high)

    @property
    def shown_settings(self) -> str:
        return ", ".join(f"{short(name)} {value:g}" for name, value in self.settings.items())

    def columns(self) -> tuple[str, ...]:
        """The row as text, with scores in percent."""
        several = len(self.values) > 1
        return (
            self.name,
            self.metric,
            percent(self.mean),
            percent(statistics.stdev(self.values)) if several else "",
            "{} to {}".format(*map(percent, self.interval)) if self.interval else "",
            percent(self.constant),
            f"{self.learned} of {len(self.runs)}",
            self._seeds() if several else "",
            self.shown_settings,
            "" if self.published is None else f"{self.published:g}",
        )

    def _seeds(self) -> str:
        if len(self.values) > _MOST_SEEDS:
            return f"{percent(min(self.values))} to {percent(max(self.values))}"
        return " ".join(map(percent, self.values))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def short(name: str) -> str:
    """The last word of a setting: global_batch_size -> size."""
    return name.rpartition("_")[2].rpartition(".")[2]


def summarize(
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
        return ranked(results[run.digest].scores[run.score])

    # The median chooses the point: it forgives a single run that has failed to train. The rows
    # leave out no run: which ones have failed is known by their scores only, and a mean without
    # low scores would be too high.
    best = max(points.values(), key=lambda point: statistics.median(map(score, point)))
    first = best[0]
    # The score that runs are compared by comes first, and once. Of other points it is enough.
    names = list(dict.fromkeys((first.score, *first.metrics)))
    metrics = [f"{prefix}{name}" for prefix in _prefixes(task) for name in names]
    yield from _of_point(task, best, runs, results, metrics, best=True)
    for point in points.values():
        if point is not best:
            yield from _of_point(task, point, runs, results, [first.score], best=False)


def _of_point(
    task: Task,
    point: Sequence[Run],
    runs: Sequence[Run],
    results: Mapping[str, Result],
    metrics: Sequence[str],
    best: bool,
) -> Iterator[Row]:
    first = point[0]
    varied = {
        name: value
        for name, value in first.settings.items()
        if any(run.settings[name] != value for run in runs)
    }
    learned = sum(results[run.digest].scores[run.score] > run.learns_above for run in point)
    # With random weights, nothing that others have reported is comparable.
    published = task.published if first.comparable and not first.scratch else {}
    for metric in metrics:
        having = [run for run in point if metric in results[run.digest].scores]
        if having:  # a task file's `also` may be newer than the results
            yield Row(
                task,
                metric,
                first.scratch,
                having,
                [results[run.digest].scores[metric] for run in having],
                first.constants[metric],
                learned,
                varied,
                best,
                published.get(metric),
            )


def _prefixes(task: Task) -> list[str]:
    """Of metrics: none for the task's own held-out rows, and one for each further set."""
    return ["", *(f"{name}/" for name in task.also)]


def as_table(rows: Sequence[Row]) -> Table:
    """Returns the table for a terminal."""
    headings, *lines = columns(rows)
    table = Table(*headings, box=box.SIMPLE)
    for line in lines:
        table.add_row(*line)
    return table


def columns(rows: Sequence[Row]) -> list[list[str]]:
    """The headings and the text of each row, without repetitions and empty columns."""
    lines = [list(row.columns()) for row in rows]
    for above, row, line in zip(rows, rows[1:], lines[1:], strict=False):
        if row.name == above.name:
            line[HEADINGS.index("task")] = ""
            if row.settings == above.settings:
                for name in _REPEATED:
                    line[HEADINGS.index(name)] = ""
    # A suite without a grid, several seeds or published scores needs no column for them.
    shown = [any(column) for column in zip(*lines, strict=True)] or [True] * len(HEADINGS)
    return [list(itertools.compress(line, shown)) for line in (HEADINGS, *lines)]


def notes(rows: Sequence[Row]) -> str:
    """Returns the explanation of the table's numbers."""
    text = (
        "Scores are percentages of the held-out rows, of all runs. constant: the best score of the "
        "same answer to every row. learned: runs whose selecting score exceeds it by more than "
        "chance explains (Wilson's 95 % interval over the held-out rows; for correlations, 1.96 / "
        "sqrt(rows))"
    )
    if any(row.interval for row in rows):
        text += "; 95 % interval: of the mean over seeds, by Student's t"
    if not all(row.best for row in rows):
        text += "; the settings with the best median come first, chosen by these same rows"
    if any(row.task.config.evaluations > 1 for row in rows):
        text += "; of several evaluations of a run, the best counts"
    tasks_of: dict[str, list[str]] = defaultdict(list)  # by who has published scores
    for row in rows:
        tasks = tasks_of[row.task.config.published_by]
        if row.published is not None and row.name not in tasks:
            tasks.append(row.name)
    sources = [f"{', '.join(tasks)}: {who}" for who, tasks in tasks_of.items() if tasks]
    return f"{text}. Published: {'; '.join(sources)}." if sources else f"{text}."
