"""A step's folder: whether it is committed, and whether its files are still as they were written.

`checksums.json` lists every file with its SHA-256 and size. `COMMITTED` holds the SHA-256 of
`checksums.json` and, if it has one, the number of the writer's lease; it is written last. All
writes are atomic (see `files`), so a crash at any byte leaves either a step without `COMMITTED`,
which is ignored, or a complete one.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from samestep.errors import CheckpointError, ObjectNotFoundError, StorageError
from samestep.storage import Digest
from samestep.storage.urls import PARALLEL_REQUESTS
from samestep.stored_json import JsonError, parse_json
from samestep.untrusted import is_plain
from trainer.checkpoint import files, history
from trainer.checkpoint.files import Location

logger = logging.getLogger(__name__)

META = "meta.json"
COMMITTED = "COMMITTED"
_CHECKSUMS = "checksums.json"
_MOST_DIGITS = 19  # of the number of a lease
_SHA256 = re.compile(rb"[0-9a-f]{64}")
# Errors of a file system that say that a file is gone or its bytes are. Others, such as a stale
# handle, a missing permission or too many open files, say nothing about the bytes.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}

Check = Callable[[Location], None]
"""Raises a CheckpointError if a step is damaged: `check_sizes` or `check_content`."""


def step_folder(root: Location, step: int) -> Location:
    """Returns the folder of a step, in the folder of all checkpoints of a run."""
    found = [folder for folder in history.folders(files.names(root)) if folder.step == step]
    if len(found) > 1:  # several trainings have saved it, of which one counts
        for folder in reversed(listed(root)):
            if folder.step == step and folder.committed and folder.counts:
                return folder.place
    name = found[-1].name if found else history.plain_name(step)
    return root / name


def committed_steps(root: Location, known: dict[str, bytes] | None = None) -> list[int]:
    """Returns the committed steps that count, oldest first; they may have been damaged since.

    Steps of trainings from which the run did not continue do not count, see
    `trainer.checkpoint.history`.

    Args:
        known: as for `listed`.
    """
    return steps_that_count(listed(root, known))


def steps_that_count(saved: Iterable[Saved]) -> list[int]:
    """Returns the committed steps that count, oldest first.

    Args:
        saved: the result of `listed`.
    """
    return sorted({each.step for each in saved if each.committed and each.counts})


def uncommitted_folders(root: Location) -> list[Location]:
    """Returns the folders of saves that were interrupted, or are under way."""
    return [each.place for each in listed(root) if not each.committed]


def superseded_folders(root: Location) -> list[Location]:
    """Returns the folders of committed steps that do not count."""
    return [each.place for each in listed(root) if each.committed and not each.counts]


def is_committed(folder: Location) -> bool:
    """Whether a step was written completely; says nothing about damage since."""
    return (folder / COMMITTED).exists()


@dataclasses.dataclass(frozen=True)
class Saved:
    """A folder of a step.

    Attributes:
        step: number of optimizer steps taken.
        lease: that committed the step; 0 if none did.
        place: the folder.
        committed: whether the step was written completely.
        counts: whether the step is on the line of history.
    """

    step: int
    lease: int
    place: Location
    committed: bool
    counts: bool


def listed(
    root: Location,
    known: dict[str, bytes] | None = None,
    names: Collection[str] | None = None,
) -> list[Saved]:
    """Returns all folders of steps, sorted by step, then by lease.

    Args:
        known: the content of `COMMITTED` by folder, and of decided leases by name, which is not
            read again; new ones are added. The caller takes out folders that it removes.
        names: what is in the folder; None lists it.

    Raises:
        CheckpointError: a small file is damaged, and which steps count is unknown.
    """
    names = files.names(root) if names is None else names
    known = {} if known is None else known

    def look(folder: history.Folder) -> Saved:
        place = root / folder.name
        committed = known.get(folder.name)
        if committed is None and (committed := files.read_if_there(place / COMMITTED)) is not None:
            known[folder.name] = committed
        if committed is None:
            return Saved(folder.step, 0, place, committed=False, counts=True)
        sha256, lease = _split(committed)
        if not lease and len(committed) > len(sha256):  # the number is damaged
            lease = _claimed_by(place) or 0
        return Saved(folder.step, lease, place, committed=True, counts=True)

    # In threads, because each look is a request if the root is in an object store.
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        saved = list(pool.map(look, history.folders(names)))
    committed = {(each.step, each.lease) for each in saved if each.committed}
    stretches = history.line(root, names, committed, known)
    for index, each in enumerate(saved):
        if each.committed and not history.counts(stretches, each.step, each.lease):
            claimed = _claimed_by(each.place)
            if claimed and history.counts(stretches, each.step, claimed):
                raise CheckpointError(
                    f"{each.place / COMMITTED} or {history.NUMBER} beside it is damaged: they name "
                    f"leases {each.lease} and {claimed}, and by only one of them the step counts. "
                    "Restore the file from a backup, or move the folder away"
                )
            saved[index] = dataclasses.replace(each, counts=False)
    return sorted(saved, key=lambda each: (each.step, each.lease))


def _split(committed: bytes) -> tuple[bytes, int]:
    """Returns the SHA-256 and the lease in the content of `COMMITTED`; 0 if it names none."""
    return committed[:64], _lease(committed[65:])


def _lease(number: bytes) -> int:
    return int(number) if number.isdigit() and len(number) < _MOST_DIGITS else 0


def _claimed_by(folder: Location) -> int | None:
    """Returns the lease in the file `LEASE` of a step, 0 if it names none; None without a file."""
    content = files.read_if_there(folder / history.NUMBER)
    if content is None:
        return None
    return _lease(content)


def damaged_leases(
    root: Location, saved: Iterable[Saved], known: dict[str, bytes] | None = None
) -> list[str]:
    """Describes the damaged leases under which steps were committed.

    Args:
        saved: the result of `listed`.
        known: as for `listed`.
    """
    damage = []
    for number in sorted({each.lease for each in saved if each.lease}):
        record = history.read_record(root, number, known)
        if record is not None and record.is_damaged:
            damage.append(f"{root / history.lease_name(number)} is damaged")
    return damage


def damaged_numbers(saved: Iterable[Saved]) -> list[str]:
    """Describes the steps that count, and in which two files name different leases."""
    damage = []
    for each in saved:
        if not (each.committed and each.counts):
            continue
        claimed = _claimed_by(each.place)
        committed = files.read_if_there(each.place / COMMITTED)
        if committed is not None and claimed not in (None, _split(committed)[1]):
            damage.append(f"step {each.step}: {COMMITTED} and {history.NUMBER} differ")
    return damage


def commit(folder: Location, digests: Mapping[str, Digest], lease: int = 0) -> None:
    """Commits a step that consists of exactly these files, which must be durable by now.

    The order matters: `files.write` returns after its fsyncs, so when `COMMITTED` appears, no crash
    or power cut can take away anything that it vouches for.
    """
    checksums = {name: dataclasses.asdict(digest) for name, digest in sorted(digests.items())}
    written = files.write(folder / _CHECKSUMS, json.dumps(checksums, indent=1).encode())
    content = f"{written.sha256} {lease}" if lease else written.sha256
    files.write(folder / COMMITTED, content.encode())


def remove_step(folder: Location) -> None:
    """Removes a step, committed or not; if interrupted, it leaves an uncommitted step."""
    files.remove_folder(folder, first=COMMITTED)


def uncommit(folder: Location) -> None:
    """Makes a step one that is not committed, so that nobody begins to read it."""
    files.remove(folder / COMMITTED)


def clear_step(folder: Location) -> None:
    """Removes the files of a step, but for its lease, so no other training takes its name."""
    uncommit(folder)
    files.remove_files(folder, [name for name in files.names(folder) if name != history.NUMBER])


def read_checksums(folder: Location) -> dict[str, Digest]:
    """Returns the files of a committed step, except `checksums.json` and `COMMITTED`.

    Raises:
        CheckpointError: the step is not committed, or its list of files is damaged.
    """
    # Every rank reads both files, so each is requested once: 1,024 ranks start at the same time.
    committed = files.read_if_there(folder / COMMITTED)
    if committed is None:
        raise CheckpointError(
            f"{folder} was never committed: saving it was interrupted. Use another step"
        )
    # COMMITTED vouches for checksums.json, which vouches for all other files.
    expected, _ = _split(committed)
    if not _SHA256.fullmatch(expected):
        raise damaged(folder / COMMITTED, "it does not begin with a SHA-256")
    content = files.read(folder / _CHECKSUMS)
    if hashlib.sha256(content).hexdigest().encode() != expected:
        raise damaged(folder / _CHECKSUMS, "its SHA-256 is not the one in COMMITTED")
    try:
        checksums = parse_json(content, dict[str, Digest])
    except JsonError as error:
        raise damaged(folder / _CHECKSUMS, str(error)) from error
    if META not in checksums:
        raise damaged(folder / _CHECKSUMS, f"it does not list {META}")
    for name in checksums:
        # A stranger's could name the tensors of another run, or a device without an end.
        if not is_plain(name) or name in (COMMITTED, _CHECKSUMS):
            raise damaged(folder / _CHECKSUMS, f"it names the file {name[:100]!r}")
    return checksums


def identity(folder: Location) -> str:
    """Returns a digest of everything in a committed step."""
    return files.digest(folder / _CHECKSUMS).sha256


def rank_files(folder: Location) -> list[Location]:
    """Returns the tensor files of a committed step."""
    return tensor_files(folder, read_checksums(folder))


def tensor_files(folder: Location, names: Iterable[str]) -> list[Location]:
    """Returns the tensor files among the names of files in a step."""
    return [folder / name for name in names if name.endswith(".safetensors")]


def check_sizes(folder: Location) -> None:
    """Checks that all files exist with their full sizes, without reading them.

    Raises:
        CheckpointError: with the file and its damage.
    """
    checksums, found = read_checksums(folder), files.sizes(folder)
    for name, digest in checksums.items():
        path = folder / name
        # A missing file is asked for once more, for an error that says why.
        _check_size(path, found[name] if name in found else files.size(path), digest)


def check_content(folder: Location, rank: int = 0, world_size: int = 1) -> None:
    """Reads the files and compares their checksums; each rank checks every world_size-th file.

    Raises:
        CheckpointError: with the file and its damage.
    """
    # With 2 ranks and files a, b, c: rank 0 reads a and c, rank 1 reads b.
    checksums = sorted(read_checksums(folder).items())[rank::world_size]
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        for _ in pool.map(lambda item: _check_file(folder / item[0], item[1]), checksums):
            pass  # raises the error of a thread


def find_damage(folder: Location, check: Check) -> str | None:
    """Returns the damage that a check finds in a committed step, or None.

    Raises:
        CheckpointError: the store does not answer, or the file system cannot read a file now.
            Treating that as damage would make a run resume from an older step and delete this one.
    """
    try:
        check(folder)
    except CheckpointError as error:
        if not _is_damage(error):
            raise
        return str(error)
    return None


def _is_damage(error: CheckpointError) -> bool:
    if isinstance(error, StorageError):
        return isinstance(error, ObjectNotFoundError)
    cause = error.__cause__
    return not isinstance(cause, OSError) or cause.errno in _DAMAGE


def read_checked(path: Location, expected: Digest) -> bytes:
    """Returns the content of a small file, which must be as it was when the step was committed.

    Raises:
        CheckpointError: it is damaged, or cannot be read.
    """
    content = files.read(path)
    _check_size(path, len(content), expected)
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise _changed(path, expected)
    return content


def _check_file(path: Location, expected: Digest) -> None:
    _check_size(path, files.size(path), expected)
    # The size is free to check; the digest reads the whole file.
    if files.digest(path) != expected:
        raise _changed(path, expected)


def _check_size(path: Location, size: int, expected: Digest) -> None:
    if size != expected.bytes:
        raise damaged(path, f"it has {size} bytes, not {expected.bytes}")


def _changed(path: Location, expected: Digest) -> CheckpointError:
    return damaged(path, f"its SHA-256 is no longer {expected.sha256[:12]}...")


def damaged(path: Location, reason: str) -> CheckpointError:
    """The error of a damaged file."""
    return CheckpointError(f"{path} is damaged: {reason}. Check the disk, and use another step")
