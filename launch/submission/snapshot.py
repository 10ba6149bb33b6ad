"""A copy of the code for a job, so that you can go on editing while it waits in a queue."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.errors import LaunchError

logger = logging.getLogger(__name__)

MOST_BYTES = 100 * 2**20


def files_of(directory: Path, without: Sequence[Path]) -> list[Path] | None:
    """The files in a folder that git tracks, or would add; None without git.

    Args:
        without: folders whose files are excluded: the run's own.

    Returns:
        Paths relative to `directory`.

    Raises:
        LaunchError: they are too large to be code.
    """
    try:
        files, others = _known(directory)
    except LaunchError as error:
        logger.info(
            "no snapshot of the code is taken, so the job runs what is installed: %s", error
        )
        return None
    excluded = [
        folder.relative_to(directory) for folder in without if folder.is_relative_to(directory)
    ]
    files, others = (
        [path for path in paths if not any(map(path.is_relative_to, excluded))]
        for paths in (files, others)
    )
    if others:
        logger.warning(
            "the snapshot of the code is without %s: it takes the files of this repository and of "
            "its submodules",
            ", ".join(map(str, others)),
        )
    sizes = {path: (directory / path).stat().st_size for path in files}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise LaunchError(
            f"the code in {directory} has {total / 2**20:.0f} MiB, and {largest} is its largest "
            "file. Name in .gitignore what is no code, or set cluster.code=installed."
        )
    return files


def _known(directory: Path) -> tuple[list[Path], list[Path]]:
    """The files that git tracks or would add, and the folders of which it knows no files.

    Follows submodules, and links to folders inside the repository: their files are copied.

    Raises:
        LaunchError: git is not installed, or the folder is in no repository.
    """
    files: list[Path] = []
    links: list[Path] = []
    others: list[Path] = []
    listing = _git(directory, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in listing.split("\0")[:-1]:
        path, place = Path(name), directory / name
        if place.is_file():
            # A link to a file elsewhere would carry it along, such as a private key.
            is_inside = place.resolve().is_relative_to(directory.resolve())
            (files if is_inside else others).append(path)
        elif place.is_symlink() and place.exists():
            links.append(path)
        # A name with a slash at the end is a repository that is no submodule.
        elif (place / ".git").exists() and not name.endswith("/"):
            try:
                inner_files, inner_others = _known(place)
            except LaunchError:  # it is broken, or belongs to somebody else
                inner_files, inner_others = [], [Path()]
            files += [path / inner for inner in inner_files]
            others += [path / inner for inner in inner_others]
        elif place.is_dir():
            others.append(path)
    # A link `linked` to the folder `own` adds `linked/part.py` for `own/part.py`.
    root, linked = directory.resolve(), []
    for link in links:
        target = (directory / link).resolve()
        behind = []
        if target.is_relative_to(root):
            inside = target.relative_to(root)
            behind = [
                link / file.relative_to(inside) for file in files if file.is_relative_to(inside)
            ]
        linked += behind
        if not behind:
            others.append(link)
    return files + linked, others


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise LaunchError("git is not on this machine") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise LaunchError(said.removeprefix("fatal: "))
    return done.stdout.decode(errors="surrogateescape")


def take(directory: Path, files: list[Path], target: Path) -> None:
    """Copies the files, and writes the commit beside them, with -dirty if they differ from it."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / path, target / path)
    commit = ""
    with suppress(LaunchError):  # there is no commit yet
        commit = _git(directory, "describe", "--always", "--dirty", "--abbrev=40")
    (target.parent / "commit").write_text(commit)
