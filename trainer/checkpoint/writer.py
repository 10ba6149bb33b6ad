"""The commit protocol: what one rank writes in a save, in which order, and when the step counts.

The saving threads run beside training, so they must not use collectives, which would mix with those
of the training step. They communicate through files in the step's folder instead:

    rank r > 0   writes rank-NNNNN.safetensors, then rank-NNNNN.json with its digest;
                 or rank-NNNNN.failed with the reason if it cannot
    rank 0       writes rank-00000.safetensors and meta.json, waits for the digests of all others
                 and removes them, then writes checksums.json, then COMMITTED

Every write is atomic and durable before the next one starts. So a digest exists only if its tensor
file is complete, and `COMMITTED` only if everything is; a crash at any point leaves a folder that
does not count, and the next save removes it.
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

from samestep import __version__
from samestep.errors import CheckpointError
from samestep.storage import Digest
from samestep.stored_json import checked
from trainer.checkpoint import files, integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.meta import FORMAT

logger = logging.getLogger(__name__)


def describe(step: int, world_size: int, meta: Mapping[str, object]) -> bytes:
    """Returns the content of meta.json.

    Args:
        step: number of optimizer steps taken.
        world_size: number of ranks that write.
        meta: everything else that is needed to resume; must be JSON.
    """
    header = {
        "format": FORMAT,
        "step": step,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
        "versions": {
            "samestep": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
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
    lease: Lease | None = None,
) -> None:
    """Writes a rank's files of a step. Rank 0 returns when the step is committed.

    Args:
        folder: of the step; exists, with files of this save only.
        content: header and body of the rank's safetensors file.
        meta: content of meta.json, which rank 0 writes.
        peer_timeout: seconds that rank 0 waits for the others after writing its own file.
        lease: of rank 0. If another training has taken over, the process ends.

    Raises:
        CheckpointError: a file cannot be written; on rank 0 also, another rank failed or is late.
    """
    try:
        digest = files.write(folder / _tensors(rank), *content)
        if rank > 0:
            # Last, as rank 0 takes the digest for a promise that the tensor file is complete.
            files.write(folder / _note(rank), files.seal(dataclasses.asdict(digest)))
            return
        digests = {_tensors(0): digest, integrity.META: files.write(folder / integrity.META, meta)}
        digests |= _await_peers(folder, world_size, peer_timeout)
        if lease is None:
            integrity.commit(folder, digests)
            return
        lease.check_or_end()
        integrity.commit(folder, digests, lease.number)
        # Again: whoever takes over from now on finds this step.
        lease.check_or_end()
    except Exception as error:
        if rank > 0:  # lets rank 0 give up now instead of after the timeout
            try:
                files.write(folder / f"{_name(rank)}.failed", str(error).encode())
            except CheckpointError:
                logger.warning("saving failed here, and rank 0 cannot be told: %s", error)
        raise


def _await_peers(folder: Location, world_size: int, timeout: float) -> dict[str, Digest]:
    """Waits for the digests of all other ranks, and removes the files with them."""
    waiting = set(range(1, world_size))
    digests = {}
    deadline = time.monotonic() + timeout
    while waiting:
        present = set(files.names(folder))
        for rank in sorted(waiting):
            failure = folder / f"{_name(rank)}.failed"
            if failure.name in present:
                said = files.read(failure).decode(errors="replace")
                raise CheckpointError(f"rank {rank} {said}")
        # All that are there by now together: one by one, 1,024 ranks would keep an object store
        # busy for a minute.
        ready = [rank for rank in sorted(waiting) if _note(rank) in present]
        notes = files.read_all([folder / _note(rank) for rank in ready])
        for rank, note in zip(ready, notes, strict=True):
            try:
                digests[_tensors(rank)] = checked(files.unseal(note)[0], Digest)
            except ValueError as error:
                raise CheckpointError(
                    f"{folder / _note(rank)} is damaged. Check the disk"
                ) from error
        files.remove_files(folder, map(_note, ready))
        waiting.difference_update(ready)
        if waiting and time.monotonic() > deadline:
            raise CheckpointError(
                f"no files from ranks {sorted(waiting)[:8]} in {folder} after {timeout:.0f} s. "
                "Check that these processes run, and use a folder on a file system that all nodes "
                "share"
            )
        if waiting:
            files.pause(folder)
    return digests


def _tensors(rank: int) -> str:
    return f"{_name(rank)}.safetensors"


def _note(rank: int) -> str:
    return f"{_name(rank)}.json"


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"
