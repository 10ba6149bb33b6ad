"""The exit codes of a command that fails."""

import os
import subprocess
import sys

import pytest

from trainer import cli
from trainer.errors import (
    EXIT_CRASHED,
    EXIT_FAILED,
    EXIT_USAGE,
    ConfigError,
    CorruptError,
    StorageError,
    UnreachableError,
)


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

    monkeypatch.setattr(cli, "_train", fail)
    assert cli.main(["train", "experiment.yaml"]) == alone
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "experiment.yaml"])
    assert left.value.code == worker


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
    program = f"{listing}; from trainer.cli import main; main({list(arguments)})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.split())
    assert "trainer.cli" in imported
    assert not imported & slow
