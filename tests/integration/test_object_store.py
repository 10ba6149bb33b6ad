"""Runs whose dataset and checkpoints are in an object store."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from data_pipeline.format.manifest import Manifest
from samestep.storage import objects
from tests.faulty_proxy import FaultyProxy
from tests.integration.commands import Samestep, Start, losses
from trainer.checkpoint import files, integrity


@pytest.fixture
def remote_dataset(samestep: Samestep, dataset_folder: Path, s3_folder: str) -> str:
    url = f"{s3_folder}/dataset"
    assert samestep("data", "push", dataset_folder, url).code == 0
    return url


def heads(run: Path) -> list[str]:
    """The ledger's hash, after each step, of all that the run was fed so far."""
    return [json.loads(line)["head"] for line in (run / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_lives_on_in_the_store(
    samestep: Samestep,
    start: Start,
    experiment_file: str,
    finished_run: Path,
    remote_dataset: str,
    s3_folder: str,
    s3_proxy: FaultyProxy,
    tmp_path: Path,
) -> None:
    """Killed, continued by one process, scored, exported and fine-tuned from.

    All as if it were on the disk.
    """
    run, cache, checkpoints = tmp_path / "run", tmp_path / "cache", f"{s3_folder}/checkpoints"
    data = [f"data.path={remote_dataset}", f"data.cache={cache}", "data.cache_size=10MB"]
    settings = [*data, f"output={run}", f"checkpoint.folder={checkpoints}", "checkpoint.every=4"]
    s3_proxy.behave()
    s3_proxy.always, s3_proxy.delay = "delay", 0.2  # a store that leaves time to kill the run in
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3_proxy.url)
        process = start("train", experiment_file, "--processes", "2", *settings)
    while not objects.exists(f"{checkpoints}/step-00000004/COMMITTED"):
        assert process.popen.poll() is None, process.stderr.read_text()
        time.sleep(0.2)
    process.popen.send_signal(signal.SIGKILL)
    process.popen.wait()
    assert list((cache / "shards").glob("*.tar"))
    assert samestep("train", experiment_file, *settings).code == 0
    assert not (run / "checkpoints").exists()
    assert integrity.committed_steps(files.location(checkpoints)) == [8, 12]
    assert "tokenizer" in objects.names(checkpoints)
    assert losses(run) == pytest.approx(losses(finished_run), rel=1e-5)
    assert heads(run) == heads(finished_run)
    assert samestep("ledger", "verify", run).code == 0

    scores = samestep("evaluate", run, "--step", "8")
    assert scores.code == 0, scores.err
    assert scores.out.split()[1] == "8"
    assert samestep("export", run, tmp_path / "exported").code == 0
    assert {"model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "exported").iterdir()
    }
    shutil.rmtree(run)
    assert samestep("fill", checkpoints, "a [MASK]").code == 0
    tuned = samestep(
        "train",
        experiment_file,
        f"output={tmp_path / 'tuned'}",
        f"init_from={integrity.step_folder(files.location(checkpoints), 8)}",
    )
    assert tuned.code == 0, tuned.err
    assert losses(tmp_path / "tuned")[1] < losses(finished_run)[1], "it knows something already"


@pytest.mark.usefixtures("s3_server")
def test_a_bucket_that_is_not_there(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    """Is named before the first step, not when the first checkpoint is due."""
    run = tmp_path / "run"
    result = samestep(
        "train", experiment_file, f"output={run}", "checkpoint.folder=s3://nowhere/run"
    )
    assert result.code == 1
    assert "cannot write s3://nowhere/run/" in result.message
    assert "The specified bucket does not exist; check the bucket" in result.message
    assert not (run / "metrics.jsonl").exists()
    result = samestep("export", "s3://nowhere/run", tmp_path / "exported")
    assert result.code == 1
    assert "s3://nowhere/run is neither a run" in result.message


def test_the_output_stays_a_folder(samestep: Samestep, experiment_file: str) -> None:
    result = samestep("train", experiment_file, "output=s3://bucket/run")
    assert result.code == 2
    assert "checkpoint.folder" in result.message


@pytest.mark.long
def test_a_shard_that_is_gone_is_named_once(
    samestep: Samestep,
    remote_dataset: str,
    dataset_folder: Path,
    experiment_file: str,
    tmp_path: Path,
) -> None:
    overrides = [
        f"output={tmp_path / 'run'}",
        f"data.path={remote_dataset}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    result = samestep("data", "verify", remote_dataset)
    assert (result.code, "is whole: 6 shards" in result.out) == (0, True)
    for shard in Manifest.load(dataset_folder).splits["train"]:
        objects.remove(f"{remote_dataset}/{shard.name}")
    result = samestep("train", experiment_file, *overrides)
    assert result.code == 1
    assert f"{remote_dataset}/train-00000" in result.message
    result = samestep("data", "verify", remote_dataset)
    assert (result.code, "is damaged (5 problems)" in result.out) == (1, True)


def test_a_wrong_address_a_small_cache_and_an_unknown_scheme_are_named(
    samestep: Samestep, remote_dataset: str, experiment_file: str, tmp_path: Path
) -> None:
    command = [
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    for settings, code, words in (
        (
            [f"data.path={remote_dataset}/typo"],
            1,
            [f"{remote_dataset}/typo/manifest.json", "samestep data push"],
        ),
        (
            [f"data.path={remote_dataset}", "data.cache_size=20kB"],
            2,
            ["takes 20,000 bytes", "Set data.cache_size to 1MB"],
        ),
        (
            [f"data.path={remote_dataset}", "data.cache_size=much"],
            2,
            ["cache_size must be a size such as", "'much'"],
        ),
        (["data.path=ftp://host/dataset"], 2, ["ftp://host/dataset", "unsupported scheme"]),
    ):
        result = samestep(*command, *settings)
        assert result.code == code
        assert all(word in result.message for word in words), result.message
