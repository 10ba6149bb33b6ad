"""Locks of files: held by another process, or not offered by the file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from samestep.errors import ConfigError
from samestep.storage import flock


def test_a_lock_that_another_holds_is_told_by_the_callers_message(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "ab") as one, open(tmp_path / "lock", "ab") as other:
        flock.lock_or_reject(one, "nobody holds it")
        with pytest.raises(ConfigError, match=r"^another one writes$"):
            flock.lock_or_reject(other, "another one writes")


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(flock, "flock", without_locks)
    with open(tmp_path / "lock", "ab") as file, pytest.raises(ConfigError) as refused:
        flock.lock_or_reject(file, "another one writes")
    assert str(refused.value) == (
        f"{file.name} cannot be locked (No locks available). Choose a folder on a file system "
        "with file locks."
    )
