"""A folder that appears once it is complete."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from trainer.inference.features import new_array
from trainer.storage import atomic_write, new_folder
from trainer.storage.local import temporary_name


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
