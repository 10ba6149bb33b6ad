"""The `samestep` command: exit codes, the order of overrides, slow imports."""

import argparse
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from samestep import cli, log
from samestep.command import in_typed_order
from samestep.errors import (
    EXIT_CRASHED,
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    CorruptError,
    StorageError,
    UnreachableError,
)
from trainer.elastic import cli as train
from trainer.studies.finetune import runs
from trainer.training import starting

LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("error", "alone", "worker"),
    [
        (ConfigError("a mistake"), EXIT_USAGE, EXIT_USAGE),
        (StorageError("access denied"), EXIT_FAILED, EXIT_FAILED),
        (CorruptError("torn"), EXIT_FAILED, EXIT_FAILED),
        (UnreachableError("no answer"), EXIT_FAILED, EXIT_CRASHED),
        (ZeroDivisionError("a bug"), EXIT_FAILED, EXIT_CRASHED),
    ],
)
def test_workers_tell_their_agent_whether_to_start_again(
    error: Exception, alone: int, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise error

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(train, "_train", fail)
    assert cli.main(["train", "experiment.yaml"]) == alone
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "experiment.yaml"])
    assert left.value.code == worker


def test_a_worker_that_fails_leaves_the_handlers_of_libraries_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Abseil's handler closes the stream that it was made with, which may be stderr."""
    closed: list[logging.Handler] = []

    class Library(logging.Handler):
        def close(self) -> None:
            closed.append(self)
            super().close()

    library = Library()
    monkeypatch.setattr(os, "_exit", lambda code: None)
    log.exit_now(3)
    assert closed == []
    library.close()


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("train", "x.yaml", "--proceses", "2"), "train"),
        (("data", "build", "x.yaml", "--forse"), "data build"),
        (("jobs", "a=b"), "jobs"),
    ],
)
def test_an_unknown_option_prints_the_usage_of_its_command(
    arguments: tuple[str, ...], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    assert left.value.code == EXIT_USAGE
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: samestep {command} [-h]")
    assert f"samestep {command}: error: unrecognized arguments: " in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("finetune-suite", "runs/x", "--tasks", "mrpc", "a.b=lamb", "--seeds", "1", "a.b.lr=1e-3"),
        ("finetune-suite", "runs/x", "a.b=lamb", "--tasks", "mrpc", "a.b.lr=1e-3", "--grid"),
        (
            "plan",
            "--devices",
            "2",
            "x.yaml",
            "--strategy",
            "ddp",
            "a.b=lamb",
            "--json",
            "a.b.lr=1e-3",
        ),
        ("plan", "x.yaml", "--devices", "2", "--throughput", "a.b=lamb", "a.b.lr=1e-3"),
    ],
    ids=("tasks", "tasks in between", "strategy", "throughput"),
)
def test_overrides_keep_their_order_beside_options_that_take_lists(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def list_runs(*given: Any) -> None:
        raise ConfigError(f"got {' '.join(given[5])}")

    def load_experiment(file: str, overrides: list[str], offline: bool) -> None:
        raise ConfigError(f"got {' '.join(overrides)}")

    monkeypatch.setattr(runs, "list_runs", list_runs)
    monkeypatch.setattr(starting, "load_experiment", load_experiment)
    assert cli.main(list(arguments)) == EXIT_USAGE
    assert "got a.b=lamb a.b.lr=1e-3" in capsys.readouterr().err


def test_repeated_overrides_and_values_of_options_are_kept_in_order() -> None:
    args = argparse.Namespace(typed=["plan", "a=1", "--throughput=b=1", "a=2", "a=1"])
    assert in_typed_order(args, ["a=2", "b=1", "a=1", "a=1"]) == ["a=1", "a=2", "a=1", "b=1"]


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (("--help",), {"numpy", "rich", "torch", "yaml"}),
        (("data", "build", "--help"), {"numpy", "rich", "torch", "yaml"}),
        (("config", "configs/debug/demo.yaml"), {"torch.distributed.tensor", "transformers"}),
    ],
    ids=("help", "help of a command", "config"),
)
def test_commands_start_without_slow_imports(arguments: tuple[str, ...], slow: set[str]):
    """`samestep --help` takes 0.1 s without them, and 1.7 s with torch."""
    listing = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    program = f"{listing}; from samestep.cli import main; main({list(arguments)})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.split())
    assert "samestep.cli" in imported
    assert not imported & slow


@pytest.mark.parametrize("at_once", [False, True])
def test_a_library_may_ask_for_an_end_without_cleanup(at_once: bool) -> None:
    """Functions of atexit still run, and the output is whole; the end of Python is skipped."""
    code = f"""
import atexit, sys
from samestep import log
from samestep.cli import command
class Last:
    def __del__(self):
        print("cleaned up", flush=True)
last = Last()
atexit.register(print, "at exit")
if {at_once}:
    log.end_at_once()
sys.argv[1:] = ["config", "no-such-file.yaml"]
command()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no-such-file.yaml" in done.stderr
    assert done.stdout == "at exit\n" + "cleaned up\n" * (not at_once)
