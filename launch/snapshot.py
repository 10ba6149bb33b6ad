"""A copy of the code that a job runs, so that editing goes on while it waits in a queue."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import LaunchError

logger = logging.getLogger(__name__)

MOST_BYTES = 100 * 2**20


def files_of(directory: Path, without: Sequence[Path]) -> list[Path] | None:
    """The files that git knows of in a folder, or would add, relative to it; None where there is no git.

    Args:
        directory: the folder.
        without: folders whose files are left out: the run's own.

    Raises:
        LaunchError: they are too many to be code.
    """
    command = ["git", "-C", str(directory), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        return None
    if done.returncode:
        return None
    paths = [Path(name) for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]
    kept_out = [place.relative_to(directory) for place in without if place.is_relative_to(directory)]
    files = [path for path in paths if (directory / path).is_file() and not any(map(path.is_relative_to, kept_out))]
    sizes = {path: (directory / path).stat().st_size for path in files}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise LaunchError(
            f"the code in {directory} would be {sum(sizes.values()) / 2**20:.0f} MiB, {largest} the largest file: name "
            "in .gitignore what is no code, or set cluster.code=installed"
        )
    return files


def take(directory: Path, files: list[Path], target: Path) -> None:
    """Copies the files, and notes the commit that they differ from, if at all."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / path, target / path)
    commit = subprocess.run(
        ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True
    )
    (target.parent / "commit").write_text(commit.stdout)
