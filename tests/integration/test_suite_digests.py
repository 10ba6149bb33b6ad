"""Digests of a suite's runs are computed from names of settings that never change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from data_pipeline.reading.dataset import Dataset
from samestep.config import to_tree
from tests.integration import tasks
from trainer.studies.finetune.runs import list_runs
from trainer.studies.finetune.task import Task
from trainer.training.weights.loading import load_weights

NAME, IN_DIGESTS = "question_answering", "span"
SHORT = ("training.evaluate_every=6", "checkpoint.every=3", "schedule.warmup_steps=2")


@pytest.fixture(scope="module")
def run(finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of question answering."""
    folder = tmp_path_factory.mktemp("suite_digests")
    tasks.tune(NAME, folder, finished_run, dataset_folder / "tokenizer", "training.steps=6", *SHORT)
    return folder / f"run-{NAME}"


def test_digests_of_runs_of_a_suite_have_not_changed(run: Path, tmp_path: Path) -> None:
    """Results of a suite are found by digest.

    With another one, a finished suite would run again.
    """
    task = Task.read(tasks.write_task(NAME, tmp_path))
    weights = load_weights(run)
    tuned, new = list_runs(
        weights.path,
        [task],
        tmp_path / "suite",
        range(1),
        False,
        [],
        starts=("checkpoint", "random"),
    )
    rows = Dataset.open(Path(tuned.experiment["data"]["path"])).manifest.digest
    for planned, made_of in (
        (tuned, [weights.identity(), {**to_tree(weights.config), "head": IN_DIGESTS}, rows]),
        (new, [rows]),
    ):
        settings = {
            **planned.experiment,
            "data": {**planned.experiment["data"], "path": None},
            "init_from": None,
        }
        del settings["output"]
        if planned.scratch:
            settings["model"] = {**settings["model"], "head": IN_DIGESTS}
        content = json.dumps([settings, *made_of], sort_keys=True)
        assert planned.digest == hashlib.sha256(content.encode()).hexdigest()[:16]
