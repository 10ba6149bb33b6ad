"""`samestep report`: one self-contained HTML page about one or several runs.

This module reads run folders and downsamples their metrics; page.js plots them. Data of a run is
in the page as JSON only, which the script inserts as text, so no name can be interpreted as HTML.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.config import Tree
from trainer.config.renamed import read_stored
from trainer.errors import ConfigError, DataError
from trainer.monitoring.curves import moving_average
from trainer.monitoring.jsonl import Row, read_rows
from trainer.storage import write_text
from trainer.tasks import TASKS

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = dict[str, tuple[Ints, Floats]]
"""By metric: the indices of the rows that have it, and its values there."""

_SMOOTHING = 50  # a moving average covers 1/50 of a curve
_BUCKETS = 400  # of a curve, about one for each pixel of a chart
MOST_RUNS = 10  # colors that one can tell apart
_MASKED = (
    "mlm",
    "mlm_nsp",
    "mlm_sop",
    "mlm_sbo",
    "replaced_mlm",
    "replaced_tokens",
)  # whose accuracy is of masked positions
_NOT_SMOOTHED = ("train/lr", "heldout/")
_NOT_PLOTTED = ("train/tokens", "train/examples", "perf/eta_seconds", "perf/energy_joules")


def write_report(
    runs: Sequence[str],
    output: Path,
    planned_memory: Callable[[Path], float | None] = lambda run: None,
) -> None:
    """Writes the page. A run may still be running.

    Args:
        runs: at most 10 run folders.
        output: the HTML file.
        planned_memory: returns the peak that `samestep plan` predicts for a run, in GiB of a
            device; None if unknown.

    Raises:
        ConfigError: there are too many runs, or a folder is not a run.
        DataError: no run has metrics.
        StorageError: the file cannot be written.
    """
    if len(runs) > MOST_RUNS:
        raise ConfigError(
            f"a report shows at most {MOST_RUNS} runs, not {len(runs)}; leave some out"
        )
    folders = [Path(run) for run in runs]
    names = _names(folders)
    configs = [_read_config(folder) for folder in folders]
    described = [_describe(*run) for run in zip(folders, names, configs, strict=True)]
    if not any(run["series"] for run in described):
        raise DataError(
            f"{', '.join(runs)} has no metrics yet; train for at least training.log_every steps"
        )
    for run, folder in zip(described, folders, strict=True):
        run["summary"]["planned_memory_gib"] = planned_memory(folder)
    tasks = [_task(folder, config) for folder, config in zip(folders, configs, strict=True)]
    data = {
        "runs": described,
        "settings": _settings(configs),
        # Curves of several tasks in one chart have no name in common.
        "task": tasks[0] if len(set(tasks)) == 1 else None,
        "of_task": all(tasks),
        "masked": all(_objective(config) in _MASKED for config in configs),
    }
    parts = {
        "TITLE": html.escape(" · ".join(names)),
        "STYLE": _resource("page.css"),
        "SCRIPT": _resource("page.js"),
        # Inside <script>, "<" is the only character that could end the script.
        "DATA": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # All in one pass: a name may contain "__DATA__", which must stay as it is.
    pattern = f"__({'|'.join(parts)})__"
    page = re.sub(pattern, lambda found: parts[found[1]], _resource("page.html"))
    write_text(output, page)


def _resource(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _suite_run(folder: Path) -> tuple[str, str] | None:
    """The task and the settings of a run of `samestep finetune-suite`, by its place."""
    # Example: suite/runs/rte/lr-2e-05-seed-0-1f2e3d4c gives "rte" and "lr 2e-05, seed 0".
    place = folder.resolve()
    found = re.fullmatch(r"(.+)-[0-9a-f]{8}", place.name)
    if found is None or place.parents[1].name != "runs" or not (place / "experiment.yaml").exists():
        return None
    settings = re.findall(r"([a-z_]*[a-z])-(\d[\d.]*(?:e[-+]?\d+)?)", found[1])
    words = [f"{name.rpartition('_')[2]} {value}" for name, value in settings]
    words = ["random weights"] * ("scratch-seed" in found[1]) + [
        word.replace("scratch-", "") for word in words
    ]
    return place.parent.name, ", ".join(words)


def _objective(config: Tree) -> str:
    """The kind of the objective that makes the batches, inside of those that wrap it."""
    objective = config.get("objective") or {}
    while isinstance(objective, dict) and isinstance(objective.get("of"), dict | str):
        objective = objective["of"]
    return str(objective.get("kind", "")) if isinstance(objective, dict) else str(objective)


def _task(folder: Path, config: Tree) -> str | None:
    """What the run's curves are named by: the task of its suite, or the kind of the task."""
    if (found := _suite_run(folder)) is not None:
        return found[0]
    kind = _objective(config)
    return kind.replace("_", " ") if kind in TASKS else None


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of runs: of a suite, the task and the settings; else the last part of their paths.

    Where these are equal, as many parts of the paths as make them differ.
    """
    if all(found := [_suite_run(folder) for folder in folders]):
        of_suite = [", ".join(each) for each in found if each is not None]
        if len(set(of_suite)) == len(folders):
            return of_suite
    # Example: a/run and b/run have the same last part, so their names have two parts.
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _read_config(folder: Path) -> Tree:
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is no run (no config.yaml in it); name the output folder of a run"
        )
    return read_stored(folder / "config.yaml")


def _describe(folder: Path, name: str, config: Tree) -> Tree:
    """A run, as page.js reads it."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    starts = list(read_rows(folder / "starts.jsonl"))
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    hours = _hours(np.array([row["time"] for row in rows]), [start["time"] for start in starts])
    # Rows of evaluations have no number of tokens; it is interpolated between their neighbors.
    tokens = np.array([row.get("train/tokens", np.nan) for row in rows])
    known = np.isfinite(tokens)
    if known.any():
        tokens = np.interp(steps, np.append(0, steps[known]), np.append(0, tokens[known]))
    columns = _columns(rows)
    series = {
        metric: _series(*column, smooth=not metric.startswith(_NOT_SMOOTHED))
        for metric, column in columns.items()
        if metric not in _NOT_PLOTTED and not metric.startswith("time/")
    }
    used = _renumber(series.values())
    axes = {"step": steps, "tokens": tokens, "hours": hours}
    return {
        "name": name,
        "path": str(folder.resolve()),
        "summary": _summary(config, columns, axes, starts),
        "axes": {axis: _rounded(values[used]) for axis, values in axes.items()},
        "series": series,
        "shares": _shares(columns, steps),
        "starts": starts,
    }


