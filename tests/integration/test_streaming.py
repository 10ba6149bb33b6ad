"""Runs whose dataset is on an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.manifest import Manifest
from tests.integration.commands import Samestep, Start, losses
from trainer import storage


@pytest.fixture
def remote_dataset(samestep: Samestep, dataset_folder: Path, s3_folder: str) -> str:
    assert samestep("data", "push", dataset_folder, s3_folder).code == 0
    return s3_folder


def fed(run: Path) -> list[str]:
    """Digests of the rows that each step was fed."""
    return [json.loads(line)["digest"] for line in (run / "ledger.jsonl").read_text().splitlines()]


def test_two_processes_train_from_a_store_as_one_does_from_the_disk(
    start: Start, remote_dataset: str, finished_run: Path, experiment_file: str, tmp_path: Path
) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    overrides = [f"output={run}", f"data.path={remote_dataset}", f"data.cache={cache}", "data.cache_size=10MB"]
    result = start("train", experiment_file, *overrides, "--processes", 2).wait(timeout=100)
    assert result.code == 0, result.err
    assert losses(run) == pytest.approx(losses(finished_run), rel=1e-5)
    assert fed(run) == fed(finished_run)
    assert list((cache / "shards").glob("*.tar"))
    assert not list((cache / "shards").glob("*.partial"))


def test_a_shard_that_is_gone_is_named_once(
    samestep: Samestep, remote_dataset: str, dataset_folder: Path, experiment_file: str, tmp_path: Path
) -> None:
    overrides = [f"output={tmp_path / 'run'}", f"data.path={remote_dataset}", f"data.cache={tmp_path / 'cache'}"]
    result = samestep("data", "verify", remote_dataset)
    assert (result.code, "is whole: 6 shards" in result.out) == (0, True)
    for shard in Manifest.load(dataset_folder).splits["train"]:
        storage.remove(f"{remote_dataset}/{shard.name}")
    result = samestep("train", experiment_file, *overrides)
    assert result.code == 1
    assert f"{remote_dataset}/train-00000" in result.message
    result = samestep("data", "verify", remote_dataset)
    assert (result.code, "is damaged (5 problems)" in result.out) == (1, True)


def test_a_wrong_address_a_small_cache_and_an_unknown_scheme_are_named(
    samestep: Samestep, remote_dataset: str, experiment_file: str, tmp_path: Path
) -> None:
    command = ["train", experiment_file, f"output={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    for settings, code, words in (
        ([f"data.path={remote_dataset}/typo"], 1, [f"{remote_dataset}/typo/manifest.json", "samestep data push"]),
        (
            [f"data.path={remote_dataset}", "data.cache_size=20kB"],
            2,
            ["takes 20,000 bytes", "set data.cache_size to 1MB"],
        ),
        ([f"data.path={remote_dataset}", "data.cache_size=much"], 2, ["cache_size must be a size such as", "'much'"]),
        (["data.path=ftp://host/dataset"], 2, ["ftp://host/dataset", "unknown kind"]),
    ):
        result = samestep(*command, *settings)
        assert result.code == code
        assert all(word in result.message for word in words), result.message
