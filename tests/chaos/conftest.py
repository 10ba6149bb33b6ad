"""What all tests of the chaos suite check: that nothing is left of a run but its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.commands import Start

_PATIENCE = 10.0  # seconds that the last of a run may take to go
_SHARED_MEMORY = "/dev/shm"


@pytest.fixture
def nothing_left(start: Start, tmp_path: Path) -> Iterator[None]:
    """Fails a test whose commands leave a process (and with it its ports), a temporary file or
    shared memory behind.
    """
    temporary, before = tmp_path / "temporary", set(os.listdir(_SHARED_MEMORY))
    yield
    deadline = time.monotonic() + _PATIENCE
    while left := _processes(temporary) + _files(temporary) + _shared_memory(before):
        assert time.monotonic() < deadline, f"left behind: {', '.join(left)}"
        time.sleep(0.1)


def _processes(temporary: Path) -> list[str]:
    """Those that come of a command of this test, wherever they have gone since.

    All of them have one TMPDIR.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if f"TMPDIR={temporary}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(f"process {process.name}")
    return found


def _files(temporary: Path) -> list[str]:
    """Temporary files, but for the cache of torch's compiler, which stays on purpose."""
    return [str(path) for path in temporary.glob("*") if not path.name.startswith("torchinductor_")]


def _shared_memory(before: set[str]) -> list[str]:
    """What has come and nobody uses.

    What somebody does is another test's, or that of a process that is told of.
    """
    new = {
        file.inode(): file.path for file in os.scandir(_SHARED_MEMORY) if file.name not in before
    }
    for process in Path("/proc").glob("[0-9]*") if new else ():
        with suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if _SHARED_MEMORY in line:
                    new.pop(int(line.split()[4]), None)
    return list(new.values())
