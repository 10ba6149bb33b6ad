"""The Checkpointer: saves in the background, restores at any world size, removes old steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from samestep.config import Tree
from samestep.errors import CheckpointError, ConfigError
from samestep.storage import is_url, is_writable, shown
from trainer.checkpoint import files, history, integrity, layout, restoring, writer
from trainer.checkpoint.collective import (
    await_everywhere,
    await_names,
    check_shared,
    first_error,
    gather,
    on_all_ranks,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
)
from trainer.checkpoint.files import Location
from trainer.checkpoint.holding import Hold
from trainer.checkpoint.layout import StoredTensors
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.meta import OpenedStep, open_step
from trainer.checkpoint.removal import Removal

logger = logging.getLogger(__name__)

_LEAST = {"every": 1, "keep_last": 2, "keep_every": 1, "snapshot_every": 1}


@dataclass(frozen=True)
class Config:
    """When to save, where, and what to keep.

    Attributes:
        every: steps between checkpoints.
        keep_last: number of newest checkpoints to keep; at least 2, so that one remains to fall
            back on if the newest is damaged.
        keep_every: checkpoints of steps that this divides are kept forever; None keeps only the
            newest.
        asynchronous: whether training continues while a checkpoint is written. Either way, the
            rank's tensors are copied to host memory first.
        folder: of the checkpoints, or an address such as s3://BUCKET/RUN or gs://BUCKET/RUN. Two
            runs must not share one. None is the folder `checkpoints` of the run.
        snapshot_every: steps between snapshots, which are checkpoints in the memory of the
            machines. An elastic run that loses a worker or a machine resumes from them. Each
            machine holds up to three copies of what its processes train, and as many of its
            neighbor's. None takes no snapshots.
    """

    every: int = 1000
    keep_last: int = 2
    keep_every: int | None = None
    asynchronous: bool = True
    folder: str | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = vars(self)[name]
            if value is not None and value < least:
                why = ": the newest checkpoint may be damaged" if name == "keep_last" else ""
                raise ConfigError(f"{name} is {value}. Use {least} or more{why}")
        if self.folder is not None and is_url(self.folder) and not is_writable(self.folder):
            raise ConfigError(
                f"folder {shown(self.folder)!r} can only be read. "
                "Use s3://..., gs://... or a local folder"
            )


class Checkpointer:
    """Saves and restores named tensors, sharded or not, together with a JSON description.

    All methods but `steps` and `join` are collective: all ranks call them in the same order, and
    either all return or all raise. The background threads use no collectives; they communicate
    through files (see `writer`).

    If a save fails, because of a full disk or an unreachable store, it logs a warning and removes
    what it wrote. Earlier checkpoints stay, and the next save tries again. `wait` raises the error.
    """

    def __init__(
        self,
        folder: Location,
        config: Config,
        *,
        rank: int,
        world_size: int,
        peer_timeout: float = 300.0,
        lease: Lease | None = None,
        holds: bool = False,
    ) -> None:
        """
        Args:
            folder: of all checkpoints of the run, in an object store or on a file system that all
                ranks share; `save` creates it.
            world_size: if it is above 1, the default process group must be initialized.
            peer_timeout: seconds that rank 0 waits for the files of other ranks. Must be shorter
                than the timeout of collectives, in which the others wait meanwhile: this error
                explains the failure, theirs does not.
            lease: of this process on the folder, on rank 0 of a run that trains; None if nobody
                else can write there, or if nothing is saved. Once another process has taken the
                folder over, a save ends this process.
            holds: whether this reader holds the checkpoint that it verified last, see `holding`.
        """
        self.folder = folder
        self.config = config
        self._rank = rank
        self._world_size = world_size
        self._peer_timeout = peer_timeout
        self._lease = lease
        self._removal = Removal(folder, lease)
        self._staging = layout.Staging()
        self._copying: futures.Future[tuple[bytes, memoryview]] | None = None
        self._thread: threading.Thread | None = None
        # The step of the last save, its error, and the number of saves that have failed in a row.
        self._saving = 0
        self._error: Exception | None = None
        self._failures = 0
        self._verified: set[Location] = set()
        self._holds = holds and rank == 0
        self.hold: Hold | None = None
        self._at: int | None = None  # step that was saved or restored last
        self._kept: int | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates the host memory to save these tensors, in the background.

        Without it the first save takes longer.
        """
        self._staging.reserve(layout.pieces_to_write(tensors, self._rank, self._world_size))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, object],
        kept: int | None = None,
        wait_for_copy: bool = True,
    ) -> None:
        """Writes a checkpoint; if `asynchronous`, returns once the tensors have been copied.

        One save runs at a time, and the next waits for it. A process must `wait` for its last one.
        Saving the step that was just saved or restored does nothing. Checkpoints of later steps,
        left by a run that was then resumed from an earlier one, are removed.

        Args:
            step: number of optimizer steps taken.
            tensors: by logical name. Plain tensors hold the same values on all ranks; DTensors are
                sharded or replicated over all ranks; segments are partitions over all ranks.
            meta: everything else that is needed to resume; must be JSON.
            kept: a step that retention keeps from now on, instead of the last call's.
            wait_for_copy: if false and `asynchronous`, returns at once. The caller must call
                `copied` before a tensor changes.
        """
        # The previous save must be over: its staging memory is used again.
        self.settle()
        self._kept = kept
        if step == self._at:
            return
        meta_text = writer.describe(step, self._world_size, meta)
        self._error = None
        self._saving = step
        folder = self.folder / history.plain_name(step)
        try:
            with raise_on_all_ranks(self._world_size):
                if self._rank == 0:
                    folder = self._prepare(step)
            # By name: another node may have mounted the folder at another place.
            folder = self.folder / gather(folder.name, self._world_size)[0]
            # A rank on a slow network file system must not write before it sees the folder.
            if isinstance(folder, Path):  # object stores have no folders
                await_everywhere(folder, self._peer_timeout, self._world_size)
        except CheckpointError as error:
            self._fail(step, error)
            return
        pieces = layout.pieces_to_write(tensors, self._rank, self._world_size)
        self._copying = self._staging.copy(pieces)
        # A step may be saved again after a rewind.
        self._verified.discard(folder)
        arguments = (step, folder, self._copying, meta_text)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()
        if wait_for_copy:
            self.copied()
        if not self.config.asynchronous:
            self.settle()

    def copied(self) -> None:
        """Waits until the tensors of the last save have been copied, and may change."""
        if self._copying is not None:
            futures.wait([self._copying])
            self._copying = None

    def settle(self) -> None:
        """Waits until no save is running; does not raise if the last one failed."""
        if self._thread is None:
            return
        # An error of any rank is an error of the save, so all ranks learn of it here.
        self._thread.join()
        self._thread = None
        try:
            raise_error_on_all_ranks(self._error, self._world_size)
        except CheckpointError as error:
            self._error = error
        else:
            self._at, self._failures = self._saving, 0

    @property
    def saved(self) -> int | None:
        """The step of the newest save that has ended on this rank, or of the restore."""
        thread = self._thread
        ended = thread is not None and not thread.is_alive() and self._error is None
        return self._saving if ended else self._at

    @property
    def failed(self) -> int | None:
        """The step of the last save if it failed on any rank, as of the last wait for it."""
        return None if self._error is None else self._saving

    def join(self) -> None:
        """Waits until this rank writes nothing, after an error. Not collective; does not raise."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Waits until the last save is committed.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def check_shared(self) -> None:
        """Checks that all ranks see one folder and rank 0 can write in it, before a run starts.

        Raises:
            CheckpointError: with the nodes that do not see it, or the reason of rank 0.
        """
        if self._world_size > 1 or not isinstance(self.folder, Path):
            check_shared(self.folder, self._rank, self._world_size, self._peer_timeout)

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first. Not collective."""
        return integrity.committed_steps(self.folder)

    def holds(self, step: int) -> bool:
        """Whether a step is committed; the same on all ranks."""
        found = False
        with raise_on_all_ranks(self._world_size):
            if self._rank == 0:
                found = integrity.is_committed(integrity.step_folder(self.folder, step))
        return gather(found, self._world_size)[0]

    def latest(self, most: int | None = None, least: int | None = None) -> int | None:
        """Returns the newest committed step whose checksums hold, or None if there is none.

        Each rank reads some of the files. Damaged steps are skipped with a warning.

        Args:
            most: skips later steps.
            least: skips earlier steps.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged. Only if no limit is given.
        """
        place = self._newest(most, least)
        return None if place is None else place[0]

    def _newest(self, most: int | None, least: int | None) -> tuple[int, Location] | None:
        """Returns the step that `latest` finds, and its folder."""
        self.settle()
        self._verified.clear()  # files may have been damaged since they were verified
        found: dict[int, str] = {}
        with raise_on_all_ranks(self._world_size):
            if self._rank == 0:
                known = None if self._lease is None else self._lease.known
                saved = integrity.listed(self.folder, known)
                for each in saved:
                    if not each.committed:
                        logger.warning("skipping %s: saving it was interrupted", each.place)
                for damage in integrity.damaged_leases(self.folder, saved, known):
                    logger.warning("%s; all steps of its training count", damage)
                # Of several folders of a step that count, the one of the highest lease.
                found = {
                    each.step: each.place.name for each in saved if each.committed and each.counts
                }
        # Rank 0's list, in the order of the steps, counts: the ranks of a network file system may
        # see different ones.
        names = gather(found, self._world_size)[0]
        steps = [step for step in names if (least or 0) <= step <= (step if most is None else most)]
        for step in reversed(steps):
            folder = self.folder / names[step]
            problem = self._damage(folder)
            if problem is None:
                return step, folder
            if self._rank == 0:
                logger.warning("skipping the checkpoint of step %d: %s", step, problem)
        if steps and most is None and least is None:
            # Starting from step 0 instead would remove what may still be repaired.
            raise CheckpointError(
                f"all {len(steps)} checkpoints in {self.folder} are damaged (see the warnings). "
                "Restore one from a backup, or start a new run in another output folder"
            )
        return None

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, so that a restart also resumes from `step`.

        Raises:
            CheckpointError: they cannot be removed.
        """
        self.settle()
        with raise_on_all_ranks(self._world_size):
            if self._rank == 0:
                if self._lease is not None:
                    self._lease.check_or_end()
                self._removal.after(step)
        if self._at is not None and self._at > step:
            self._at = None  # that step will be saved again

    def open_latest(self, most: int | None = None, least: int | None = None) -> OpenedStep | None:
        """Opens the checkpoint that `latest` finds.

        Raises:
            CheckpointError: see `latest`.
        """
        place = self._newest(most, least)
        return None if place is None else self._open(place[1])

    def open_step(self, step: int | None) -> OpenedStep:
        """Opens the checkpoint of a step, to read its description and to `fill` tensors.

        Args:
            step: None takes the newest valid one.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if step is not None:
            return self._open(integrity.step_folder(self.folder, step))
        opened = self.open_latest()
        if opened is None:
            raise CheckpointError(
                f"there is no checkpoint in {self.folder}. Check the output folder"
            )
        return opened

    def restore(self, tensors: Mapping[str, Tensor], step: int | None = None) -> Tree:
        """Fills tensors from the checkpoint of a step, see `open_step` and `fill`.

        Returns:
            The content of meta.json: the `meta` of `save`, and format, step, world_size, versions.
        """
        opened = self.open_step(step)
        self.fill(tensors, opened)
        return opened.meta

    def fill(self, tensors: Mapping[str, Tensor], opened: OpenedStep) -> None:
        """Fills tensors of any kind in place, whatever world size and strategy wrote them.

        Args:
            tensors: by logical name; must match the checkpoint in names, shapes and dtypes.
            opened: a checkpoint of this folder.

        Raises:
            CheckpointError: a file cannot be read, or the checkpoint belongs to another model.
        """
        restoring.fill(tensors, opened, self._rank, self._world_size)
        self._at, self._error = opened.step, None

    def open(self, step_folder: Location) -> tuple[Tree, StoredTensors]:
        """Opens a checkpoint of this run or another, for each rank to read what it needs.

        Each rank verifies some of the files, unless they have been verified already.

        Returns:
            The content of meta.json, and the tensors.

        Raises:
            CheckpointError: it was never committed, or is damaged.
        """
        opened = self._open(step_folder)
        stored = on_all_ranks(lambda: layout.read_files(opened.files), self._world_size)
        return opened.meta, stored

    def _open(self, folder: Location) -> OpenedStep:
        """Verifies a checkpoint, unless it has been, and reads its small files."""
        self.settle()  # otherwise the step of a save under way would count as the last one
        if damage := self._damage(folder):
            raise CheckpointError(damage)
        return on_all_ranks(lambda: open_step(folder), self._world_size)

    def _damage(self, folder: Location) -> str | None:
        """Returns the damage of a checkpoint that any rank finds; each file is read by one rank.

        Raises:
            CheckpointError: a file cannot be read now, which says nothing about its content.
        """
        if folder in self._verified:
            return None
        # Before the look, which may take minutes.
        self.hold = Hold(folder) if self._holds else None

        def check(folder: Location) -> None:
            integrity.check_content(folder, self._rank, self._world_size)

        def find() -> str | None:
            found = on_all_ranks(lambda: integrity.find_damage(folder, check), self._world_size)
            return first_error(found, self._world_size)

        damage = find()
        # Another machine has saved this step, and its files may appear here after seconds.
        if damage and await_names(folder, self._peer_timeout, self._world_size):
            damage = find()
        if damage is None:
            self._verified.add(folder)
        return damage

    def continue_from(self, step: int | None) -> None:
        """Says, before the first save, which step the run continues from. Collective.

        Args:
            step: the newest checkpoint that counts from now on, or a later step that was restored
                from elsewhere; None: the run starts from nothing.
        """
        with raise_on_all_ranks(self._world_size):
            if self._lease is not None and not self._lease.has_decided:
                self._lease.decide(step)

    def _prepare(self, step: int) -> Location:
        """Removes interrupted saves and abandoned later steps, and creates the step's folder.

        Abandoned steps are removed before the save, not after it: if the process died in between,
        a restart would take one of them for the newest step.
        """
        if self._lease is not None:
            assert self._lease.has_decided, "call continue_from before the first save"
            self._lease.check_or_end()
        self._removal.before_save(step)
        if self._lease is not None:
            return self._lease.claim(step)
        folder = self.folder / history.plain_name(step)
        files.make_folder(folder)
        return folder

    def _write(
        self,
        step: int,
        folder: Location,
        content: futures.Future[tuple[bytes, memoryview]],
        meta: bytes,
    ) -> None:
        """Writes, commits and removes old steps; keeps an error for the next collective call."""
        try:
            writer.write_step(
                folder,
                content.result(),
                meta,
                rank=self._rank,
                world_size=self._world_size,
                peer_timeout=self._peer_timeout,
                lease=self._lease,
            )
        except Exception as error:
            self._fail(step, error)
            # Partial files must not fill up a disk that is already full.
            if self._rank == 0:
                self._removal.failed(folder)
        else:
            if self._rank == 0:
                config = self.config
                self._removal.outdated(config.keep_last, config.keep_every, self._kept)

    def _fail(self, step: int, error: Exception) -> None:
        """Keeps the error for `wait`. Rank 0, which sees the errors of all ranks, logs it."""
        name = history.plain_name(step)
        self._error = CheckpointError(
            f"saving {name} failed: {error}. The checkpoints committed before it stay readable"
        )
        self._failures += 1
        if self._rank == 0:
            again = "" if self._failures == 1 else f" ({self._failures} saves in a row have failed)"
            message = "%s; training continues, and the next save tries again%s"
            logger.warning(message, self._error, again)
