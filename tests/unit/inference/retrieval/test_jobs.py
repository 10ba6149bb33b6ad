"""The lock of a folder that one job writes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import pytest

from samestep.errors import ConfigError
from samestep.storage import flock
from trainer.inference.retrieval.jobs import alone
from trainer.strategies.world import World

WORLD = World(0, 1, None, timedelta(seconds=1))


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"lock cannot be opened"), alone(tmp_path, WORLD):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    with alone(tmp_path, WORLD):
        with pytest.raises(ConfigError, match=r"another job writes"), alone(tmp_path, WORLD):
            pass
        # The refused one has left the lock.
        with pytest.raises(ConfigError, match=r"another job writes"), alone(tmp_path, WORLD):
            pass
    assert not list(tmp_path.iterdir())
    with alone(tmp_path, WORLD):
        pass


def test_a_lock_whose_file_has_gone_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(file: BinaryIO, message: str) -> None:
        (tmp_path / ".lock").unlink()  # as the end of another job, between opening and locking

    monkeypatch.setattr(flock, "lock_or_reject", lock)
    with pytest.raises(ConfigError, match=r"another job writes"), alone(tmp_path, WORLD):
        pass
