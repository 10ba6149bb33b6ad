"""The profiler's window: when it opens, what it leaves, and what it says about communication."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import ConfigError
from trainer.accelerators.traces import communication
from trainer.training.observers.profiler import Profiler
from trainer.training.observers.settings import Profile as Config


def traced(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profiles").glob("*"))


def train(profiler: Any, first: int, last: int, look_every: int = 10) -> None:
    for step in range(first, last + 1):
        profiler.begin_step(step, first=False, look=(step - 1) % look_every == 0)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.end_step(step)


def test_the_configured_steps_are_traced_on_the_configured_ranks(tmp_path: Path):
    for rank in range(3):
        train(Profiler(Config(start=2, steps=3, ranks=(0, 2)), tmp_path, rank), 1, 8)
    assert traced(tmp_path) == [
        "step-00000002-rank-00000.json.gz",
        "step-00000002-rank-00002.json.gz",
    ]
    with gzip.open(tmp_path / "profiles" / traced(tmp_path)[0]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 3


def test_a_run_under_way_is_profiled_when_asked_to(tmp_path: Path):
    profiler = Profiler(Config(steps=2), tmp_path, 0)
    train(profiler, 1, 5)
    (tmp_path / "profile").touch()
    train(profiler, 6, 20)
    assert traced(tmp_path) == ["step-00000011-rank-00000.json.gz"]
    assert not (tmp_path / "profile").exists()


def test_a_run_that_breaks_off_leaves_no_profiler_running(tmp_path: Path):
    profiler = Profiler(Config(start=1, steps=5), tmp_path, 0)
    train(profiler, 1, 2)
    profiler.close()
    assert traced(tmp_path) == ["step-00000001-rank-00000.json.gz"]
    assert not torch.autograd._profiler_enabled()


def test_a_profile_that_cannot_be_written_is_no_reason_to_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "profiles").touch()
    train(Profiler(Config(start=1, steps=1), tmp_path, 0), 1, 2)
    assert "cannot write the profile" in caplog.text


def test_a_trace_that_cannot_be_read_is_no_reason_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(json, "load", lambda _file: json.loads('{"traceEvents": [}'))
    train(Profiler(Config(start=1, steps=1), tmp_path, 0), 1, 2)
    assert "Expecting value" in caplog.text


def write_trace(path: Path, events: list[tuple[str, str, float, float]]) -> Path:
    rows = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in events
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*rows, {"ph": "M", "name": "process_name"}]}, file)
    return path


def test_communication_is_exposed_where_nothing_is_computed(tmp_path: Path):
    on_gpu = [
        ("kernel", "gemm", 0, 60),
        ("kernel", "ncclDevKernel_AllReduce", 40, 40),  # 20 under gemm, 20 exposed
        ("kernel", "ncclDevKernel_AllGather", 70, 20),  # overlaps the other one by 10
        ("gpu_memcpy", "Memcpy HtoD", 90, 10),
        ("cpu_op", "aten::mm", 0, 100),  # the host's time does not count
    ]
    found = communication(write_trace(tmp_path / "gpu.json.gz", on_gpu))
    assert found == pytest.approx({"time/communication": 0.5, "time/communication_exposed": 0.3})
    on_cpu = [("cpu_op", "aten::mm", 0, 80), ("user_annotation", "gloo:all_reduce", 70, 30)]
    found = communication(write_trace(tmp_path / "cpu.json.gz", on_cpu))
    assert found == pytest.approx({"time/communication": 0.3, "time/communication_exposed": 0.2})
    assert communication(write_trace(tmp_path / "none.json.gz", on_cpu[:1])) == {}


def test_a_window_that_would_fill_the_disk_is_refused():
    with pytest.raises(ConfigError, match=r"1 \.\. 20, not 1000"):
        Config(steps=1000)
    with pytest.raises(ConfigError, match="start must be at least 1"):
        Config(start=0)
