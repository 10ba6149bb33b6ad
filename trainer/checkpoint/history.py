"""Which of the checkpoints in a run's folder count, when several trainings have written there.

Each training that takes a folder over has a lease with a number, `.lease-00000007` (see
`trainer.checkpoint.lease`). The lease names the checkpoint that its holder continues from, and so
the leases form one line of history: the newest lease, the one whose checkpoint it continues from,
and so on. A training that was frozen, and continues after another one has taken over, may still
write a checkpoint; as no later lease continues from it, it does not count. An example:

    lease 1 continues from nothing           and commits steps 2, 4, 6
    lease 2 continues from step 4 of lease 1 and commits steps 6', 8'
    lease 3 continues from step 8 of lease 2 and commits step 10

Step 6 was committed by lease 1 after lease 2 had looked. The line is 3, then 2 up to step 8, then 1
up to step 4: the steps 2, 4, 6', 8' and 10 count.

`COMMITTED` in the folder of a step has the number of the lease. Steps without one, of older
versions and of conversions, have the number 0 and count always: none is a late writer's.

A damaged lease must not make its holder's steps a late writer's. If no step names its number, its
holder was killed while it created the file, and has decided nothing. Otherwise its holder's steps
count, and which older ones count is unknown: if there are any, that is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypedDict

from samestep.errors import CheckpointError
from samestep.stored_json import checked
from trainer.checkpoint import files
from trainer.checkpoint.files import Location

NUMBER = "LEASE"
"""File in the folder of a step with the number of the lease whose holder writes there."""
NOTHING = -1
"""The step that a lease continues from if there is no checkpoint."""

_FOLDER = re.compile(r"step-(\d{8,})(?:-lease-(\d+))?")
_LEASE = re.compile(r"\.lease-(\d{8,})")
_KEYS = {"step", "of", "names_after", "token"}  # of a lease without a checksum


@dataclass(frozen=True)
class Folder:
    """A folder of a step, by its name.

    Attributes:
        step: number of optimizer steps taken.
        lease: the number in its name, if any; else the file `LEASE` has it.
    """

    name: str
    step: int
    lease: int | None


class _Lease(TypedDict):
    step: int | None
    of: int
    names_after: int


@dataclass(frozen=True)
class Record:
    """The content of a lease.

    Attributes:
        number: of the lease.
        step: that its holder continues from; None until the holder has decided.
        of: number of the lease that has written this step.
        names_after: the last step with a folder when the holder decided; the names of later steps
            are free.
        has_checksum: leases of older versions have none.
        is_damaged: the other attributes are unknown, except for the number.
    """

    number: int
    step: int | None = None
    of: int = 0
    names_after: int = NOTHING
    has_checksum: bool = True
    is_damaged: bool = False


@dataclass(frozen=True)
class Stretch:
    """Steps on the line of history: the steps of one lease, up to a last one.

    Attributes:
        or_lower: whether lower numbers count as well: older leases have left no record.
    """

    lease: int
    until: float
    or_lower: bool = False


def plain_name(step: int) -> str:
    return f"step-{step:08d}"


def lease_name(number: int) -> str:
    return f".lease-{number:08d}"


def folders(names: Collection[str]) -> list[Folder]:
    """Returns the folders of steps among the names in a run's folder, the oldest first."""
    found = [(match, name) for name in names if (match := _FOLDER.fullmatch(name))]
    all_folders = [
        Folder(name, int(match[1]), int(match[2]) if match[2] else None) for match, name in found
    ]
    return sorted(all_folders, key=lambda folder: (folder.step, folder.lease or 0))


def lease_numbers(names: Collection[str]) -> list[int]:
    """Returns the numbers of the leases among the names in a run's folder, the lowest first."""
    return sorted(int(match[1]) for name in names if (match := _LEASE.fullmatch(name)))


