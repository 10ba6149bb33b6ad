"""Whether a step's folder is whole: what commits it, and how damage is found later.

`checksums.json` names every file with its SHA-256 and size; `COMMITTED` holds the SHA-256 of
`checksums.json` and is written last. Writes are atomic (`files`), so a crash at any byte leaves a
step without `COMMITTED`, or a whole one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer.checkpoint import files
from trainer.checkpoint.files import Location
from trainer.config import Tree, renamed
from trainer.errors import CheckpointError
from trainer.storage import Digest

FORMAT = 1
META = "meta.json"
_CHECKSUMS = "checksums.json"
_COMMITTED = "COMMITTED"


def step_folder(root: Location, step: int) -> Location:
    """Where a step lies among the checkpoints of a run."""
    return root / f"step-{step:08d}"


def committed_steps(root: Location) -> list[int]:
    """The steps that were committed, oldest first; they may have been damaged since."""
    return [step for step, (_, committed) in _step_folders(root).items() if committed]


def uncommitted_folders(root: Location) -> list[Location]:
    """What saves that were cut short have left behind."""
    return [folder for folder, committed in _step_folders(root).values() if not committed]


def is_committed(folder: Location) -> bool:
    """Whether a step was written to its end; says nothing about damage since."""
    return (folder / _COMMITTED).exists()


def _step_folders(root: Location) -> dict[int, tuple[Location, bool]]:
    """The folder of each step, oldest first, and whether it was committed."""
    steps = sorted(
        int(name.removeprefix("step-"))
        for name in files.names(root)
        if re.fullmatch(r"step-\d{8,}", name)
    )
    folders = [step_folder(root, step) for step in steps]
    with ThreadPoolExecutor(files.THREADS) as pool:
        return dict(
            zip(steps, zip(folders, pool.map(is_committed, folders), strict=True), strict=True)
        )


def commit(folder: Location, digests: Mapping[str, Digest]) -> None:
    """Declares that these files are all of the step, and durable."""
    checksums = {name: dataclasses.asdict(digest) for name, digest in sorted(digests.items())}
    checksums_digest = files.write(folder / _CHECKSUMS, json.dumps(checksums, indent=1).encode())
    files.write(folder / _COMMITTED, checksums_digest.sha256.encode())


def remove_step(folder: Location) -> None:
    """Removes a step, committed or not, so that a crash in the middle leaves an uncommitted one."""
    files.remove_folder(folder, first=_COMMITTED)


def read_checksums(folder: Location) -> dict[str, Digest]:
    """The files of a committed step.

    Raises:
        CheckpointError: the step is not committed, or its list of files is damaged.
    """
    if not is_committed(folder):
        raise CheckpointError(
            f"{folder} was never committed: saving it was cut short; use another step"
        )
    committed, checksums = files.read(folder / _COMMITTED), folder / _CHECKSUMS
    if files.digest(checksums).sha256.encode() != committed:
        raise _damaged(checksums, "its SHA-256 is not the one in COMMITTED")
    return {name: Digest(**digest) for name, digest in json.loads(files.read(checksums)).items()}


def identity(folder: Location) -> str:
    """A digest of all that a committed step holds."""
    return files.digest(folder / _CHECKSUMS).sha256


def rank_files(folder: Location) -> list[Location]:
    """The files of a committed step that hold tensors."""
    return [folder / name for name in read_checksums(folder) if name.endswith(".safetensors")]


def check_sizes(folder: Location) -> None:
    """Looks whether all files are there in full length, without reading them.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    for name, digest in read_checksums(folder).items():
        _check_size(folder / name, digest)


def check_content(folder: Location, share: int = 0, shares: int = 1) -> None:
    """Reads the files, or one of equal shares of them, and compares checksums.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    checksums: Sequence[tuple[str, Digest]] = sorted(read_checksums(folder).items())[share::shares]
    with ThreadPoolExecutor(files.THREADS) as pool:
        for _ in pool.map(lambda item: _check_file(folder / item[0], item[1]), checksums):
            pass


def _check_file(path: Location, expected: Digest) -> None:
    _check_size(path, expected)
    if files.digest(path) != expected:
        raise _damaged(path, f"its SHA-256 is no longer {expected.sha256[:12]}...")


def _check_size(path: Location, expected: Digest) -> None:
    size = files.size(path)
    if size != expected.bytes:
        raise _damaged(path, f"it has {size} bytes, not {expected.bytes}")


def _damaged(path: Location, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {reason}; check the disk and use another step")


def read_meta(folder: Location) -> Tree:
    """What a committed step says about itself.

    Format, step, world_size, versions, and what was given to `save`.

    Raises:
        CheckpointError: the step is not committed, its meta.json is damaged or of a format from the
            future.
    """
    _check_file(folder / META, read_checksums(folder)[META])
    meta: Tree = json.loads(files.read(folder / META))
    if meta["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {meta['format']} and this samestep reads format "
            f"{FORMAT}; "
            f"use samestep {meta['versions']['samestep']}, which wrote it"
        )
    if "config" in meta:
        meta["config"] = renamed.current(meta["config"])
    return meta
