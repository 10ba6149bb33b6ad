"""Names from outside stay in their folder, and only regular files are opened."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from samestep.errors import CorruptError
from samestep.storage import objects
from samestep.untrusted import inside, is_plain, open_regular, read_regular, regular

_GOOD = (
    "a",
    "a.jsonl",
    "tokenizer/tokenizer.json",
    "é/日本.txt",
    "a b",
    "..a",
    "a..b",
    "10:30",
    "con1",
)
_PARTS = ("a", "b.c", "~", "é")
_BAD_PARTS = ("..", ".", "", "CON", "nul.txt", "a\\b", "\0", "a\n", "\x9b", "\ud800", "a" * 256)
_BAD_NAMES = (None, 5, 1.5, [], {}, b"a", True, "", "c:", "C:/a", "/a", "a/" * 600 + "a")


def _hostile_names(seed: int, count: int) -> list[object]:
    """Names that no file may have: each has a bad part somewhere."""
    chance, names = random.Random(seed), list(_BAD_NAMES)
    while len(names) < count:
        parts = [*chance.choices(_PARTS, k=chance.randrange(4)), chance.choice(_BAD_PARTS)]
        chance.shuffle(parts)
        names.append("/".join(parts))
    return names


@pytest.mark.parametrize("name", _GOOD)
def test_a_name_becomes_a_path_in_its_folder(name: str, tmp_path: Path) -> None:
    assert inside(tmp_path, name) == tmp_path / name
    assert is_plain(name) == ("/" not in name)


def test_the_function_of_this_name_stays() -> None:
    """Python binds a module to its package when it is imported, and so would replace it."""
    assert callable(objects.names)


def test_no_hostile_name_becomes_a_path(tmp_path: Path) -> None:
    for name in _hostile_names(seed=5, count=3000):
        with pytest.raises(CorruptError, match="cannot hold a file named") as error:
            inside(tmp_path, name)
        assert not is_plain(name)
        assert len(str(error.value)) < 600
        assert "\n" not in str(error.value)


def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the path of a socket must be short
        server.bind("socket")
        for name in ("fifo", "device", "folder", "socket", "missing"):
            for read in (open_regular, regular, read_regular):
                with pytest.raises(OSError, match=r"regular|directory|No such"):
                    read(tmp_path / name)  # type: ignore[operator]
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"
        assert read_regular(regular(tmp_path / name), most=7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_regular(tmp_path / "file", most=6)