def read_record(
    root: Location, number: int, known: dict[str, bytes] | None = None
) -> Record | None:
    """Returns a lease; None if there is no such file.

    Args:
        known: the content of decided leases by name, which is not read again; new ones are added.
    """
    known, name = {} if known is None else known, lease_name(number)
    content = known.get(name)
    if content is None and (content := files.read_if_there(root / name)) is None:
        return None
    try:
        values, has_checksum = files.unseal(content)
        if not has_checksum and values.keys() != _KEYS:  # a damaged key may be the checksum's
            raise ValueError("not the keys of a lease")
        lease = checked(values, _Lease)
        record = Record(number, lease["step"], lease["of"], lease["names_after"], has_checksum)
    except ValueError:
        return Record(number, is_damaged=True)
    if record.step is not None:  # a lease decides once
        known[name] = content
    return record


def line(
    root: Location,
    names: Collection[str],
    committed: Collection[tuple[int, int]] = (),
    known: dict[str, bytes] | None = None,
) -> list[Stretch]:
    """Returns the line of history, the newest lease first; empty if there are no leases.

    Args:
        names: what is in the folder.
        committed: step and lease of each committed step.
        known: as for `read_record`.

    Raises:
        CheckpointError: a lease is damaged, and which of the committed steps count is unknown.
    """
    writers = {number for _, number in committed if number}
    record = None
    # The newest lease that has decided, or whose steps are there though its record is damaged.
    for number in reversed(lease_numbers(names)):
        record = read_record(root, number, known)
        if record is not None and (record.step is not None or number in writers):
            break
    newest = max(writers, default=0)
    if record is None or record.step is None or record.number < newest:
        # The record of the newest lease is damaged, or lost, as in a copy without hidden files.
        if record is not None and record.number == newest:
            _check_not_needed(root, newest, writers)
        return [Stretch(newest, math.inf, or_lower=True)] if newest else []
    _check_plausible(root, record, committed, writers)
    # Leases from before the oldest folder decide about nothing, and there may be thousands.
    oldest = min((folder.step for folder in folders(names)), default=0)
    # The newest holder may go on, so all of its steps count.
    stretches = [Stretch(record.number, math.inf)]
    while record.step is not None and record.step >= oldest:
        until = record.step
        earlier = read_record(root, record.of, known) if record.of < record.number else None
        if earlier is not None and earlier.is_damaged:
            _check_not_needed(root, earlier.number, writers)
        has_record = earlier is not None and earlier.step is not None
        stretches.append(Stretch(record.of, until, or_lower=not has_record))
        if earlier is None or not has_record:
            break
        record = earlier
    return stretches


def _check_not_needed(root: Location, number: int, writers: Collection[int]) -> None:
    """Raises an error if a damaged lease decides which steps of older leases count."""
    if min(writers, default=number) < number:
        raise _damaged(root, number, "is damaged")


def _check_plausible(
    root: Location,
    newest: Record,
    committed: Collection[tuple[int, int]],
    writers: Collection[int],
) -> None:
    """Raises an error if a lease without a checksum continues from a step that is not there.

    If its holder has saved nothing, all steps after that one would be lost.
    """
    if newest.has_checksum or not committed or newest.number in writers:
        return
    if (newest.step, newest.of) not in committed:
        raise _damaged(root, newest.number, f"names step {newest.step}, which is not there")


def _damaged(root: Location, number: int, damage: str) -> CheckpointError:
    return CheckpointError(
        f"{root / lease_name(number)} {damage}, and it decides which of the checkpoints there "
        "count. Restore it from a backup; or remove it, if two trainings have never written there "
        "at the same time"
    )


def counts(stretches: Sequence[Stretch], step: int, number: int) -> bool:
    """Whether a step that this lease has written is on the line."""
    # Steps of older versions and of conversions have no lease, and always count.
    if not stretches or number == 0:
        return True
    until = math.inf
    for stretch in stretches:
        # A rewind may have taken a later lease to before the step that it continued from.
        until = min(until, stretch.until)
        if stretch.lease == number or (stretch.or_lower and number < stretch.lease):
            return step <= until
    return False
