"""The metrics of a run for the page, read from its folder as they are appended."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from samestep.config import Tree
from samestep.errors import SamestepError
from samestep.stored_json import Count, JsonError, Measure, checked, read_json
from samestep.untrusted import read_stored
from trainer.monitoring.curves import moving_average
from trainer.monitoring.jsonl import (
    ALERTS,
    CLASSES,
    Row,
    RowReader,
    parse_alert,
    parse_ledger_row,
    parse_start,
)
from trainer.monitoring.report.status import Ledger, state_of

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = dict[str, tuple[Ints, Floats]]
"""By metric: the indices of the rows that have it, and its values there."""

_SMOOTHING = 50  # a moving average covers 1/50 of a curve
_BUCKETS = 400  # of a curve, about one for each pixel of a chart
_NOT_SMOOTHED = ("train/lr", "heldout/", "probe/")
_ETA = ("perf/eta_seconds", "perf/eta_low_seconds", "perf/eta_high_seconds")
_NOT_PLOTTED = ("train/tokens", "train/examples", "train/flops", "perf/energy_joules", *_ETA)


class _ClassScores(TypedDict):
    precision: Measure
    recall: Measure
    f1: Measure
    support: Count


class _Confusion(TypedDict):
    label: str
    prediction: str
    count: Count


class _Classes(TypedDict):
    """The content of classes.json."""

    step: Count
    of: str
    classes: dict[str, _ClassScores]
    averages: dict[str, _ClassScores]
    confusion: NotRequired[list[list[Count]]]
    largest_confusions: NotRequired[list[_Confusion]]


class RunFolder:
    """A run: `read` takes in what its process has written since the last call.

    Attributes:
        folder: need not exist yet.
        config: resolved settings; empty before the run's first start.
        planned_memory: GiB of a device, see `write_report`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Tree = {}
        self.planned_memory: float | None = None
        self._metrics = RowReader(folder / "metrics.jsonl")
        self._starts = RowReader(folder / "starts.jsonl", parse_start)
        self._alerts = RowReader(folder / ALERTS, parse_alert)
        self._fed = RowReader(folder / "ledger.jsonl", parse_ledger_row)
        self._rows = _Rows()
        self._ledger = Ledger()
        self._changed: float | None = None  # monotonic time of the last new row
        self._started: list[Row] = []
        self._alerted: list[Row] = []

    def read(self) -> None:
        """Reads new rows; of a run that went back to a checkpoint, all rows again."""
        is_new = False
        for rows, replaced in self._metrics.pieces():
            self._rows = _Rows() if replaced else self._rows
            self._rows.add(rows)
            is_new = is_new or bool(rows)
        if is_new:
            # How old the first rows are, only the clocks can tell, which may differ between
            # machines and be set. From then on, this process has seen rows come.
            times, is_first = self._rows.times, self._changed is None
            age = max(0.0, time.time() - times[-1]) if is_first else 0.0
            self._changed = time.monotonic() - age
        for rows, replaced in self._fed.pieces():
            self._ledger = Ledger() if replaced else self._ledger
            self._ledger.add(rows)
        starts = self._started
        self._started = _extended(self._started, self._starts)
        self._alerted = _extended(self._alerted, self._alerts)
        # Written at each start, before the row of starts.jsonl.
        if self._started != starts or not self.config:
            try:
                self.config = read_stored(self.folder / "config.yaml")
            except (OSError, SamestepError):  # not started yet, or half written
                self.config = self.config or {}

    def describe(self, name: str) -> Tree:
        """The run, as page.js reads it."""
        rows, starts = self._rows, self._started
        steps, times = np.array(rows.steps, dtype=np.float64), np.array(rows.times)
        hours = _hours(times, [start["time"] for start in starts])
        columns = rows.columns()
        tokens = np.full(len(steps), np.nan)
        if "train/tokens" in columns:
            # Rows of evaluations have no number of tokens; it is interpolated between their
            # neighbors.
            known, counts = columns["train/tokens"]
            tokens = np.interp(steps, np.append(0, steps[known]), np.append(0, counts))
        series = {
            metric: _series(*column, smooth=not metric.startswith(_NOT_SMOOTHED))
            for metric, column in columns.items()
            if metric not in _NOT_PLOTTED and not metric.startswith("time/")
        }
        used = _renumber(series.values())
        axes = {"step": steps, "tokens": tokens, "hours": hours}
        summary = self._summary(columns, axes)
        return {
            "name": name,
            "path": str(self.folder.resolve()),
            "summary": summary,
            "status": {
                "state": self._state(summary, times),
                "time": float(times[-1]) if len(times) else None,
                "eta": [self._last_row(columns, name) for name in _ETA],
                "slowest_rank": self._last_row(columns, "perf/slowest_rank"),
                "slowest_rank_lag": self._last_row(columns, "perf/slowest_rank_lag"),
            },
            "axes": {axis: _rounded(values[used]) for axis, values in axes.items()},
            "series": series,
            "shares": _shares(columns, steps, starts[0]["step"] if starts else 0),
            "classes": self._classes(),
            "starts": starts,
            "ledger": self._ledger.describe([start["step"] for start in starts]),
            "faults": sorted(
                [*self._alerted, *self._ledger.faults, *self._damage(rows)],
                key=lambda row: row["time"],
            ),
        }

    def _classes(self) -> Tree | None:
        """The newest scores of classes by `samestep evaluate`; None if there are none."""
        try:
            return dict(read_json(self.folder / CLASSES, _Classes))
        except (OSError, JsonError, SamestepError):  # none, or a stranger's
            return None

    def _state(self, summary: Tree, times: Floats) -> str:
        age = 0.0 if self._changed is None else time.monotonic() - self._changed
        return state_of(self.folder, summary, times, self._started, self._alerted, age)

    def _damage(self, rows: _Rows) -> Iterator[Row]:
        """The lines that are no rows: the first of each file, and their number."""
        last = {"step": int(rows.steps[-1]), "time": rows.times[-1]} if len(rows.steps) else {}
        for reader in (self._metrics, self._starts, self._alerts, self._fed):
            if reader.damaged:
                text = f"{reader.damaged} ({reader.damaged_lines} in all)"
                yield {
                    "step": 0,
                    "time": 0.0,
                    **last,
                    "level": "WARN",
                    "title": "Damaged lines are skipped",
                    "text": text,
                }

    def _last_row(self, columns: Columns, metric: str) -> float | None:
        """The value of a metric in the last row of training; None if that row lacks it."""
        if metric not in columns or "train/loss" not in columns:
            return None
        places, values = columns[metric]
        return float(values[-1]) if places[-1] == columns["train/loss"][0][-1] else None

    def _summary(self, columns: Columns, axes: dict[str, Floats]) -> dict[str, float | None]:
        """The run's row of the summary table; None for unknown figures."""

        def figure(
            metric: str,
            reduce: Callable[[Floats], float],
        ) -> float | None:
            return float(reduce(columns[metric][1])) if metric in columns else None

        def last(axis: str) -> float | None:
            values = axes[axis]
            return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None

        return {
            "step": int(last("step") or 0),
            "steps": _steps(self.config),
            "train_loss": figure(
                "train/loss", lambda values: values[-max(1, len(values) // _SMOOTHING) :].mean()
            ),
            "heldout_loss": figure("heldout/loss", lambda values: values[-1]),
            "best_heldout_loss": figure("heldout/loss", np.min),
            "tokens": last("tokens"),
            "hours": last("hours"),
            "tokens_per_second": figure("perf/tokens_per_second", np.median),
            "mfu": figure("perf/mfu", np.median),
            "mfu_useful": figure("perf/mfu_useful", np.median),
            "padding": figure("data/padding_fraction", np.mean),
            "planned_memory_gib": self.planned_memory,
            "peak_memory_gib": figure("perf/peak_memory_gib", np.max),
            "peak_rss_gib": figure("perf/peak_rss_gib", np.max),
            "energy_kwh": figure("perf/energy_joules", lambda values: values.sum() / 3.6e6),
            "communication": figure("time/communication_exposed", np.mean),
            "restarts": len(self._started) - 1 if self._started else None,
        }


def _extended(rows: list[Row], reader: RowReader) -> list[Row]:
    """Returns all rows of a file: those that were read before, and new ones."""
    found = None
    for new, replaced in reader.pieces():
        if found is None or replaced:
            found = [] if replaced else [*rows]
        found += new
    return found or []


def _steps(config: Tree) -> int | None:
    """Number of steps in a stored configuration; None if it has none, or something else there."""
    try:
        return checked(config, _Experiment).get("training", {}).get("steps")
    except JsonError:
        return None


class _Training(TypedDict, total=False):
    steps: Count


class _Experiment(TypedDict, total=False):
    training: _Training


class _Rows:
    """Rows of metrics by column, which grow."""

    def __init__(self) -> None:
        self.steps, self.times = array("d"), array("d")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            place = len(self.steps)
            self.steps.append(row["step"])
            self.times.append(row["time"])
            for metric, value in row.items():
                is_finite = isinstance(value, int | float) and abs(value) < np.inf
                if is_finite and metric not in ("step", "time"):
                    places, values = self._columns.setdefault(metric, (array("q"), array("d")))
                    places.append(place)
                    values.append(value)

    def columns(self) -> Columns:
        """By metric: the indices of the rows that have a finite value, and the values."""
        # Copies: an array cannot grow while numpy has a view of it.
        return {
            metric: (np.array(places, dtype=np.int64), np.array(values, dtype=np.float64))
            for metric, (places, values) in self._columns.items()
        }


def _renumber(series: Iterable[Tree]) -> Ints:
    """Renumbers the row indices of curves to the rows that any curve uses; returns these rows."""
    # Example: curves at the rows 10 20 and 20 40 use the rows 10 20 40, and become 0 1 and 1 2.
    places = [curve[key] for curve in series for key in ("at", "mean_at") if key in curve]
    used = np.unique(np.concatenate([np.array([], dtype=np.int64), *places]))
    for rows in places:
        rows[:] = np.searchsorted(used, rows).tolist()
    return used


def _hours(times: Floats, starts: Sequence[float]) -> Floats:
    """Hours of training up to each row, without the pauses between an end and the next start.

    For example, starts at 10:00 and 12:00 and rows at 10:30, 12:15 and 12:45 give 0.5, 0.75 and
    1.25.
    """
    if not len(times):
        return times
    begins = np.array([start for start in starts if start <= times[0]][-1:] or times[:1])
    begins = np.append(begins, [start for start in starts if start > times[0]])
    # Rows before the first start can occur when a clock was set back.
    session = np.maximum(np.searchsorted(begins, times, side="right") - 1, 0)
    elapsed = np.maximum(times - begins[session], 0)
    length = np.zeros(len(begins))
    np.fmax.at(length, session, elapsed)
    before: Floats = np.cumsum(length) - length
    hours: Floats = (before[session] + elapsed) / 3600
    return hours


def _series(places: Ints, values: Floats, smooth: bool) -> Tree:
    """A curve of at most 2 x `_BUCKETS` points: the minimum and maximum of each, so peaks stay.

    Returns:
        Row indices "at" and values "y"; with enough rows also a moving average, "mean_at" and
        "mean".
    """
    kept = np.arange(len(values))
    if len(values) > 2 * _BUCKETS:
        # Buckets of equal width as rows of a matrix. The last value fills up the last row: 7
        # values in buckets of 3 are 1 2 3, 4 5 6 and 7 7 7.
        width = -(-len(values) // _BUCKETS)
        buckets = np.pad(values, (0, -len(values) % width), mode="edge").reshape(-1, width)
        begins = width * np.arange(len(buckets))
        extremes = [begins + buckets.argmin(axis=1), begins + buckets.argmax(axis=1)]
        kept = np.unique(np.concatenate([[0, len(values) - 1], *extremes]))
    curve: Tree = {"at": places[kept].tolist(), "y": _rounded(values[kept])}
    if smooth and len(values) >= 2 * _SMOOTHING:
        mean = moving_average(values, len(values) // _SMOOTHING)
        kept = np.unique(np.linspace(0, len(values) - 1, _BUCKETS).astype(int))
        curve |= {"mean_at": places[kept].tolist(), "mean": _rounded(mean[kept])}
    return curve


def _shares(columns: Columns, steps: Floats, first: float) -> dict[str, float]:
    """Fractions of the run's time by section; each row is weighted by its seconds.

    Args:
        first: step at which the run began; not 0 if it continues another one.
    """
    if "perf/seconds_per_step" not in columns:
        return {}
    places, per_step = columns["perf/seconds_per_step"]
    seconds, evaluation = np.zeros((2, len(steps)))
    if "time/evaluation" in columns:
        rows, fractions = columns["time/evaluation"]
        evaluation[rows] = fractions
    # seconds_per_step excludes evaluations, whose fraction is of the whole time. Example: 1 s of
    # training in a row that evaluated for 0.9 of its time makes 1 / (1 - 0.9) = 10 s.
    seconds[places] = per_step * np.diff(steps[places], prepend=first)
    seconds /= np.maximum(1 - evaluation, 1e-9)
    total = max(seconds.sum(), 1e-9)
    shares = {}
    for name, (rows, fractions) in columns.items():
        # Communication overlaps the sections, which add up to the whole time.
        if name.startswith("time/") and not name.startswith("time/communication"):
            share = float(fractions @ seconds[rows] / total)
            shares[name.removeprefix("time/")] = round(share, 5)
    return shares


def _rounded(values: Floats) -> list[float | None]:
    """Six significant digits: more than a pixel can show, in half the bytes of all."""
    # JSON has no infinity and no NaN.
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in values.tolist()]
