"""The `samestep` command as tests use it: inside this process where that shows the same, else as real processes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.integration.commands import SAMESTEP, Process, Result, Samestep, Start
from trainer.cli import main


@pytest.fixture
def samestep(capsys: pytest.CaptureFixture[str]) -> Iterator[Samestep]:
    """Runs a command in this process."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    with _logging_restored():
        yield run


@pytest.fixture(scope="session")
def finished_run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of 12 steps with checkpoints of steps 8 and 12; do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    overrides = ["checkpoint.every=4", "training.evaluate_every=12", "data.threads=0"]
    with _logging_restored():
        assert main(["train", experiment_file, f"output={folder}", *overrides]) == 0
    return folder


@contextmanager
def _logging_restored() -> Iterator[None]:
    """Undoes the logging set-up of `main`, whose handler would outlive the captured stderr that it writes to."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers, root.level = handlers, level


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in the background; kills what is left of them in the end."""
    started: list[Process] = []

    def run(*arguments: object, command: tuple[str, ...] = SAMESTEP) -> Process:
        started.append(Process(command, arguments, tmp_path))
        return started[-1]

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
