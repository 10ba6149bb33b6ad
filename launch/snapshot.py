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
    try:
        known, others = _known(directory)
    except LaunchError as error:
        logger.info(
            "no snapshot of the code is taken, so the job runs what is installed: %s", error
        )
        return None
    kept_out = [
        place.relative_to(directory) for place in without if place.is_relative_to(directory)
    ]
    files, left_out = (
        [path for path in paths if not any(map(path.is_relative_to, kept_out))]
        for paths in (known, others)
    )
    if left_out:
        logger.warning(
            "the snapshot of the code is without %s: of folders, it takes those of this one and its submodules",
            ", ".join(map(str, left_out)),
        )
    sizes = {path: (directory / path).stat().st_size for path in files}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise LaunchError(
            f"the code in {directory} would be {sum(sizes.values()) / 2**20:.0f} MiB, {largest} the largest file: name "
            "in .gitignore what is no code, or set cluster.code=installed"
        )
    return files


def _known(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files that git knows of in a folder, or would add; and the folders that it has no files of.

    Files of submodules are among them, and those that links to folders lead to.

    Raises:
        LaunchError: there is no git, or it knows nothing of the folder.
    """
    files: list[Path] = []
    links: list[Path] = []
    others: list[Path] = []
    for name in _git(
        directory, "ls-files", "--cached", "--others", "--exclude-standard", "-z"
    ).split("\0")[:-1]:
        path, place = Path(name), directory / name
        if place.is_file():
            files.append(path)
        elif place.is_symlink() and place.exists():
            links.append(path)
        elif (place / ".git").exists() and not name.endswith(
            "/"
        ):  # as repositories do that are no submodules
            try:
                of_submodule = _known(place)
            except LaunchError:  # it is broken, or belongs to somebody else
                of_submodule = [], [Path()]
            for found, new in zip((files, others), of_submodule, strict=True):
                found += [path / each for each in new]
        elif place.is_dir():
            others.append(path)
    root, behind = directory.resolve(), []
    for link in links:
        target = (directory / link).resolve()
        inside = (
            target.relative_to(root) if target.is_relative_to(root) else root
        )  # where none of them is
        reached = [link / each.relative_to(inside) for each in files if each.is_relative_to(inside)]
        behind += reached
        others += [link] * (not reached)
    return files + behind, others


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise LaunchError("git is not on this machine") from error
    if done.returncode:
        raise LaunchError(
            done.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("fatal: ")
        )
    return done.stdout.decode(errors="surrogateescape")


def take(directory: Path, files: list[Path], target: Path) -> None:
    """Copies the files, and notes the commit that they differ from, if at all."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / path, target / path)
    commit = subprocess.run(
        ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
    )
    (target.parent / "commit").write_text(commit.stdout)
