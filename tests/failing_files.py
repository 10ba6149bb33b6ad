"""A file system whose k-th operation in a folder fails: a quota, a stale handle, a bad disk, ..."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EMFILE, errno.EIO)


class Failing:
    """Counts the operations on files in a folder that change something, and lets one fail.

    Attributes:
        failed: the operation that has failed, and its file; None if there were too few.
    """

    def __init__(self, folder: Path, number: int, error: int) -> None:
        self._folder, self._left, self._errno = os.fspath(folder), number, error
        self.failed: str | None = None

    def operation(self, name: str, path: str | bytes | os.PathLike[str]) -> None:
        if not os.fsdecode(path).startswith(self._folder) or self.failed:
            return
        if self._left == 0:
            self.failed = f"{name} of {os.fsdecode(path)}"
            raise OSError(self._errno, os.strerror(self._errno), os.fsdecode(path))
        self._left -= 1


class _Raw(io.FileIO):
    """A file whose writes and close are operations."""

    def __init__(self, failing: Failing, path: Any, mode: str) -> None:
        self._failing, self._at = failing, path
        super().__init__(path, mode)

    def write(self, content: Any, /) -> int:
        self._failing.operation("write", self._at)
        return super().write(content)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._failing.operation("close", self._at)


@contextmanager
def failing(folder: Path, number: int, error: int) -> Iterator[Failing]:
    """Lets the operation `number`, from 0, on a file in a folder fail once."""
    state = Failing(folder, number, error)
    real_open = io.open

    def open_file(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kw: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return real_open(file, mode, buffering, *args, **kw)
        state.operation("open", file)
        raw = _Raw(state, os.fspath(file), mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        binary = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)  # type: ignore[type-var]
        encoding = kw.get("encoding", "utf-8")
        return (
            binary if "b" in mode else io.TextIOWrapper(binary, encoding, newline=kw.get("newline"))
        )

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kw: Any) -> Any:
            at = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            state.operation(name, at)
            return function(path, *args, **kw)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", open_file)
        patch.setattr(builtins, "open", open_file)
        for name in ("fsync", "rename", "replace", "mkdir"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        real = os.open

        def open_descriptor(path: Any, flags: int, *args: Any, **kw: Any) -> int:
            if flags & os.O_CREAT:
                state.operation("open", path)
            return real(path, flags, *args, **kw)

        patch.setattr(os, "open", open_descriptor)
        yield state


def each_failure(
    folder: Path,
    write: Callable[[], object],
    check: Callable[[str, OSError, Exception | None], None],
    every: int = 1,
) -> int:
    """Lets operations of a writer fail, one at a time, with the errors in turn.

    Args:
        every: takes each `every`-th operation.

    Returns:
        The number of operations that have failed.
    """
    for count in itertools.count():
        number = count * every
        error = ERRORS[count % len(ERRORS)]
        raised: Exception | None = None
        with failing(folder, number, error) as state:
            try:
                write()
            except Exception as caught:
                raised = caught
        if state.failed is None:
            assert raised is None
            return count
        check(state.failed, OSError(error, "x"), raised)
    raise AssertionError


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
