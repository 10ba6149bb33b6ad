"""A file of rows that a command goes on writing after it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypedDict

from samestep.errors import ConfigError
from samestep.storage import flock, json_lines, write_text
from samestep.stored_json import Count, damage_of, read_json


class _Progress(TypedDict):
    bytes: Count
    records: Count
    rows: Count
    made_of: dict[str, object]


class Resumable:
    """A file that is appended to, and its progress.

    Attributes:
        records: number of input records consumed.
        rows: number of rows written.

    Args:
        file: the unfinished output, locked.
        path: where the progress is kept.
        made_of: settings and inputs that the content depends on.

    Raises:
        ConfigError: the file was begun with something else.
    """

    def __init__(self, file: BinaryIO, path: Path, made_of: dict[str, object]) -> None:
        self._file, self._path, self._made_of = file, path, made_of
        self.records = self.rows = size = 0
        progress: _Progress = {"bytes": 0, "records": 0, "rows": 0, "made_of": {}}
        if path.exists():
            with damage_of(path, ConfigError, "Remove it to start over."):
                progress = read_json(path, _Progress)
        # A shorter file than the progress says was removed or replaced: begin again.
        if 0 < progress["bytes"] <= os.fstat(file.fileno()).st_size:
            before = progress["made_of"]
            changed = [name for name, value in made_of.items() if before.get(name) != value]
            if changed:
                raise ConfigError(
                    f"{path} was begun with another {' and '.join(changed)}; use the same again, "
                    "or remove the file to start over"
                )
            self.records, self.rows = progress["records"], progress["rows"]
            size = progress["bytes"]
        # Lines after the saved progress are written again. Example: rows 1 to 4096 were saved
        # when a kill came in the middle of the next 2048; the cut leaves 4096.
        file.truncate(size)
        file.seek(size)

    def add(self, lines: bytes, records: int, rows: int) -> None:
        """Appends lines. They reach the disk before the progress that counts them does."""
        self._file.write(json_lines.compressed(lines, self._path.name.removesuffix(".progress")))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records += records
        self.rows += rows
        progress = {
            "records": self.records,
            "rows": self.rows,
            "bytes": self._file.tell(),
            "made_of": self._made_of,
        }
        write_text(self._path, json.dumps(progress))


def with_sizes(files: Sequence[str]) -> list[list[str | int | None]]:
    """Each file with its size in bytes, by which a file that has changed is noticed.

    The size is None behind an address.
    """
    return [[path, os.path.getsize(path) if os.path.isfile(path) else None] for path in files]


@contextmanager
def resumable(output: Path, made_of: dict[str, object]) -> Iterator[Resumable]:
    """Opens OUTPUT.partial and OUTPUT.progress; OUTPUT appears once it is complete.

    Args:
        output: the path given with --output.

    Raises:
        ConfigError: it exists, another process writes it, or it was begun with something else.
    """
    partial = output.with_name(f"{output.name}.partial")
    progress = output.with_name(f"{output.name}.progress")
    with open(partial, "ab+") as file:
        flock.lock_or_reject(
            file, f"another process writes {output}; wait for it, or name another file"
        )
        # Another process may have written it since this command began, while a model was loaded.
        try:
            json_lines.check_new(output, "--output")
        except ConfigError:
            # With content, the file is another process's: a rename keeps it open here.
            if os.fstat(file.fileno()).st_size == 0:
                partial.unlink(missing_ok=True)
            raise
        done = Resumable(file, progress, made_of)
        try:
            yield done
        finally:
            if not done.records:
                partial.unlink()  # the first row already failed: leave nothing behind
        partial.replace(output)
    progress.unlink(missing_ok=True)
