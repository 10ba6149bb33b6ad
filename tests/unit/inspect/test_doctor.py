"""The doctor finds what is broken, says how to mend it, and does not break itself."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from samestep.config import load
from samestep.findings import Finding, report, tried
from samestep.storage import objects
from samestep.terminal import Console
from trainer.accelerators.kinds import cuda
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.inspect.doctor import checks, devices, measurements
from trainer.training.experiment import Experiment


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def states(findings: Iterator[Finding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


@pytest.mark.long
def test_a_healthy_machine_has_no_failures_and_processes_really_meet():
    found = {finding.subject: finding for finding in checks.examine(None, 2)}
    assert "failed" not in {finding.state for finding in found.values()}
    assert torch.__version__ in found["software"].found
    assert (
        "right result" in found["processor" if not torch.cuda.is_available() else "device 0"].found
    )
    assert "2 processes over" in found["all-reduce"].found
    assert "GB free" in found["disk"].found


@pytest.mark.parametrize(
    ("limits", "state", "ranks"),
    [
        ((1024, 1048576), "ok", "host 149,760 ranks, and 256 under torchrun"),
        ((1024, 4096), "warning", "host 548 ranks, and 256 under torchrun"),
        ((math.inf, math.inf), "ok", "host any number of ranks"),
    ],
)
def test_the_limit_of_open_files_says_how_many_ranks_can_connect(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[float, float], state: str, ranks: str
) -> None:
    monkeypatch.setattr(checks, "open_files", lambda wanted: limits)
    (found,) = checks._open_files()
    assert found.state == state
    assert ranks in found.found


def test_an_experiment_is_checked_on_its_own_dataset_and_disk(experiment_file: str, tmp_path: Path):
    experiment = load(
        Experiment, experiment_file, [f"output={tmp_path / 'new' / 'run'}", "data.path=/nowhere"]
    )
    found = {finding.subject: finding for finding in checks.examine(experiment, 1)}
    assert found["dataset"].state == "failed"
    assert "/nowhere" in found["dataset"].found
    assert found["devices"].found == "the CPU, as the experiment asks for it"
    assert found["output"].state != "failed"
    assert not (tmp_path / "new").exists()
    small = load(Experiment, experiment_file, [f"output={tmp_path}", "model.vocab_size=100"])
    assert "set model.vocab_size to 600" in next(
        f.found for f in checks.examine(small, 1) if f.subject == "dataset"
    )


def test_metrics_that_cannot_be_computed_are_found(
    experiment_file: str, monkeypatch: pytest.MonkeyPatch
):
    task = [
        "objective={kind: tagging, metrics: [entity_f1]}",
        "model.head=tagging",
        "model.labels=[O,B-X]",
    ]
    experiment = load(Experiment, experiment_file, task)
    ((_, check),) = (check for check in checks._checks_of(experiment) if check[0] == "metrics")
    assert states(tried("metrics", check)) == {"metrics": "ok"}
    monkeypatch.setitem(sys.modules, "seqeval.metrics.sequence_labeling", None)
    (found,) = tried("metrics", check)
    assert found.state == "failed"
    assert "seqeval>=1.2" in found.found


def test_a_device_that_computes_wrongly_is_found():
    class Wrong(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if "matmul" in function.__name__ and result.dtype == torch.bfloat16:
                result[3, 5] += 1
            return result

    assert states(measurements.product(CpuAccelerator(), "device 7", "bf16")) == {"device 7": "ok"}
    with Wrong():
        assert states(measurements.product(CpuAccelerator(), "device 7", "bf16")) == {
            "device 7": "failed"
        }


@pytest.mark.long
def test_processes_that_do_not_meet_in_time_are_explained_and_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(devices, "_SPAWN_SECONDS", 0.0)
    (finding,) = devices.all_reduce(0, 2)
    assert finding.state == "failed"
    assert "did not reduce a tensor over gloo" in finding.found
    assert not [
        child for child in multiprocessing.active_children() if "forkserver" not in child.name
    ]


def test_gpus_that_cannot_be_used_are_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "unusable", lambda: "the driver is too old")
    (finding,) = devices.available(None)
    assert (finding.state, finding.found) == (
        "failed",
        "training would run on the CPU: the driver is too old",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines where torch finds no GPU")
def test_an_experiment_gets_the_devices_and_disks_that_it_names(
    experiment_file: str, tmp_path: Path
):
    named = ["accelerator=cuda", f"output={tmp_path}", "checkpoint.folder=/proc/checkpoints"]
    found = {
        finding.subject: finding
        for finding in checks.examine(load(Experiment, experiment_file, named), 1)
    }
    assert found["devices"].state == "failed"
    assert "cuda was asked for" in found["devices"].found
    assert found["output"].state != "failed"
    assert "cannot write in /proc" in found["checkpoints"].found


def test_a_disk_that_is_full_or_read_only_is_found(tmp_path: Path):
    (full,) = checks._disk("output", tmp_path, needed=1e18)
    assert full.state == "failed"
    assert "lower checkpoint.keep_last" in full.fix
    (closed,) = checks._disk("output", Path("/proc/run"), 0)
    assert closed.state == "failed"
    assert "cannot write in /proc" in closed.found
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_written_to_and_left_clean(s3_folder: str, experiment_file: str):

    assert states(checks._object_store(s3_folder)) == {"checkpoints": "ok"}
    assert objects.names(s3_folder) == []
    wrong = load(Experiment, experiment_file, ["checkpoint.folder=s3://no-such-bucket/run"])
    found = next(
        finding for finding in checks.examine(wrong, 1) if finding.subject == "checkpoints"
    )
    assert found.state == "failed"
    assert "no-such-bucket" in found.found


def test_wandb_is_asked_where_it_is_and_waited_for_briefly(monkeypatch: pytest.MonkeyPatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Keeps the test's output clean."""

    (offline,) = checks._wandb(None)
    assert (offline.state, offline.found) == ("ok", "offline; no API key was found")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    (silent,) = checks._wandb(None)
    assert silent.state == "warning"
    assert "WANDB_MODE=offline" in silent.fix
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        (there,) = checks._wandb(None)
    assert there.state == "ok"


@pytest.mark.parametrize(("required", "state"), [(False, "warning"), (True, "failed")])
def test_a_missing_wandb_fails_only_where_it_is_required(
    experiment_file: str, monkeypatch: pytest.MonkeyPatch, required: bool, state: str
):
    monkeypatch.setattr(checks, "version_of", lambda package: None)
    experiment = load(Experiment, experiment_file, [f"tracking.wandb={{required: {required}}}"])
    (finding,) = checks._wandb(experiment)
    assert finding.state == state
    assert "tracking.wandb=null" in finding.fix


def test_the_table_shows_every_finding_and_a_failure_decides():
    console = Console(file=io.StringIO(), width=100)
    findings = [
        Finding("disk", "ok", "[bold]1 GB[/]"),
        Finding("W&B", "failed", "no key", "wandb login"),
    ]
    assert not report(findings, console)
    text = console.file.getvalue()
    for words in ("[bold]1 GB[/]", "failed", "→ wandb login"):
        assert words in text
    assert report(findings[:1], console)
