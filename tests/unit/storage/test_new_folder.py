"""A folder that appears once it is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.storage import new_folder


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


def test_what_a_killed_process_of_the_same_number_has_left_is_no_part_of_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with new_folder(target) as temporary:
        pass
    target.rmdir()
    temporary.mkdir()
    (temporary / "half").touch()
    with new_folder(target) as temporary:
        (temporary / "file").touch()
    assert [path.name for path in target.iterdir()] == ["file"]


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
