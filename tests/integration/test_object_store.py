"""A run whose checkpoints are in an object store: killed, continued, scored, exported, fine-tuned from."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.integration.commands import Samestep, Start, losses
from trainer import storage


def test_a_run_lives_on_in_the_store(
    samestep: Samestep, start: Start, experiment_file: str, finished_run: Path, s3_folder: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = [f"output={run}", f"checkpoint.folder={s3_folder}", "checkpoint.every=4", "data.threads=0"]
    process = start("train", experiment_file, "--processes", "2", *settings)
    while not storage.exists(f"{s3_folder}/step-00000004/COMMITTED"):
        assert process.popen.poll() is None, process.stderr.read_text()
        time.sleep(0.05)
    process.popen.send_signal(signal.SIGKILL)
    process.popen.wait()
    assert samestep("train", experiment_file, *settings).code == 0
    assert not (run / "checkpoints").exists()
    assert storage.names(s3_folder) == ["step-00000008", "step-00000012", "tokenizer"]
    assert losses(run) == pytest.approx(losses(finished_run), rel=1e-5)

    scores = samestep("evaluate", run, "--step", "8")
    assert scores.code == 0, scores.err
    assert scores.out.split()[1] == "8"
    assert samestep("export", run, tmp_path / "exported").code == 0
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "exported").iterdir()}
    shutil.rmtree(run)
    assert samestep("fill", s3_folder, "a [MASK]").code == 0
    tuned = samestep("train", experiment_file, f"output={tmp_path / 'tuned'}", f"init_from={s3_folder}/step-00000008")
    assert tuned.code == 0, tuned.err
    assert losses(tmp_path / "tuned")[1] < losses(finished_run)[1], "it knows something already"


@pytest.mark.usefixtures("s3_server")
def test_a_bucket_that_is_not_there(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """Is named before the first step, not when the first checkpoint is due."""
    run = tmp_path / "run"
    result = samestep("train", experiment_file, f"output={run}", "checkpoint.folder=s3://nowhere/run")
    assert result.code == 1
    assert "cannot write s3://nowhere/run/" in result.message
    assert "The specified bucket does not exist; check the bucket" in result.message
    assert not (run / "metrics.jsonl").exists()
    result = samestep("export", "s3://nowhere/run", tmp_path / "exported")
    assert result.code == 1
    assert "s3://nowhere/run is no run" in result.message


def test_the_output_stays_a_folder(samestep: Samestep, experiment_file: str) -> None:
    result = samestep("train", experiment_file, "output=s3://bucket/run")
    assert result.code == 2
    assert "checkpoint.folder" in result.message
