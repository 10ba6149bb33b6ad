"""Scripts for TPU slices that gcloud alone submits, up to the training command of a machine."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.scripts import write_tpu
from launch.tpu import startup as tpu_startup
from tests.unit.launch import test_tpu_startup
from tests.unit.launch.test_tpu_startup import Machine

ROOT = Path(__file__).parents[3]
FOLDER = Path(write_tpu.__file__).parent
SCRIPTS = write_tpu.scripts()
BERT = "tpu/bert_base_v5e16.sh"

machine = test_tpu_startup.machine


@pytest.fixture
def submitted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Runs a script; the words of its request for a slice, whose machine is `machine`."""
    monkeypatch.setattr(write_tpu, "WORK", tpu_startup.WORK)
    script = machine.folder / "bert.sh"
    script.write_text(write_tpu.scripts()[BERT])
    (machine.folder / "samestep-0.1.0-py3-none-any.whl").touch()
    done = subprocess.run(
        ["bash", script, "data.cache=/mnt/it's $HOME"],
        cwd=machine.folder,
        env={**machine.environment, "PROJECT": "my-project", "BUCKET": "bucket"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "submitted: gs://bucket/bert-base-v5e16/" in done.stdout
    calls = map(json.loads, (machine.folder / "calls").read_text().splitlines())
    [request] = [words for words in calls if "queued-resources" in words]
    file = Path(request[-1].partition("startup-script=")[2])
    machine.script = file.read_text()
    machine.work = Path(tpu_startup.WORK) / "bert-base-v5e16"
    yield request
    file.unlink()


def staged(machine: Machine) -> Path:
    [folder] = machine.bucket("bert-base-v5e16").glob("20*")
    return folder


@pytest.mark.long
def test_a_script_requests_a_slice_whose_machines_train(
    machine: Machine, submitted: list[str]
) -> None:
    assert submitted[2:6] == [
        *("queued-resources", "create", "bert-base-v5e16", "--node-id=bert-base-v5e16")
    ]
    assert {
        *("--project=my-project", "--zone=us-central1-a", "--spot"),
        *("--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite"),
    } <= set(submitted)
    machine.environment = {**machine.environment, "RUN_FOLDER": "run"}
    assert machine.runs(75, 0) == 0
    assert (
        machine.starts
        == [
            "samestep train configs/pretrain/tpu/bert_base.yaml data.path=gs://bucket/wikipedia_en "
            "checkpoint.folder=gs://bucket/bert-base-v5e16/checkpoints output=run "
            "tracking.wandb=null "
            "data.cache=/mnt/it's $HOME --elastic 1"
        ]
        * 2
    )
    [installation] = [line for line in machine.record if line.startswith("pip install")]
    assert installation.endswith("/samestep-0.1.0-py3-none-any.whl[gcs,tpu,wandb]")
    assert (staged(machine) / "exit-0").read_text() == "0 0\n"
    kept = machine.bucket("bert-base-v5e16/run/metrics.jsonl")
    assert kept.read_text() == "metrics\nmetrics\n"
    assert machine.runs("never") == 0, "a boot after the end does nothing"
    assert len(machine.starts) == 2


@pytest.mark.long
@pytest.mark.parametrize("lacks", ["no-uv", "no-pip", "old-package"])
def test_an_installation_that_fails_is_reported(
    machine: Machine, submitted: list[str], lacks: str
) -> None:
    (machine.folder / f"record.{lacks}").touch()
    assert machine.runs("never") == 1
    assert machine.starts == []
    worker = platform.node()
    assert (staged(machine) / f"exit-{worker}").read_text() == f"{worker} 1\n"
    [log] = (staged(machine) / "log").iterdir()
    assert log.name.endswith(f"-{worker}.log")
