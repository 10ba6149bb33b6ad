"""Parts of the command of a TPU machine; test_tpu_startup.py runs all of it."""

from __future__ import annotations

import errno
import http.client
import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from launch.tpu import machine as tpu_machine
from launch.tpu.machine import Machine, Settings
from samestep.errors import LaunchError
from tests.unit.launch.tpu_control_plane import ControlPlane, install

SETTINGS = Settings("run", "work", "gs://bucket/stage", "gs://bucket/kept", "runs/run", {})


@pytest.fixture
def machine(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The first machine of a slice, in a folder of its own."""
    for name, value in install(tmp_path, plane, thin=True).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tpu_machine, "_PAUSES", ())
    work = tmp_path / "work"
    (work / "home" / ".machine").mkdir(parents=True)
    (work / "20261130-101500.log").touch()
    (work / "job.log").symlink_to("20261130-101500.log")
    machine = Machine(replace(SETTINGS, work=str(work)), ["run.yaml"])
    machine._worker = "0"
    return machine


def written(path: str, text: str = "") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_log_is_copied_in_whole_lines_of_valid_text(machine: Machine) -> None:
    Path("work/job.log").write_bytes("step 1 ü\nno text: ".encode() + b"\xff\nhalf a li")
    machine._copy_log()
    copy = Path("buckets/bucket/stage/log/20261130-101500-worker-0.log")
    assert copy.read_text() == "step 1 ü\nno text: \n"


def test_the_runs_folder_is_copied_without_what_exists_elsewhere(machine: Machine) -> None:
    for name in ("metrics.jsonl", ".owner", "checkpoints/x", "tensorboard/x", "wandb/x", "a/wandb"):
        written(f"runs/run/{name}", "text")
    Path("runs/run/link").symlink_to("/etc/passwd")
    machine._copy_run()
    kept = Path("buckets/bucket/kept")
    copied = {str(each.relative_to(kept)) for each in kept.rglob("*") if not each.is_dir()}
    assert copied == {"metrics.jsonl", "a/wandb"}, "nothing outside of the folder is copied"
    written("runs/run/metrics.jsonl", "more")
    machine._worker = "1"
    machine._copy_run()
    assert (kept / "metrics.jsonl").read_text() == "text"


def test_a_folder_that_did_not_come_back_is_not_there(machine: Machine) -> None:
    machine._bring_back()
    assert not Path("runs/run").exists(), "there was nothing"
    written("buckets/bucket/kept/metrics.jsonl", "before")
    gcloud = Path("bin/gcloud")
    good = gcloud.read_text()
    half = '{ : > "${@: -1}/metrics.jsonl"; exit 1; }'
    gcloud.write_text(f'#!/bin/bash\n[[ "$*" != *rsync* ]] || {half}\n{good}')
    with pytest.raises(LaunchError, match="storage rsync"):
        machine._bring_back()
    assert not Path("runs/run").exists()
    gcloud.write_text("#!/bin/bash\nexit 1\n")
    with pytest.raises(LaunchError, match="storage ls: exit code 1"):
        machine._bring_back()
    gcloud.write_text(good)
    machine._bring_back()
    assert [each.name for each in Path("runs").iterdir()] == ["run"]
    assert Path("runs/run/metrics.jsonl").read_text() == "before"


@pytest.mark.parametrize("content", ["", "{}", json.dumps({**asdict(SETTINGS), "variables": [1]})])
def test_damaged_settings_are_refused(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "machine.json"
    file.write_text(content)
    assert tpu_machine.main([str(file), "run.yaml"]) == 1
    assert f"{file} cannot be read" in caplog.text
    assert tpu_machine.main([str(file)]) == 2


def test_half_a_file_replaces_none_in_the_bucket(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("metrics.jsonl", "starts.jsonl"):
        written(f"runs/run/{name}", "old")
    machine._copy_run()

    def copy(source: str, target: str) -> None:
        whole = "starts" in source
        Path(target).write_text("new" if whole else "n")
        if not whole:
            raise OSError(errno.ENOSPC, "No space left on device")

    real = shutil.copytree
    failing = partial(real, copy_function=copy)
    monkeypatch.setattr(tpu_machine.shutil, "copytree", failing)
    machine._copy_run()
    kept = Path("buckets/bucket/kept")
    assert (kept / "metrics.jsonl").read_text() == "old"
    assert (kept / "starts.jsonl").read_text() == "new"


@pytest.mark.parametrize("error", [http.client.IncompleteRead(b""), TimeoutError()])
def test_half_an_answer_about_preemption_is_asked_for_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def metadata(key: str) -> str:
        raise error

    monkeypatch.setattr(tpu_machine, "_metadata", metadata)
    machine._look()
    assert not machine._leaving
