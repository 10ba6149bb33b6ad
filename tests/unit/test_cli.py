"""The exit codes of a command that fails."""

import os

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
