"""The numbers of a study: scores of each arm and seed, differences, and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config import Tree
from trainer.errors import DataError
from trainer.storage import write_text
from trainer.studies.costs import Usage
from trainer.studies.jobs import Job, Jobs
from trainer.studies.row_scores import RowScore, read_row_score
from trainer.studies.statistics import Estimate, detectable, estimate, rows_variance
from trainer.studies.study import Measure, Study

SCORES, COSTS = "scores.json", "costs.json"
_SAME = 1e-6  # between a score and the one computed from its predictions


@dataclass(frozen=True)
class Row:
    """An arm in one measure.

    Attributes:
        values: one for each seed; a seed that shares its job with an earlier one has none.
        mean: over seeds, and the interval of the mean.
        difference: from the baseline, paired by seed; None for the baseline itself.
        rows: whether the intervals include the choice of held-out rows.
    """

    arm: str
    measure: str
    values: Sequence[float]
    mean: Estimate
    difference: Estimate | None
    rows: bool


@dataclass(frozen=True)
class Cost:
    """What an arm has used, jobs that other arms share included.

    Attributes:
        jobs: number of jobs.
        flops: of training.
        kwh, grams: energy and CO2.
    """

    arm: str
    jobs: int
    usage: Usage
    flops: float
    kwh: float
    grams: float


@dataclass(frozen=True)
class Results:
    """The numbers of a study whose jobs are finished, as far as they are.

    Attributes:
        rows: by measure, in the order of the study, then by arm.
        primary: the difference that the study was made for; None if it has not both arms.
        detects: the difference that the study can detect, from the deviation it has found.
        costs: of each arm.
        total: of all jobs, each counted once.
    """

    study: Study
    rows: Sequence[Row]
    primary: Estimate | None
    detects: float | None
    costs: Sequence[Cost]
    total: Cost

    def of(self, measure: str) -> list[Row]:
        """The rows of a measure."""
        return [row for row in self.rows if row.measure == measure]

    def write(self, folder: Path) -> None:
        """Writes scores.json, which depends on the scores alone, and costs.json."""
        scores = {
            "study": self.study.name,
            "baseline": self.study.baseline,
            "rows": [asdict(row) for row in self.rows],
            "primary": None if self.primary is None else asdict(self.primary),
            "detects": self.detects,
        }
        _write(folder / SCORES, scores)
        costs = {"arms": [asdict(cost) for cost in self.costs], "total": asdict(self.total)}
        _write(folder / COSTS, costs)


def _write(file: Path, tree: Tree) -> None:
    write_text(file, json.dumps(tree, indent=1) + "\n")


def collect(study: Study, jobs: Jobs) -> Results:
    """Computes the numbers from the jobs that are finished.

    Raises:
        DataError: a measure names a score that its stage does not have.
    """
    rows = [
        row
        for name, measure in study.config.measures.items()
        for row in _rows(study, jobs, name, measure)
    ]
    primary, stated = None, study.config.primary
    detects = None
    if stated is not None:
        measure = study.config.measures[stated.measure]
        primary = _difference(jobs, measure, stated.arms[1], stated.arms[0], study.config.seeds)
        if primary is not None and primary.deviation:
            detects = detectable(primary.deviation, study.config.seeds)
    costs = [_cost(study, arm, jobs.of_arm(arm)) for arm in study.config.arms]
    return Results(study, rows, primary, detects, costs, _cost(study, "all", jobs.all))


def _rows(study: Study, jobs: Jobs, name: str, measure: Measure) -> list[Row]:
    found = []
    for arm in study.config.arms:
        used = _distinct(jobs, measure, arm, study.config.seeds)
        if not used:
            continue
        values = [_score(job, measure) for job in used.values()]
        scores = [_row_score(job, measure) for job in used.values()]
        known = [score for score in scores if score is not None]
        has_rows = len(known) == len(scores)
        variance = rows_variance([(score, None) for score in known]) if has_rows else 0.0
        difference = None
        if arm != study.baseline:
            difference = _difference(jobs, measure, arm, study.baseline, study.config.seeds)
        mean = estimate(values, variance)
        found.append(Row(arm, name, values, mean, difference, has_rows))
    return found


def _distinct(jobs: Jobs, measure: Measure, arm: str, seeds: int) -> dict[int, Job]:
    """The finished jobs of an arm, by the first seed that has each."""
    found: dict[int, Job] = {}
    for seed in range(seeds):
        job = jobs.of.get((arm, seed, measure.stage))
        if job is not None and job not in found.values() and job.result() is not None:
            found[seed] = job
    return found


def _difference(
    jobs: Jobs, measure: Measure, arm: str, baseline: str, seeds: int
) -> Estimate | None:
    """The mean of an arm's score minus the baseline's, over the seeds that both have."""
    ours, theirs = (_distinct(jobs, measure, name, seeds) for name in (arm, baseline))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs:
        return None
    values = [_score(one, measure) - _score(other, measure) for one, other in pairs]
    scores = [(_row_score(one, measure), _row_score(other, measure)) for one, other in pairs]
    known = [(one, other) for one, other in scores if one is not None and other is not None]
    comparable = len(known) == len(pairs) and len({len(each.rows) for each in sum(known, ())}) == 1
    return estimate(values, rows_variance(known) if comparable else 0.0)


def _score(job: Job, measure: Measure) -> float:
    result = job.result()
    assert result is not None
    if measure.name not in result.scores:
        raise DataError(
            f"{job.folder} has no score {measure.name!r}. Use one of {', '.join(result.scores)}."
        )
    value = result.scores[measure.name]
    return value if math.isfinite(value) else math.nan


def _row_score(job: Job, measure: Measure) -> RowScore | None:
    """The score as a function of rows, if it is the one that the run has reported."""
    file = job.config.predictions(job.folder)
    found = None if file is None else read_row_score(file, measure.name)
    if found is None or abs(found.value - _score(job, measure)) > _SAME:
        return None
    return found


def _cost(study: Study, arm: str, jobs: Sequence[Job]) -> Cost:
    results = [result for job in jobs if (result := job.result()) is not None]
    settings = study.config.costs
    usages = [result.usage for result in results]
    total = Usage(
        seconds=sum(usage.seconds for usage in usages),
        cpu_seconds=sum(usage.cpu_seconds for usage in usages),
        device_joules=sum(usage.device_joules for usage in usages),
        cpu_joules=_sum_or_none([usage.cpu_joules for usage in usages]),
    )
    return Cost(
        arm,
        len(results),
        total,
        sum(result.flops for result in results),
        sum(map(settings.kwh, usages)),
        sum(map(settings.grams, usages)),
    )


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def curve(job: Job, metric: str, against: str) -> tuple[list[float], list[float]]:
    """Returns the evaluations of a run during training: places on the axis, and values."""
    from trainer.monitoring.jsonl import read_rows

    places: dict[int, float] = {}
    xs: list[float] = []
    ys: list[float] = []
    for row in read_rows(job.folder / job.config.product / "metrics.jsonl"):
        step = row["step"]
        if f"train/{against}" in row:
            places[step] = row[f"train/{against}"]
        if metric in row:
            at = float(step) if against == "step" else places.get(step)
            if at is not None:
                xs.append(at)
                ys.append(row[metric])
    return xs, ys
