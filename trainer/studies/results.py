"""The numbers of a study: scores of each arm and seed, differences, and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from samestep.config import Tree
from samestep.errors import DataError
from samestep.storage import write_text
from samestep.stored_json import finite
from trainer.monitoring.costs import Usage, total
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
        values: one for each seed; seeds that share their jobs have one value.
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
    """Resources of an arm, including jobs that other arms share.

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
    """The numbers of a study, from the jobs that are finished.

    Attributes:
        rows: by measure, in the order of the study, then by arm.
        primary: the difference that the study was made for; None if it has not both arms.
        unpaired_deviation: the standard deviation that `primary` would have if the arms' seeds had
            nothing in common.
        comparisons: of the study, if both arms have results, each with its difference.
        calibration: the share of smaller studies, cut from this one, in which the interval of the
            primary comparison excludes zero; None without `calibrate`.
        detects: the difference that the study can detect, from the deviation it has found.
        finished: for each arm, the number of seeds with all jobs finished.
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
    finished: Mapping[str, int]
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
    write_text(file, json.dumps(finite(tree), indent=1, allow_nan=False) + "\n")


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
        found = _difference(_pairs(ours, theirs))
        if found is not None:
            comparisons.append((each, found))
    pairs: Sequence[_Pair] = ()
    if stated is not None:
        reference, arm = (scored[stated.measure][each] for each in stated.arms)
        pairs = _pairs(arm, reference)
    primary, detects = _difference(pairs), None
    # Without a deviation, as of two seeds with equal differences, any difference would do.
    if primary is not None and primary.deviation:
        detects = detectable(primary.deviation, len(pairs))
    costs = [_cost(study, each, jobs.of_arm(each)) for each in study.config.arms]
    return Results(
        study,
        rows,
        primary,
        _unpaired(pairs),
        comparisons,
        _calibration(pairs, study.config.calibrate),
        detects,
        {each: _finished(study, jobs, each) for each in study.config.arms},
        costs,
        _cost(study, "all", jobs.all),
    )


def _finished(study: Study, jobs: Jobs, arm: str) -> int:
    # An arm has finished a seed when the jobs of all its stages have.
    missing = {
        seed for (name, seed, _), job in jobs.of.items() if name == arm and job.result() is None
    }
    return study.config.seeds - len(missing)


@dataclass(frozen=True)
class _Score:
    """A score, and as a function of held-out rows if it is one.

    Attributes:
        jobs: digests of the jobs that it is of. A fixed seed gives several seeds the same jobs.
    """

    value: float
    of_rows: RowScore | None
    jobs: tuple[str, ...]


_Pair: TypeAlias = tuple[_Score, _Score]


def _scored(study: Study, jobs: Jobs, measure: Measure, arm: str) -> dict[int, _Score]:
    """The scores of an arm's finished jobs, by seed."""
    found: dict[int, _Score] = {}
    for seed in study.config.repetitions:
        scored = [jobs.of.get((arm, seed, stage)) for stage, _ in measure.parts]
        results = [(job, job.result()) for job in scored if job is not None]
        finished = [(job, result) for job, result in results if result is not None]
        if len(finished) < len(measure.parts):
            continue
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
    return _Score(one.value - other.value, known, one.jobs + other.jobs)


def _score(job: Job, result: Result, name: str) -> _Score:
    scores = result.scores
    if name not in scores:
        raise DataError(f"{job.folder} has no score {name!r}. Use one of {', '.join(scores)}.")
    value = scores[name]
    value = value if math.isfinite(value) else math.nan
    file = job.config.predictions(job.folder)
    of_rows = None if file is None else read_row_score(file, name)
    # Only if it is the score that the run has reported.
    if of_rows is not None and abs(of_rows.value - value) > _SAME:
        of_rows = None
    return _Score(value, of_rows, (job.digest,))


def _rows(baseline: str, name: str, scored: Mapping[str, Mapping[int, _Score]]) -> Iterator[Row]:
    for arm, scores in scored.items():
        if not scores:
            continue
        own = list({score.jobs: score for score in scores.values()}.values())
        values = [score.value for score in own]
        known = [(score.of_rows, None) for score in own if score.of_rows is not None]
        has_rows = len(known) == len(own)
        mean = estimate(values, rows_variance(known) if has_rows else 0.0)
        pairs = _pairs(scores, scored[baseline])
        difference = None if arm == baseline else _difference(pairs)
        yield Row(arm, name, values, mean, difference, has_rows)


def _pairs(ours: Mapping[int, _Score], theirs: Mapping[int, _Score]) -> list[_Pair]:
    """The scores of two arms for the seeds that both have; seeds with equal jobs have one pair."""
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return list({(one.jobs, other.jobs): (one, other) for one, other in pairs}.values())


def _difference(pairs: Sequence[_Pair]) -> Estimate | None:
    """The mean of an arm's score minus another's."""
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


def _unpaired(pairs: Sequence[_Pair]) -> float | None:
    """The deviation of the same pairs' difference without pairing."""
    return unpaired_deviation([one.value for one, _ in pairs], [other.value for _, other in pairs])


def _calibration(pairs: Sequence[_Pair], size: int | None) -> Share | None:
    """The share of studies of `size` seeds, one after the other, that find a difference."""
    if size is None or len(pairs) < size:
        return None
    found = []
    # 8 seeds in studies of 3 are 0 1 2 and 3 4 5; the last two seeds are left out.
    for begin in range(0, len(pairs) - size + 1, size):
        difference = _difference(pairs[begin : begin + size])
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
    """Returns the evaluations of a run during training: places on the axis, and values.

    Tokens and FLOPs are logged every few steps, and lie on a line between them.
    """
    from trainer.monitoring.jsonl import read_rows

    rows = list(read_rows(job.folder / job.config.product / "metrics.jsonl"))
    evaluated = [row for row in rows if metric in row]
    steps = [float(row["step"]) for row in evaluated]
    if against != "step":
        name = f"train/{against}"
        counted = {0: 0.0, **{row["step"]: row[name] for row in rows if name in row}}
        steps = np.interp(steps, list(counted), list(counted.values())).tolist()
    return steps, [row[metric] for row in evaluated]
