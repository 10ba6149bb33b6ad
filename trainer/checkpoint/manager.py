"""The Checkpointer: saves in the background, restores at any world size, and keeps what is worth
keeping.
"""

from __future__ import annotations

import logging
import platform
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from trainer.checkpoint import files, integrity, layout, retention, writer
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import StoredTensors
from trainer.checkpoint.together import gather, raise_together, together
from trainer.config import Tree
from trainer.errors import CheckpointError, ConfigError
from trainer.storage import is_url, is_writable, shown

logger = logging.getLogger(__name__)

_TOKEN = ".shared-"
_APPEAR_SECONDS = 60.0  # network file systems may remember for so long that a name does not exist


@dataclass(frozen=True)
class Config:
    """When to save, where, and what to keep.

    Attributes:
        every: steps between checkpoints.
        keep_last: how many of the newest checkpoints to keep; at least 2, so that there is one to
            fall back on when the newest is damaged.
        keep_every: checkpoints of steps that this divides are kept for ever; None keeps only the
            newest.
        asynchronous: whether training goes on while a checkpoint is written. It takes a copy of the
            rank's tensors in host memory either way.
        folder: where checkpoints lie: a folder, or an address such as s3://BUCKET/RUN or
            gs://BUCKET/RUN. No two runs may share one. None is the folder `checkpoints` of the run.
        snapshot_every: steps between snapshots, which are checkpoints in the memory of the
            machines: an elastic run that loses a worker or a machine goes on from there. Each
            machine holds up to three of what its processes train, and as many of its neighbour's.
            None takes none.
    """

    every: int = 1000
    keep_last: int = 2
    keep_every: int | None = None
    asynchronous: bool = True
    folder: str | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                f"every is {self.every}; the number of steps between checkpoints must be 1 or more"
            )
        if self.keep_last < 2:
            raise ConfigError(
                f"keep_last is {self.keep_last}; keep 2 or more: the newest may turn out to be "
                "damaged"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(
                f"keep_every is {self.keep_every}; use 1 or more, or null to keep only the newest"
            )
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise ConfigError(
                f"snapshot_every is {self.snapshot_every}; use 1 or more, or null for no snapshots"
            )
        if self.folder is not None and is_url(self.folder) and not is_writable(self.folder):
            raise ConfigError(
                f"folder {shown(self.folder)!r} can only be read; use s3://..., gs://... or a "
                "local folder"
            )


class Checkpointer:
    """Saves and restores named tensors, sharded or not, together with a JSON-able description.

    All methods but `steps` are collective: all ranks call them in the same order, and all return or
        all raise. The
    background threads take part in no collective: they meet through files, for `peer_timeout`
        seconds at most.

    A save that fails, for a full disk or a store that is gone, is warned of at once and takes no
    space; the checkpoints before it stay, and the next save tries again. Who needs the last save to
    have succeeded calls `wait`.
    """

    def __init__(
        self,
        folder: Location,
        config: Config,
        *,
        rank: int,
        world_size: int,
        peer_timeout: float = 300.0,
    ) -> None:
        """
        Args:
            folder: of all checkpoints of the run, in an object store or on a file system that all
                ranks share; `save` makes it if need be.
            config: when to save and what to keep.
            rank: of this process.
            world_size: number of processes; the default process group must be initialised if there
                are several.
            peer_timeout: seconds that ranks wait for each other's files; shorter than the time-out
                of collectives, in which the others wait meanwhile, so that this one explains the
                failure.
        """
        self.folder = folder
        self.config = config
        self._rank = rank
        self._world_size = world_size
        self._peer_timeout = peer_timeout
        self._staging = layout.Staging()
        self._thread: threading.Thread | None = None
        self._saving = 0
        self._error: Exception | None = None
        self._failures = 0
        self._sound: set[Location] = set()
        self._at: int | None = None
        self._kept: int | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the memory that saving such tensors needs, in the background.

        Without it the first save is slow.
        """
        self._staging.reserve(layout.pieces_to_write(tensors, self._rank, self._world_size))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, object],
        kept: int | None = None,
    ) -> None:
        """Writes a checkpoint; returns once the tensors have been copied, if `asynchronous`.

        One save is under way at a time: the next waits for it, and a process must `wait` for its
        last one. Saving the step that was just saved or restored does nothing. Checkpoints of later
        steps, left by a run that was then continued from an earlier one, are removed.

        Args:
            step: the number of optimizer steps taken.
            tensors: by logical name; plain tensors hold the same values on all ranks, DTensors are
                split or replicated over all ranks, segments split over all.
            meta: what else is needed to go on; anything JSON can hold.
            kept: a step that retention does not remove from now on, in place of that of the last
                call.
        """
        self.settle()
        self._kept = kept
        if step == self._at:
            return
        meta_text = writer.describe(step, self._world_size, meta)
        folder = integrity.step_folder(self.folder, step)
        self._error = None
        self._saving = step
        try:
            with together(self._world_size):
                if self._rank == 0:
                    self._clear_the_way(step)
            self._await_everywhere(folder, files.folder_appears)
        except CheckpointError as error:
            self._fail(step, error)
            return
        content = self._staging.copy(layout.pieces_to_write(tensors, self._rank, self._world_size))
        self._sound.discard(folder)
        self._thread = threading.Thread(
            target=self._write, args=(step, content, meta_text), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not self.config.asynchronous:
            self.settle()

    def settle(self) -> None:
        """Returns when no save is under way."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        try:
            raise_together(self._error, self._world_size)
        except CheckpointError as error:
            self._error = error
        else:
            self._at, self._failures = self._saving, 0

    @property
    def failed(self) -> int | None:
        """The step of the last save if that failed, on any rank.

        As of when it was last waited for.
        """
        return None if self._error is None else self._saving

    def wait(self) -> None:
        """Returns when the last save is committed.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        self.settle()
        if self._error is not None:
            raise self._error

    def check_shared(self) -> None:
        """Makes sure that checkpoints can be written where all ranks see them, before a run has
        something to lose.

        Raises:
            CheckpointError: naming the nodes that do not; or rank 0 cannot write in it.
        """
        if self._world_size == 1 and isinstance(self.folder, Path):
            return
        token = self.folder / gather(f"{_TOKEN}{uuid.uuid4().hex}", self._world_size)[0]
        with together(self._world_size):
            if self._rank == 0:
                files.make_folder(self.folder)
                for leftover in [
                    name for name in files.names(self.folder) if name.startswith(_TOKEN)
                ]:
                    files.remove(self.folder / leftover)
                files.write(token, b"")
        with together(self._world_size):  # so that the file is gone when ranks go on
            try:
                self._await_everywhere(token)
            finally:
                if self._rank == 0:
                    files.remove(token)

    def steps(self) -> list[int]:
        """The committed steps, oldest first. Not collective."""
        return integrity.committed_steps(self.folder)

    def holds(self, step: int) -> bool:
        """Whether a step is committed."""
        found = False
        with together(self._world_size):
            if self._rank == 0:
                found = integrity.is_committed(integrity.step_folder(self.folder, step))
        return gather(found, self._world_size)[0]

    def latest(self, most: int | None = None, least: int | None = None) -> int | None:
        """The newest committed step whose checksums hold, or None if nothing was ever committed.

        Each rank reads a share of the files. Damaged steps are passed over with a warning.

        Args:
            most: looks at steps up to this one only, and finds None if there is no sound one.
            least: looks at steps from this one on only, and finds None if there is no sound one.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        self.settle()
        self._sound.clear()  # a run that goes back has looked at it long ago
        found: list[int] = []
        with together(self._world_size):
            if self._rank == 0:
                for leftover in integrity.uncommitted_folders(self.folder):
                    logger.warning("passing over %s: saving it was cut short", leftover)
                found = [
                    step
                    for step in self.steps()
                    if (least or 0) <= step <= (step if most is None else most)
                ]
        steps = gather(found, self._world_size)[0]
        for step in reversed(steps):
            damage = self._damage(integrity.step_folder(self.folder, step))
            if damage is None:
                return step
            if self._rank == 0:
                logger.warning("passing over the checkpoint of step %d: %s", step, damage)
        if steps and most is None and least is None:
            raise CheckpointError(
                f"all {len(steps)} checkpoints in {self.folder} are damaged (see the warnings); "
                "bring one back from "
                "a copy, or start anew in another output folder"
            )
        return None

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, the newest first, so that a restart goes on from
        this one, too.

        Raises:
            CheckpointError: they cannot be removed.
        """
        self.settle()
        with together(self._world_size):
            if self._rank == 0:
                for later in reversed([each for each in self.steps() if each > step]):
                    integrity.remove_step(integrity.step_folder(self.folder, later))

    def restore(self, tensors: Mapping[str, Tensor], step: int | None = None) -> Tree:
        """Fills the given tensors in place, of any kind, whatever world size and strategy wrote
        them.

        Args:
            tensors: by logical name; exactly those of the checkpoint, in shape and element type.
            step: which checkpoint; None takes the newest sound one.

        Returns:
            The checkpoint's meta.json: what was given to `save`, with format, step, world_size and
            versions.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another model.
        """
        if step is None and (step := self.latest()) is None:
            raise CheckpointError(
                f"there is no checkpoint in {self.folder}; check the output folder"
            )
        folder = integrity.step_folder(self.folder, step)
        meta, stored = self.open(folder)
        with together(self._world_size):
            layout.check_same_tensors(tensors, stored.pieces, folder)
            wanted = [
                piece
                for name, tensor in tensors.items()
                for piece in layout.local_pieces(name, tensor)
            ]
            layout.fill(wanted, stored.pieces)
        self._at, self._error = step, None
        return meta

    def open(self, step_folder: Location) -> tuple[Tree, StoredTensors]:
        """Opens a checkpoint, of this run or another, of which each rank then reads what it needs.

        Each rank verifies a share of the files, unless that was done before.

        Returns:
            The content of meta.json, and the tensors.

        Raises:
            CheckpointError: it was never committed, or is damaged.
        """
        if damage := self._damage(step_folder):
            raise CheckpointError(damage)
        with together(self._world_size):
            meta, stored = integrity.read_meta(step_folder), _stored_tensors(step_folder)
        return meta, stored

    def _damage(self, folder: Location) -> str | None:
        """What is wrong with a checkpoint, as all ranks together find it; looked up once.

        Raises:
            CheckpointError: the store does not answer, which says nothing about the checkpoint.
        """
        if folder in self._sound:
            return None
        found = None
        with together(self._world_size):
            found = retention.damage(folder, self._check_share)
        damage = next((text for text in gather(found, self._world_size) if text is not None), None)
        if damage is None:
            self._sound.add(folder)
        return damage

    def _check_share(self, folder: Location) -> None:
        integrity.check_content(folder, self._rank, self._world_size)

    def _clear_the_way(self, step: int) -> None:
        """Removes what crashed saves and abandoned continuations left behind, and makes the next
        step's folder.

        Before writing rather than after: a crash in between must not let the abandoned steps pass
            for the newest.
        """
        for leftover in integrity.uncommitted_folders(self.folder):
            logger.info("removing %s: saving it was cut short", leftover)
            integrity.remove_step(leftover)
        for later in self.steps():
            if later >= step:
                logger.warning(
                    "removing the checkpoint of step %d: the run went on from before it", later
                )
                integrity.remove_step(integrity.step_folder(self.folder, later))
        files.make_folder(integrity.step_folder(self.folder, step))

    def _write(self, step: int, content: tuple[bytes, memoryview], meta: bytes) -> None:
        """Writes, commits and tidies up; an error is kept for the next collective call."""
        folder = integrity.step_folder(self.folder, step)
        rank, ranks, patience = self._rank, self._world_size, self._peer_timeout
        try:
            writer.write_step(
                folder, content, meta, rank=rank, world_size=ranks, peer_timeout=patience
            )
        except Exception as error:
            self._fail(step, error)
            if self._rank == 0:
                with suppress(CheckpointError):  # the next save removes what cannot be removed now
                    integrity.remove_step(folder)
        else:
            if self._rank == 0:
                self._remove_old()

    def _fail(self, step: int, error: Exception) -> None:
        """Keeps the reason for `wait`; rank 0, which knows those of all ranks, says it."""
        name = integrity.step_folder(self.folder, step).name
        self._error = CheckpointError(
            f"saving {name} failed: {error}. The checkpoints committed before it stay readable"
        )
        self._failures += 1
        if self._rank == 0:
            again = "" if self._failures == 1 else f" ({self._failures} saves in a row have failed)"
            logger.warning(
                "%s; training goes on, and the next save tries again%s", self._error, again
            )

    def _remove_old(self) -> None:
        """Removes what retention lets go.

        It stays if that fails, which takes nothing from what was saved.
        """
        try:
            last, every = self.config.keep_last, self.config.keep_every
            for step in retention.outdated_steps(
                self.folder, last, every, integrity.check_sizes, self._kept
            ):
                integrity.remove_step(integrity.step_folder(self.folder, step))
        except CheckpointError as error:
            logger.warning("an old checkpoint stays: %s", error)

    def _await_everywhere(
        self, path: Location, appears: Callable[[Location, float], bool] = files.appears
    ) -> None:
        """Waits until what rank 0 has made is there for all ranks.

        Raises:
            CheckpointError: naming the nodes that do not see it.
        """
        there = appears(path, min(self._peer_timeout, _APPEAR_SECONDS))
        blind = gather(None if there else platform.node(), self._world_size)
        nodes = {node for node in blind if node is not None}
        if nodes:
            raise CheckpointError(
                f"{', '.join(sorted(nodes))} cannot see {path}, which rank 0 has made; use an "
                "output folder on a file "
                "system that all nodes share, under the same path"
            )


def _stored_tensors(folder: Location) -> StoredTensors:
    with ThreadPoolExecutor(files.THREADS) as pool:
        pieces = chain.from_iterable(pool.map(layout.read_pieces, integrity.rank_files(folder)))
    return StoredTensors(layout.group_by_name(pieces))
