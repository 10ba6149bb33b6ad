"""The Checkpointer: saves in the background, restores at any world size, and keeps what is worth keeping."""

from __future__ import annotations

import json
import logging
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import trainer
from trainer.checkpoint import files, integrity, layout, writer
from trainer.checkpoint.layout import Piece
from trainer.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """When to save and what to keep.

    Attributes:
        every: steps between checkpoints.
        keep_last: how many of the newest checkpoints to keep; at least 2, so that there is one to fall back on when
            the newest is damaged.
        keep_every: checkpoints of steps that this divides are kept for ever; None keeps only the newest.
        asynchronous: whether training goes on while a checkpoint is written. It takes a copy of the rank's tensors
            in host memory either way.
    """

    every: int = 1000
    keep_last: int = 2
    keep_every: int | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every is {self.every}; the number of steps between checkpoints must be 1 or more")
        if self.keep_last < 2:
            raise ConfigError(f"keep_last is {self.keep_last}; keep 2 or more: the newest may turn out to be damaged")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every is {self.keep_every}; use 1 or more, or null to keep only the newest")


class Checkpointer:
    """Saves and restores named tensors, sharded or not, together with a JSON-able description.

    `save`, `wait`, `latest` and `restore` are collective: all ranks call them in the same order, and all return or
    all raise. The background threads take part in no collective: they meet through files, for `peer_timeout` seconds
    at most, and an error in one of them surfaces in the next collective call. After an error, make no further calls.
    """

    def __init__(
        self, folder: Path, config: Config, *, rank: int, world_size: int, peer_timeout: float = 600.0
    ) -> None:
        """
        Args:
            folder: of all checkpoints of the run, on a file system that all ranks share; `save` makes it if need be.
            config: when to save and what to keep.
            rank: of this process.
            world_size: number of processes; the default process group must be initialised if there are several.
            peer_timeout: seconds that rank 0 waits for the files of the other ranks, after writing its own.
        """
        self.folder = folder
        self.config = config
        self._rank = rank
        self._world_size = world_size
        self._peer_timeout = peer_timeout
        self._staging = layout.Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._sound: set[int] = set()
        self._at: int | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint; returns once the tensors have been copied, if `asynchronous`.

        One save is under way at a time: the next waits for it, and a process must `wait` for its last one. Saving
        the step that was just saved or restored does nothing. Checkpoints of later steps, left by a run that was
        then continued from an earlier one, are removed.

        Args:
            step: the number of optimizer steps taken.
            tensors: by logical name; plain tensors hold the same values on all ranks, DTensors are split or
                replicated over all ranks.
            meta: what else is needed to go on; anything JSON can hold.

        Raises:
            CheckpointError: this save cannot start, or the last one failed.
        """
        if step == self._at:
            return
        versions = {"samestep": trainer.__version__, "torch": torch.__version__, "python": platform.python_version()}
        header = {"format": integrity.FORMAT, "step": step, "world_size": self._world_size, "versions": versions}
        assert not header.keys() & meta.keys(), f"reserved: {sorted(header.keys() & meta.keys())}"
        meta_text = json.dumps(header | dict(meta), indent=1).encode()

        folder = integrity.step_folder(self.folder, step)
        error = self._join()
        if self._rank == 0 and error is None:
            try:
                self._clear_the_way(step)
            except CheckpointError as failure:
                error = failure
        self._raise_together(error)
        if folder.name not in files.names(self.folder):
            raise CheckpointError(
                f"rank {self._rank} cannot see {folder}, which rank 0 has just made; use an output folder on a file "
                "system that all nodes share"
            )
        content = self._staging.copy(layout.pieces_to_write(tensors, self._rank, self._world_size))
        self._at = step
        self._sound.discard(step)
        self._thread = threading.Thread(
            target=self._write, args=(step, content, meta_text), name="checkpoint", daemon=True
        )
        self._thread.start()
        if not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when the save under way, if any, is committed.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        self._raise_together(self._join())

    def steps(self) -> list[int]:
        """The committed steps, oldest first. Not collective."""
        return integrity.committed_steps(self.folder)

    def latest(self) -> int | None:
        """The newest committed step whose checksums hold, or None if nothing was ever committed.

        Each rank reads a share of the files. Damaged steps are passed over with a warning.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        if self._rank == 0:
            for leftover in integrity.uncommitted_folders(self.folder):
                logger.warning("passing over %s: saving it was cut short", leftover)
        steps = self._gather(self.steps())[0]
        for step in reversed(steps):
            damage = self._damage(step)
            if damage is None:
                return step
            if self._rank == 0:
                logger.warning("passing over the checkpoint of step %d: %s", step, damage)
        if steps:
            raise CheckpointError(
                f"all {len(steps)} checkpoints in {self.folder} are damaged (see the warnings); bring one back from "
                "a copy, or start anew in another output folder"
            )
        return None

    def restore(self, tensors: Mapping[str, Tensor], step: int | None = None) -> dict[str, Any]:
        """Fills the given tensors in place, plain or DTensor, whatever world size and strategy wrote them.

        Args:
            tensors: by logical name; exactly those of the checkpoint, in shape and element type.
            step: which checkpoint; None takes the newest sound one.

        Returns:
            The checkpoint's meta.json: what was given to `save`, with format, step, world_size and versions.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another model.
        """
        if step is None and (step := self.latest()) is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}; check the output folder")
        if damage := self._damage(step):
            raise CheckpointError(damage)
        folder = integrity.step_folder(self.folder, step)
        error, meta = None, {}
        try:
            meta = integrity.read_meta(folder)
            stored = _stored_pieces(folder)
            wanted = [layout.local_piece(name, tensor) for name, tensor in tensors.items()]
            layout.check_same_tensors(wanted, stored, folder)
            layout.fill(wanted, stored)
        except CheckpointError as failure:
            error = failure
        self._raise_together(error)
        self._at = step
        return meta

    def _damage(self, step: int) -> str | None:
        """What is wrong with a step, as all ranks together find it; looked up once per step."""
        if step in self._sound:
            return None
        found = None
        try:
            integrity.check_content(integrity.step_folder(self.folder, step), self._rank, self._world_size)
        except CheckpointError as error:
            found = str(error)
        damage = next((text for text in self._gather(found) if text is not None), None)
        if damage is None:
            self._sound.add(step)
        return damage

    def _clear_the_way(self, step: int) -> None:
        """Removes what crashed saves and abandoned continuations left behind, and makes the next step's folder.

        Before writing rather than after: a crash in between must not let the abandoned steps pass for the newest.
        """
        for leftover in integrity.uncommitted_folders(self.folder):
            logger.info("removing %s: saving it was cut short", leftover)
            integrity.remove_step(leftover)
        for later in self.steps():
            if later >= step:
                logger.warning("removing the checkpoint of step %d: the run went on from before it", later)
                integrity.remove_step(integrity.step_folder(self.folder, later))
        files.make_folder(integrity.step_folder(self.folder, step))

    def _write(self, step: int, content: tuple[bytes, memoryview], meta: bytes) -> None:
        """Writes, commits and tidies up; an error is kept for the next collective call."""
        try:
            writer.write_step(
                integrity.step_folder(self.folder, step),
                content,
                meta,
                rank=self._rank,
                world_size=self._world_size,
                peer_timeout=self._peer_timeout,
            )
            if self._rank == 0:
                self._remove_old()
        except Exception as error:
            self._error = error

    def _remove_old(self) -> None:
        """Removes the steps that are older than the last few sound ones, and no milestones."""
        steps = self.steps()
        sound = [step for step in steps if _looks_sound(integrity.step_folder(self.folder, step))]
        for step in steps:
            milestone = self.config.keep_every is not None and step % self.config.keep_every == 0
            if step < min(sound[-self.config.keep_last :]) and not milestone:
                try:
                    integrity.remove_step(integrity.step_folder(self.folder, step))
                except CheckpointError as error:
                    logger.warning("an old checkpoint stays: %s", error)

    def _join(self) -> Exception | None:
        """Waits for this rank's own thread; returns its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _raise_together(self, error: Exception | None) -> None:
        """Raises on all ranks if any has an error, with the words of the first that has one."""
        problem = next((text for text in self._gather(error and str(error)) if text is not None), None)
        if problem is not None:
            self._at = None
            raise CheckpointError(problem) from error

    def _gather(self, item: T) -> list[T]:
        """Every rank's item, on every rank."""
        if self._world_size == 1:
            return [item]
        items: list[Any] = [None] * self._world_size
        dist.all_gather_object(items, item)
        return items


def load_full(step_folder: Path, prefix: str = "model/") -> dict[str, Tensor]:
    """Reads whole tensors in one process, for export and evaluation; needs no process group.

    Args:
        step_folder: a committed step.
        prefix: which tensors; it is taken off their names.

    Raises:
        CheckpointError: the step is not committed or damaged, or has no such tensor.
    """
    integrity.check_content(step_folder)
    stored = {name: pieces for name, pieces in _stored_pieces(step_folder).items() if name.startswith(prefix)}
    if not stored:
        raise CheckpointError(f"{step_folder} holds no tensor whose name starts with {prefix!r}; use another prefix")
    tensors = {name: torch.empty(pieces[0].shape, dtype=pieces[0].tensor.dtype) for name, pieces in stored.items()}
    layout.fill([layout.local_piece(name, tensor) for name, tensor in tensors.items()], stored)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _stored_pieces(folder: Path) -> dict[str, list[Piece]]:
    return layout.group_by_name(piece for path in integrity.rank_files(folder) for piece in layout.read_pieces(path))


def _looks_sound(folder: Path) -> bool:
    try:
        integrity.check_sizes(folder)
    except CheckpointError:
        return False
    return True
