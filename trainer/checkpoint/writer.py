"""One rank's part in writing a step.

Its own file, and on rank 0 the commit once all other files are there.

Runs beside training, so ranks speak through files only, never through a collective: each leaves a
note `rank-NNNNN.json` with the digest of its file, or `rank-NNNNN.failed` with the reason why there
is none.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import torch

import trainer
from trainer.checkpoint import files, integrity
from trainer.checkpoint.files import Location
from trainer.errors import CheckpointError
from trainer.storage import Digest

logger = logging.getLogger(__name__)


def describe(step: int, world_size: int, meta: Mapping[str, object]) -> bytes:
    """The content of meta.json.

    Args:
        step: the number of optimizer steps taken.
        world_size: number of ranks that write.
        meta: what else is needed to go on; anything JSON can hold.
    """
    versions = {
        "samestep": trainer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    saved = datetime.now(UTC).isoformat(timespec="seconds")
    header = {
        "format": integrity.FORMAT,
        "step": step,
        "saved": saved,
        "world_size": world_size,
        "versions": versions,
    }
    assert not header.keys() & meta.keys(), f"reserved: {sorted(header.keys() & meta.keys())}"
    return json.dumps(header | dict(meta), indent=1).encode()


def write_step(
    folder: Location,
    content: tuple[bytes, memoryview],
    meta: bytes,
    *,
    rank: int,
    world_size: int,
    peer_timeout: float,
) -> None:
    """Writes the rank's file into the step's folder; rank 0 returns when the step is committed.

    Args:
        folder: of the step; exists and is empty but for the files of this save.
        content: header and body of the rank's safetensors file.
        meta: the content of meta.json; rank 0 writes it.
        rank: of this process.
        world_size: number of ranks that write.
        peer_timeout: seconds that rank 0 waits for the others after writing its own file.

    Raises:
        CheckpointError: a file cannot be written, or on rank 0 those of another rank do not come.
    """
    try:
        digest = files.write(folder / f"{_name(rank)}.safetensors", *content)
        if rank > 0:
            files.write(
                folder / f"{_name(rank)}.json", json.dumps(dataclasses.asdict(digest)).encode()
            )
            return
        digests = {
            f"{_name(0)}.safetensors": digest,
            integrity.META: files.write(folder / integrity.META, meta),
        }
        integrity.commit(folder, digests | _await_peers(folder, world_size, peer_timeout))
    except Exception as error:
        if rank > 0:
            try:
                files.write(folder / f"{_name(rank)}.failed", str(error).encode())
            except CheckpointError:
                logger.warning("the others cannot even be told that saving failed here: %s", error)
        raise


def _await_peers(folder: Location, world_size: int, timeout: float) -> dict[str, Digest]:
    """Waits for the notes of all other ranks, and takes them away."""
    waiting = set(range(1, world_size))
    digests = {}
    deadline = time.monotonic() + timeout
    while waiting:
        present = set(files.names(folder))
        for rank in sorted(waiting):
            note = folder / f"{_name(rank)}.json"
            if f"{_name(rank)}.failed" in present:
                raise CheckpointError(
                    f"rank {rank} {files.read(folder / f'{_name(rank)}.failed').decode()}"
                )
            if note.name in present:
                digests[f"{_name(rank)}.safetensors"] = Digest(**json.loads(files.read(note)))
                files.remove(note)
                waiting.remove(rank)
        if waiting and time.monotonic() > deadline:
            raise CheckpointError(
                f"no files from ranks {sorted(waiting)[:8]} in {folder} after {timeout:.0f} s; "
                "check that these "
                "processes run and that the folder is on a file system that all nodes share"
            )
        if waiting:
            files.wait_a_little(folder)
    return digests


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"
