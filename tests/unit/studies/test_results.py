"""What a study says about its primary comparison, from results of jobs that are written here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from samestep.errors import ConfigError
from tests.unit.studies.test_study import content, read
from trainer.monitoring.costs import Usage
from trainer.studies import page
from trainer.studies.jobs import Result, list_jobs
from trainer.studies.results import Results, collect
from trainer.studies.statistics import detectable

PRIMARY = {"measure": "loss", "arms": ["a", "b"], "pilot_deviation": 0.1, "detects": 0.6}


def results(
    folder: Path, ours: Sequence[float], theirs: Sequence[float], *overrides: str
) -> Results:
    """A study whose arms a and b have these losses, one for each seed."""
    tree = content(folder) | {"primary": PRIMARY, "seeds": len(ours)}
    study = read(tree, folder, *overrides)
    jobs = list_jobs(study, folder / "jobs")
    for arm, values in (("a", ours), ("b", theirs)):
        for repetition, loss in zip(study.config.repetitions, values, strict=True):
            job = jobs.of[arm, repetition, "pretrain"]
            job.folder.mkdir(parents=True)
            Result({"loss": loss}, Usage()).save(job.folder)
    for job in jobs.all:
        if job.result() is None:
            job.folder.mkdir(parents=True)
            Result({}, Usage()).save(job.folder)
    return collect(study, jobs)


def test_it_says_what_pairing_is_worth(tmp_path: Path) -> None:
    found = results(tmp_path, [5.0, 6.0, 7.0], [5.1, 6.2, 7.3], "first_seed=100")
    assert found.primary is not None
    assert found.primary.deviation == pytest.approx(0.1)
    assert found.unpaired_deviation == pytest.approx(np.sqrt(1 + 1.1**2))
    assert "Pairing took the deviation from 1.487 to 0.100." in page.notes(found)[-1]
    found.write(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert written["unpaired_deviation"] == found.unpaired_deviation
    assert written["calibration"] is None


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    found = results(tmp_path, [5.0], [5.1])
    assert found.unpaired_deviation is None
    assert "Pairing" not in page.notes(found)[-1]


def test_equal_arms_are_cut_into_studies_whose_findings_are_counted(tmp_path: Path) -> None:
    # Seeds 0 to 2 differ by about 0.1, seeds 3 to 5 by nothing, and seed 6 is left over.
    theirs = [5.0] * 7
    ours = [5.1, 5.11, 5.09, 5.1, 5.0, 4.9, 9.0]
    found = results(tmp_path, ours, theirs, "calibrate=3")
    assert found.calibration is not None
    assert (found.calibration.count, found.calibration.cases) == (1, 2)
    assert "Cut into 2 studies of 3 seeds" in page.notes(found)[-1]
    assert "excludes zero in 1 of them, 50.0 % [1.3, 98.7]" in page.notes(found)[-1]


def test_two_arms_are_compared_without_the_baseline(tmp_path: Path) -> None:
    comparison = "comparisons=[{measure: loss, arms: [b, a]}]"
    found = results(tmp_path, [5.0, 6.0, 7.0], [5.1, 6.2, 7.3], comparison)
    text = "Further comparisons: a against b in loss \u22120.200 [\u22120.448, +0.048]."
    assert text in page.notes(found)
    found.write(tmp_path / "out")
    (written,) = json.loads((tmp_path / "out" / "scores.json").read_text())["comparisons"]
    assert written["mean"] == pytest.approx(-0.2)
    assert (written["measure"], written["arms"]) == ("loss", ["b", "a"])


def test_the_page_says_what_to_compare_with(tmp_path: Path) -> None:
    found = results(tmp_path, [5.0], [5.1], "figure=40 % masks (Wettig et al. 2023)")
    page.write_markdown(found, [], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "To compare with: 40 % masks (Wettig et al. 2023).\n" in text


def test_a_loss_that_is_not_a_number_is_no_difference(tmp_path: Path) -> None:
    found = results(tmp_path, [5.0, 6.0, 7.0], [5.1, math.nan, 7.3])
    assert found.primary is not None
    assert not found.primary.excludes_zero
    assert [line[1:] for line in page.lines(found)] == [["6.000 ± 1.000", ""], ["not finite"] * 2]
    found.write(tmp_path / "out")
    text = (tmp_path / "out" / "scores.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["rows"][1]["values"] == [5.1, None, 7.3]


def test_unfinished_seeds_are_named(tmp_path: Path) -> None:
    complete = results(tmp_path, [5.0, 6.0, 7.0], [5.1, 6.2, 7.3])
    assert not any("finished" in note for note in page.notes(complete))
    jobs = list_jobs(complete.study, tmp_path / "jobs")
    (jobs.of["b", 1, "pretrain"].folder / "result.json").unlink()
    found = collect(complete.study, jobs)
    assert found.finished == {"a": 3, "b": 2}
    assert "Not all jobs are finished. Finished seeds: b 2 of 3." in page.notes(found)


def test_an_arm_of_one_fixed_seed_is_compared_with_every_seed(tmp_path: Path) -> None:
    tree = content(tmp_path) | {"primary": PRIMARY, "seeds": 3}
    tree["arms"]["a"] = {"pretrain": {"seed": 0}}
    study = read(tree, tmp_path)
    jobs = list_jobs(study, tmp_path / "jobs")
    for arm, seed, loss in (("a", 0, 5.0), ("b", 0, 4.0), ("b", 1, 4.5), ("b", 2, 5.0)):
        folder = jobs.of[arm, seed, "pretrain"].folder
        folder.mkdir(parents=True)
        Result({"loss": loss}, Usage()).save(folder)
    found = collect(study, jobs)
    assert [row.values for row in found.rows] == [[5.0], [4.0, 4.5, 5.0]]
    assert found.primary is not None
    assert (found.primary.mean, found.primary.deviation) == (-0.5, 0.5)


def test_what_is_detected_depends_on_the_seeds_that_are_run(tmp_path: Path) -> None:
    """The file states it for its own number of seeds."""
    found = results(tmp_path, [5.0, 6.0, 7.0, 8.0, 9.0], [5.1, 6.2, 7.3, 8.4, 9.5])
    text = f"5 seeds detect a difference of {detectable(0.1, 5):.3f} in 80 of 100 cases."
    assert text in page.notes(found)[-1]
    (tmp_path / "one").mkdir()
    assert "detect" not in page.notes(results(tmp_path / "one", [5.0], [5.1]))[-1]


def test_text_after_the_results_stays_even_if_it_names_the_markers(tmp_path: Path) -> None:
    found, file = results(tmp_path, [5.0], [5.1]), tmp_path / "page.md"
    file.write_text("<!-- results -->\nstale\n<!-- /results -->\n\nSee <!-- /results -->.\n")
    for _ in range(2):
        page.write_markdown(found, [], file)
        assert file.read_text().endswith("<!-- /results -->\n\nSee <!-- /results -->.\n")
    assert "stale" not in file.read_text()


def test_a_page_without_a_place_for_results_is_refused_before_the_work(tmp_path: Path) -> None:
    page.check_markdown(tmp_path / "new.md")
    (tmp_path / "page.md").write_text("# A page\n")
    with pytest.raises(ConfigError, match="Add them where results go"):
        page.check_markdown(tmp_path / "page.md")
