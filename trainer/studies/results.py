"""The numbers of a study: scores of each arm and seed, differences, and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config import Tree
from trainer.errors import DataError
from trainer.monitoring.costs import Usage, total
from trainer.storage import write_text
from trainer.studies.jobs import Job, Jobs, Result
from trainer.studies.row_scores import RowScore, read_row_score
from trainer.studies.statistics import (
    Estimate,
    Share,
    detectable,
    estimate,
    rows_variance,
    share,
    unpaired_deviation,
)
from trainer.studies.study import Comparison, Measure, Study

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
        unpaired_deviation: what the standard deviation of `primary` would be if the arms' seeds had
            nothing in common.
        comparisons: those of the study whose arms have results, each with its difference.
        calibration: the share of smaller studies, cut from this one, whose interval of the primary
            comparison excludes zero; None without `calibrate`.
        detects: the difference that the study can detect, from the deviation it has found.
        costs: of each arm.
        total: of all jobs, each counted once.
    """

    study: Study
    rows: Sequence[Row]
    primary: Estimate | None
    unpaired_deviation: float | None
    comparisons: Sequence[tuple[Comparison, Estimate]]
    calibration: Share | None
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
            "unpaired_deviation": self.unpaired_deviation,
            "comparisons": [asdict(stated) | asdict(found) for stated, found in self.comparisons],
            "calibration": None if self.calibration is None else asdict(self.calibration),
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
    rows: list[Row] = []
    stated = study.config.primary
    scored = {
        name: {arm: _scored(study, jobs, measure, arm) for arm in study.config.arms}
        for name, measure in study.config.measures.items()
    }
    for name, of_arms in scored.items():
        rows += _rows(study.baseline, name, of_arms)
    comparisons = []
    for each in study.config.comparisons:
        theirs, ours = (scored[each.measure][name] for name in each.arms)
        found = _difference(ours, theirs)
        if found is not None:
            comparisons.append((each, found))
    arm: Mapping[int, _Score] = {}
    reference: Mapping[int, _Score] = {}
    if stated is not None:
        reference, arm = (scored[stated.measure][each] for each in stated.arms)
    primary, detects = _difference(arm, reference), None
    if primary is not None and primary.deviation:
        detects = detectable(primary.deviation, study.config.seeds)
    costs = [_cost(study, each, jobs.of_arm(each)) for each in study.config.arms]
    return Results(
        study,
        rows,
        primary,
        _unpaired(arm, reference),
        comparisons,
        _calibration(arm, reference, study.config.calibrate),
        detects,
        costs,
        _cost(study, "all", jobs.all),
    )


@dataclass(frozen=True)
class _Score:
    """A finished job's score, and as a function of held-out rows if it is one."""

    value: float
    of_rows: RowScore | None


def _scored(study: Study, jobs: Jobs, measure: Measure, arm: str) -> dict[int, _Score]:
    """The scores of an arm's finished jobs, by the first seed that has these jobs."""
    found: dict[int, _Score] = {}
    seen = set()
    for seed in study.config.repetitions:
        scored = [jobs.of.get((arm, seed, stage)) for stage, _ in measure.parts]
        results = [(job, job.result()) for job in scored if job is not None]
        finished = [(job, result) for job, result in results if result is not None]
        digests = tuple(job.digest for job, _ in finished)
        if len(finished) < len(measure.parts) or digests in seen:
            continue
        seen.add(digests)
        scores = [
            _score(job, result, name)
            for (job, result), (_, name) in zip(finished, measure.parts, strict=True)
        ]
        found[seed] = scores[0] if len(scores) == 1 else _minus(*scores)
    return found


def _minus(one: _Score, other: _Score) -> _Score:
    known = None
    if one.of_rows is not None and other.of_rows is not None:
        known = one.of_rows.minus(other.of_rows)
    return _Score(one.value - other.value, known)


def _score(job: Job, result: Result, name: str) -> _Score:
    scores = result.scores
    if name not in scores:  # of a job that an earlier version has finished, perhaps
        scores = job.config.scores(job.folder)
    if name not in scores:
        raise DataError(f"{job.folder} has no score {name!r}. Use one of {', '.join(scores)}.")
    value = scores[name]
    value = value if math.isfinite(value) else math.nan
    file = job.config.predictions(job.folder)
    of_rows = None if file is None else read_row_score(file, name)
    # Only if it is the score that the run has reported.
    if of_rows is not None and abs(of_rows.value - value) > _SAME:
        of_rows = None
    return _Score(value, of_rows)


def _rows(baseline: str, name: str, scored: Mapping[str, Mapping[int, _Score]]) -> Iterator[Row]:
    for arm, scores in scored.items():
        if not scores:
            continue
        values = [score.value for score in scores.values()]
        known = [(score.of_rows, None) for score in scores.values() if score.of_rows is not None]
        has_rows = len(known) == len(scores)
        mean = estimate(values, rows_variance(known) if has_rows else 0.0)
        difference = None if arm == baseline else _difference(scores, scored[baseline])
        yield Row(arm, name, values, mean, difference, has_rows)


def _difference(ours: Mapping[int, _Score], theirs: Mapping[int, _Score]) -> Estimate | None:
    """The mean of an arm's score minus another's, over the seeds that both have."""
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs:
        return None
    values = [one.value - other.value for one, other in pairs]
    known = [
        (one.of_rows, other.of_rows)
        for one, other in pairs
        if one.of_rows is not None and other.of_rows is not None
    ]
    # Rows can be resampled together if all were scored on the same ones.
    sizes = {len(score.rows) for pair in known for score in pair}
    comparable = len(known) == len(pairs) and len(sizes) == 1
    return estimate(values, rows_variance(known) if comparable else 0.0)


def _unpaired(ours: Mapping[int, _Score], theirs: Mapping[int, _Score]) -> float | None:
    """The deviation of the same pairs' difference without pairing."""
    both = [seed for seed in ours if seed in theirs]
    return unpaired_deviation(
        [ours[seed].value for seed in both], [theirs[seed].value for seed in both]
    )


def _calibration(
    ours: Mapping[int, _Score], theirs: Mapping[int, _Score], size: int | None
) -> Share | None:
    """The share of studies of `size` seeds, one after the other, that find a difference."""
    both = [seed for seed in ours if seed in theirs]
    if size is None or len(both) < size:
        return None
    found = []
    # 8 seeds in studies of 3 are 0 1 2 and 3 4 5; the last two seeds are left out.
    for begin in range(0, len(both) - size + 1, size):
        group = {seed: ours[seed] for seed in both[begin : begin + size]}
        difference = _difference(group, theirs)
        found.append(difference is not None and difference.excludes_zero)
    return share(found)


def _cost(study: Study, arm: str, jobs: Sequence[Job]) -> Cost:
    results = [result for job in jobs if (result := job.result()) is not None]
    settings = study.config.costs
    usages = [result.usage for result in results]
    return Cost(
        arm,
        len(results),
        total(usages),
        sum(result.flops for result in results),
        sum(map(settings.kwh, usages)),
        sum(map(settings.grams, usages)),
    )


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
