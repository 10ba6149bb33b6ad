"""Runs and datasets that hold old names work like new ones in every command."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from data_pipeline.reading.dataset import Dataset
from samestep.config import to_tree
from samestep.storage import write_text
from tests.integration import tasks
from tests.integration.commands import Result, Samestep
from trainer.checkpoint import files, history, integrity
from trainer.studies.finetune.runs import list_runs
from trainer.studies.finetune.task import Task
from trainer.training.weights.loading import load_weights

NEW, OLD = "question_answering", "span"
SHORT = ("training.evaluate_every=6", "checkpoint.every=3", "schedule.warmup_steps=2")


def write_old_names(run: Path) -> None:
    """Writes the old names into a run, its checkpoints included, and into its dataset."""
    manifest = run.parent / f"data-{NEW}" / "manifest.json"
    replace(manifest, f'"target": "{NEW}"', f'"target": "{OLD}"')
    # Builds of that time wrote none.
    write_text(manifest, re.sub(' "checksum": .*\n', "", manifest.read_text()))
    replace(run / "config.yaml", f"  head: {NEW}", f"  head: {OLD}")
    for folder in (run / "checkpoints").glob("step-*"):
        digests = integrity.read_checksums(folder)
        replace(folder / "meta.json", f'"head": "{NEW}"', f'"head": "{OLD}"')
        digests["meta.json"] = files.digest(folder / "meta.json")
        integrity.commit(folder, digests, lease=int((folder / history.NUMBER).read_text()))


def replace(file: Path, new: str, old: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(new) == 1, file
    write_text(file, text.replace(new, old))


@pytest.fixture(scope="module")
def both(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Sequence[Path]:
    """A folder with a run of question answering and its dataset, and a copy with the old names."""
    folder = tmp_path_factory.mktemp("words") / "folder_now"
    folder.mkdir()
    tasks.tune(NEW, folder, finished_run, dataset_folder / "tokenizer", "training.steps=6", *SHORT)
    then = folder.with_name("folder_old")
    shutil.copytree(folder, then)
    for file in (
        *then.rglob("*.yaml"),
        *then.rglob("meta.json"),
        then / f"data-{NEW}" / "manifest.json",
    ):
        file.write_text(file.read_text().replace(str(folder), str(then)))
    write_old_names(then / f"run-{NEW}")
    return folder, then


def same(results: Sequence[Result], folders: Sequence[Path]) -> None:
    """Asserts that a command succeeded and printed the same for both folders."""
    # Without spaces: a table breaks a long path into lines. Without the age and size of a
    # checkpoint: names of other lengths are files of other sizes.
    now, then = (
        re.sub(r"[\d:]+│[\d.]+kB", "", "".join(result.out.split())).replace(folder.name, "")
        for result, folder in zip(results, folders, strict=True)
    )
    assert [result.code for result in results] == [0, 0], [result.err for result in results]
    assert now == then


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "RUN"),
        ("ledger", "verify", "RUN"),
        ("replay", "RUN", "5"),
        ("checkpoint", "verify", "RUN"),
        ("data", "inspect", "DATA"),
        ("data", "show", "DATA", "--objective", "EXPERIMENT"),
        ("plan", "EXPERIMENT", "--devices", "2", "--strategy", "ddp"),
    ],
    ids=" ".join,
)
def test_commands_say_the_same(
    command: tuple[str, ...], both: Sequence[Path], samestep: Samestep
) -> None:
    results = []
    for folder in both:
        names = {
            "RUN": folder / f"run-{NEW}",
            "DATA": folder / f"data-{NEW}",
            "EXPERIMENT": folder / f"{NEW}.yaml",
        }
        results.append(samestep(*(names.get(word, word) for word in command)))
    same(results, both)


def test_a_run_continues_and_is_exported(
    both: Sequence[Path], tmp_path: Path, samestep: Samestep
) -> None:
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in both]
    metrics = []
    for folder in folders:
        file = folder / f"{NEW}.yaml"
        file.write_text(file.read_text().replace(str(both[0].parent), str(tmp_path)))
        result = samestep("train", file, "training.steps=9", *SHORT)
        assert result.code == 0, result.err
        assert "model.head" not in result.err, "nothing has changed"
        rows = tasks.rows_of(folder / f"run-{NEW}")
        metrics.append(
            [{name: row[name] for name in row if name.startswith("train/loss")} for row in rows]
        )
        assert samestep("export", folder / f"run-{NEW}", folder / "exported").code == 0
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) >= 9
    now, then = (folder / "exported" for folder in folders)
    for file in ("model.safetensors", "config.json"):
        assert (now / file).read_bytes() == (then / file).read_bytes()
    assert (
        yaml.safe_load((folders[1] / f"run-{NEW}" / "config.yaml").read_text())["model"]["head"]
        == NEW
    )


def test_digests_of_runs_of_a_suite_have_not_changed(both: Sequence[Path], tmp_path: Path) -> None:
    """Results of a suite are found by digest.

    With another one, a finished suite would run again.
    """
    task = Task.read(tasks.write_task(NEW, tmp_path))
    weights = load_weights(both[1] / f"run-{NEW}")
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
    for run, made_of in (
        (tuned, [weights.identity(), {**to_tree(weights.config), "head": OLD}, rows]),
        (new, [rows]),
    ):
        settings = {
            **run.experiment,
            "data": {**run.experiment["data"], "path": None},
            "init_from": None,
        }
        del settings["output"]
        if run.scratch:
            settings["model"] = {**settings["model"], "head": OLD}
        content = json.dumps([settings, *made_of], sort_keys=True)
        assert run.digest == hashlib.sha256(content.encode()).hexdigest()[:16]
