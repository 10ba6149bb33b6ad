"""Jobs on this machine: their states and ends, with a command that only records its start."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from launch.environment import Environment
from launch.job import JobSpec, Record
from launch.kinds import local
from launch.kinds.local import Config
from samestep.errors import ConfigError, LaunchError
from tests.waiting import until

Start: TypeAlias = Callable[..., Record]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a job on a machine that has few commands, with these lines as its set-up."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sleep", "touch"):
        (tools / name).symlink_to(shutil.which(name) or "")
    (tools / "samestep").write_text("#!/bin/bash\necho started\nexec sleep 60\n")
    (tools / "samestep").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    started = []

    def start(*setup: str) -> Record:
        folder = tmp_path / "run" / "launch" / f"{len(started) + 1:03}"
        (folder / "logs").mkdir(parents=True)
        cluster = Config(environment=Environment(setup=(f"export PATH={tools}", *setup)))
        submission = cluster.render(JobSpec("run", "train", "", folder, tmp_path))
        for name, text in submission.files.items():
            (folder / name).write_text(text)
        identity, about = cluster.submit(submission, folder)
        started.append(Record(identity, "local", "run", str(tmp_path / "run"), folder, 0.0, about))
        return started[-1]

    yield start
    for record in started:
        if state(record) == "running":
            Config().cancel(record)


def state(record: Record) -> str:
    return Config().states([record])[record.folder].word


def log(record: Record) -> str:
    return (record.folder / "job.log").read_text()


wait_for = partial(until, seconds=20)


def test_a_run_that_ignores_sigterm_is_refused(tmp_path: Path) -> None:
    job = JobSpec("run", "train", "", tmp_path, tmp_path, stop_signals=("SIGUSR1",))
    message = r"training.preemption.signals is \[SIGUSR1\].*cancel ends runs by SIGTERM. Add"
    with pytest.raises(ConfigError, match=message):
        Config().render(job)
    Config().render(replace(job, stop_signals=()))  # has no checkpoint on purpose
    Config().render(replace(job, action="build"))


def test_no_ps_is_needed(start: Start) -> None:
    record = start()
    wait_for(lambda: "started" in log(record))
    assert state(record) == "running"
    Config().cancel(record)
    wait_for(lambda: state(record) != "running")
    assert state(record) == "cancelled"
    assert (record.folder / "exit").read_text() == "143\n"


@pytest.mark.parametrize(
    "setup",
    [
        ("sleep 60",),
        ("sleep 60 || true", "sleep 60 & wait"),
        ("while :; do :; done",),
        ("(trap '' TERM; while :; do sleep 1; done) &", "sleep 60"),
        ("trap '' TERM", "sleep 0.5", "trap - TERM", "sleep 60"),  # the first signal is lost
    ],
)
def test_cancelled_while_it_is_set_up(start: Start, setup: tuple[str, ...]) -> None:
    record = start("echo setting up", *setup)
    wait_for(lambda: "setting up" in log(record))
    Config().cancel(record)
    wait_for(lambda: state(record) != "running")
    assert state(record) == "cancelled"
    assert "started" not in log(record)
    wait_for(lambda: not local._session(int(record.about["pid"])))


def test_cancelled_as_soon_as_it_is_submitted(start: Start) -> None:
    for _ in range(10):
        record = start("sleep 1")
        Config().cancel(record)
        wait_for(lambda record=record: state(record) != "running")
        assert state(record) == "cancelled"
        assert "started" not in log(record)


def test_a_signal_to_the_script_alone_does_not_end_the_run(start: Start) -> None:
    record = start()
    wait_for(lambda: "started" in log(record))
    os.kill(int(record.about["pid"]), signal.SIGTERM)
    time.sleep(0.2)
    assert state(record) == "running"
    Config().cancel(record)
    wait_for(lambda: state(record) == "cancelled")


@pytest.mark.parametrize("setup", ["false", "if", "exit 3"])
def test_a_setup_that_fails(start: Start, setup: str) -> None:
    record = start(setup)
    wait_for(lambda: state(record) != "running")
    assert state(record) == "failed"
    assert "started" not in log(record)


def test_jobs_of_other_machines_are_not_judged(start: Start) -> None:
    here = start()
    renamed = replace(here, about={**here.about, "host": "node7"})
    other = replace(here, about={**renamed.about, "started": "another-boot 1"})
    old = replace(here, about={"pid": here.about["pid"], "started": "Sun Nov 22 05:19:46 2026"})
    states = [state(record) for record in (here, renamed, other, old)]
    assert states == ["running", "running", "on node7", "on another machine"]
    assert all(Config().states([record])[record.folder].active for record in (other, old))
    with pytest.raises(
        LaunchError,
        match=rf"was started on node7, and can be cancelled only there. .* {here.folder}",
    ):
        Config().cancel(other)
    assert state(here) == "running"
    Config().cancel(here)
    wait_for(lambda: (here.folder / "exit").exists())
    assert state(other) == "cancelled"  # by what lies in the folder that they share
    with pytest.raises(LaunchError, match="has ended already"):
        Config().cancel(other)


def test_another_process_of_the_same_number(start: Start) -> None:
    record = start()
    boot, ticks = record.about["started"].split()
    for started in (f"{boot} {int(ticks) - 1}", f"another-boot {ticks}", ""):
        assert state(replace(record, about={**record.about, "started": started})) == "gone"
    assert local._started(os.getpid()).split()[0] == boot


def test_only_linux_tells_which_jobs_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Config().check()
    monkeypatch.setattr(local, "_PROC", tmp_path)
    with pytest.raises(LaunchError, match="needs Linux"):
        Config().check()