def _renumber(series: Iterable[Tree]) -> Ints:
    """Renumbers the row indices of curves to the rows that any curve uses; returns these rows."""
    # Example: curves at the rows 10 20 and 20 40 use the rows 10 20 40, and become 0 1 and 1 2.
    places = [curve[key] for curve in series for key in ("at", "mean_at") if key in curve]
    used = np.unique(np.concatenate([np.array([], dtype=np.int64), *places]))
    for rows in places:
        rows[:] = np.searchsorted(used, rows).tolist()
    return used


def _columns(rows: Iterable[Row]) -> Columns:
    """By metric: the indices of the rows that have a finite value, and the values."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for place, row in enumerate(rows):
        for metric, value in row.items():
            is_finite = isinstance(value, int | float) and abs(value) < np.inf
            if is_finite and metric not in ("step", "time"):
                found[metric].append((place, value))
    columns: Columns = {}
    for metric, pairs in found.items():
        places, values = zip(*pairs, strict=True)
        columns[metric] = np.array(places), np.array(values, dtype=np.float64)
    return columns


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
        edges = np.linspace(0, len(values), _BUCKETS + 1).astype(int)
        extremes = [0, len(values) - 1]
        for begin, end in itertools.pairwise(edges):
            bucket = values[begin:end]
            extremes += [begin + bucket.argmin(), begin + bucket.argmax()]
        kept = np.unique(extremes)
    curve: Tree = {"at": places[kept].tolist(), "y": _rounded(values[kept])}
    if smooth and len(values) >= 2 * _SMOOTHING:
        mean = moving_average(values, len(values) // _SMOOTHING)
        kept = np.unique(np.linspace(0, len(values) - 1, _BUCKETS).astype(int))
        curve |= {"mean_at": places[kept].tolist(), "mean": _rounded(mean[kept])}
    return curve


def _shares(columns: Columns, steps: Floats) -> dict[str, float]:
    """Fractions of the run's time by section; each row is weighted by its seconds."""
    if "perf/seconds_per_step" not in columns:
        return {}
    places, per_step = columns["perf/seconds_per_step"]
    seconds, evaluation = np.zeros((2, len(steps)))
    if "time/evaluation" in columns:
        rows, fractions = columns["time/evaluation"]
        evaluation[rows] = fractions
    # seconds_per_step excludes evaluations, whose fraction is of the whole time. Example: 1 s of
    # training in a row that evaluated for 0.9 of its time makes 1 / (1 - 0.9) = 10 s.
    seconds[places] = per_step * np.diff(steps[places], prepend=0)
    seconds /= np.maximum(1 - evaluation, 1e-9)
    total = max(seconds.sum(), 1e-9)
    shares = {}
    for name, (rows, fractions) in columns.items():
        # Communication overlaps the sections, which add up to the whole time.
        if name.startswith("time/") and not name.startswith("time/communication"):
            share = float(fractions @ seconds[rows] / total)
            shares[name.removeprefix("time/")] = round(share, 5)
    return shares


def _summary(
    config: Tree, columns: Columns, axes: dict[str, Floats], starts: Sequence[Row]
) -> dict[str, float | None]:
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
        "steps": config.get("training", {}).get("steps"),
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
        "peak_memory_gib": figure("perf/peak_memory_gib", np.max),
        "peak_rss_gib": figure("perf/peak_rss_gib", np.max),
        "energy_kwh": figure("perf/energy_joules", lambda values: values.sum() / 3.6e6),
        "communication": figure("time/communication_exposed", np.mean),
        "restarts": len(starts) - 1 if starts else None,
    }


def _settings(configs: Sequence[Tree]) -> list[Tree]:
    """All settings: dotted key, value in each run, and whether the values differ."""
    # Runs of different kinds have different settings; a missing one is an empty text.
    flat = [dict(_leaves(config)) for config in configs]
    table = []
    for key in dict.fromkeys(itertools.chain(*flat)):
        values = [settings.get(key, "") for settings in flat]
        # The output folder always differs and is not marked.
        differs = key != "output" and len(set(values)) > 1
        table.append({"key": key, "values": values, "differs": differs})
    return table


def _leaves(
    tree: Tree,
    path: str = "",
) -> Iterator[tuple[str, str]]:
    """The settings of a tree by dotted key; an empty section is a setting, too."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value if isinstance(value, str) else json.dumps(value)


def _rounded(values: Floats) -> list[float | None]:
    """Six significant digits: more than a pixel can show, in half the bytes of all."""
    # JSON has no infinity and no NaN.
    return [float(f"{value:.6g}") if abs(value) < np.inf else None for value in values.tolist()]


def default_output(runs: Sequence[str]) -> Path:
    """The default file: in the run folder, or for several runs in the working folder."""
    folder = runs[0] if len(runs) == 1 else "."
    return Path(folder, "report.html")
