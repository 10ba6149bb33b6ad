"""A folder that appears once it is complete."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from samestep.storage import atomic_write
from samestep.storage.local import temporary_name
from samestep.storage.new_folder import new_folder
from trainer.inference.features import new_array


def test_it_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "parent" / "target"
    with new_folder(target) as temporary:
        (temporary / "below").mkdir()
        (temporary / "below" / "file").write_text("content")
        assert not target.exists()
    assert (target / "below" / "file").read_text() == "content"
    assert list(target.parent.iterdir()) == [target]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "target") as temporary:
            (temporary / "file").touch()
            raise ValueError("the content")

    with pytest.raises(ValueError, match="the content"):
        fill()
    assert not list(tmp_path.iterdir())


def test_processes_of_one_number_on_hosts_of_one_name_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in the containers of a job on a shared disk.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer")
    with atomic_write(tmp_path / "file") as first, atomic_write(tmp_path / "file") as second:
        first.write(b"first, which is longer")
        second.write(b"second")
    assert (tmp_path / "file").read_bytes() == b"first, which is longer"
    with new_folder(tmp_path / "a") as first_folder, new_folder(tmp_path / "b") as second_folder:
        pass
    assert temporary_name(tmp_path / "a") != temporary_name(tmp_path / "a")
    with new_array(tmp_path / "array", (2,), "int64") as one:
        with new_array(tmp_path / "array", (2,), "int64") as other:
            other[:] = 2
        one[:] = 1
    assert np.load(tmp_path / "array").tolist() == [1, 1]
    assert first_folder != second_folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "array", "b", "file"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from samestep.storage.new_folder import new_folder
with new_folder(Path(sys.argv[1])) as temporary:
    (temporary / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    other = tmp_path / ".other.0123456789abcdef.tmp"
    other.mkdir()
    subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "target"], check=False)
    (left,) = tmp_path.glob(".target.*")
    with new_folder(tmp_path / "target") as first:
        assert not left.exists()
        with new_folder(tmp_path / "target"):
            assert first.exists()  # another process would find it locked
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "target"]


def test_a_folder_that_may_be_left_is_named_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("samestep.storage.new_folder.flock", without_locks)
    left = tmp_path / ".target.0123456789abcdef.tmp"
    left.mkdir()
    with caplog.at_level(logging.WARNING), new_folder(tmp_path / "target"):
        pass
    assert left.is_dir()
    assert f"{left} may be left by a command that was stopped" in caplog.text


def test_a_folder_with_content_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def fill() -> None:
        with new_folder(target) as temporary:
            (temporary / "file").write_text("late")
            target.mkdir()
            (target / "file").write_text("early")

    with pytest.raises(OSError, match="not empty"):
        fill()
    assert (target / "file").read_text() == "early"
    assert list(tmp_path.iterdir()) == [target]
