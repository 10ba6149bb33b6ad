"""The ledger: a hash chain of the examples that a run consumed, in RUN/ledger.jsonl.

Each line is a row {"step", "time", "kind", ..., "head"} of one of these kinds:

    order     a data order begins, in which examples are counted from here on; all that
              determines it
    fed       steps, the global examples they consumed, and the sum of the hashes of the rows of
              these examples, computed from what the model really got
    excluded  global examples that are skipped, and why
    corrupt   a shard that is skipped from a global example on, because its bytes have changed
    lost      rows before this one were missing or damaged when the run was continued
    state     the digest of weights and optimizer state after the step, in exact runs with
              training.digest_every
    taken     another program took the steps up to this one; first row of such a run

A head is the SHA-256 of the previous head and the row's content. Neither the time nor anything else
that may differ between two runs of the same steps is part of it. So equal heads mean that two runs
consumed the same data, from the first step on; with rows of kind `state`, that they also had the
same weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from data_pipeline.order.exclusions import merged
from samestep.storage import atomic_write
from samestep.stored_json import JsonError, read_lines
from samestep.untrusted import open_regular
from trainer.monitoring.jsonl import JsonlTracker, parse_ledger_row

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
Range: TypeAlias = Sequence[int]
"""Examples [first, end) by their global numbers."""

CorruptShard: TypeAlias = tuple[str, str, int]
"""Digest of the dataset, name of the shard, and the first global example that is skipped."""

GENESIS = "0" * 64
"""The head of a ledger without rows."""


def chain(head: str, row: Mapping[str, object]) -> str:
    """Returns the head after a row, from the head before it."""
    # Time differs between two runs of the same steps, and the head is what is computed.
    content = {name: value for name, value in row.items() if name not in ("time", "head")}
    return _sha256(f"{head} {_canonical(content)}")


def intact_rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Yields rows and their ends in the file (bytes), up to the first that breaks the chain.

    A damaged row ends them as well, and is named in a warning: a ledger is evidence.
    """
    head = GENESIS
    with open_regular(path) as file:
        for line, end, is_whole in read_lines(file):
            try:
                row = parse_ledger_row(line)
            except JsonError as error:
                logger.warning(
                    "%s: the row after byte %d is damaged: %s", path, end - len(line), error
                )
                return
            # A torn last line can be valid JSON, but it has no line feed.
            if not is_whole or row["head"] != chain(head, row):
                return
            head = row["head"]
            yield row, end


def corrupt_shards(rows: Iterable[Row], order: int) -> list[CorruptShard]:
    """Returns the shards that were skipped in a data order."""
    return [
        (row["dataset"], row["shard"], row["first"])
        for row in rows
        if row["kind"] == "corrupt" and row["order"] == order
    ]


class Ledger:
    """Chains rows. All ranks do so alike; only the rank with an open file writes them.

    Steps are collected first and written as one `fed` row, see `close_row`.

    Attributes:
        head: the head of the last row.
    """

    def __init__(self) -> None:
        self.head = GENESIS
        # First and last step of the open row, and their examples as merged ranges.
        self._steps: tuple[int, int] | None = None
        self._examples: list[list[int]] = []
        self._order, self._basis = 0, ""
        self._excluded: list[list[int]] = []
        self._corrupt: list[list[str | int]] = []
        # The next `enter` repeats the order row even if the order is unchanged: that row is lost.
        self._repeat_order = False
        self._path: Path | None = None
        self._file: JsonlTracker | None = None

    def open(self, path: Path, step: int) -> None:
        """Opens the file, and removes the rows after `head`: the run will write them again.

        If no row has this head, the file is set aside and a new ledger begins with a row that says
        so. The user loses a proof then, but not the run.

        Args:
            path: created if missing.
            step: number of steps taken.
        """
        self._path = path
        self.close()
        # A run without a checkpoint starts anew: all rows go.
        found = (GENESIS, 0) if self.head == GENESIS else _find(path, self.head)
        if found is None:
            aside = path.with_suffix(".lost")
            if path.exists():
                path.replace(aside)
            logger.warning(
                "%s does not lead to the checkpoint of step %d: it was changed or removed, or "
                "belongs to another run. Training continues, but the data consumed up to this step "
                "can no longer be verified (what was left of the ledger is in %s)",
                path,
                step,
                aside.name,
            )
        # Rows after the checkpoint's head describe steps that will be taken again. A new file takes
        # the place of the old one, to which a process may still write that was taken for dead.
        elif path.exists():
            with open_regular(path) as old, atomic_write(path) as new:
                new.write(old.read(found[1]))
        self._file = JsonlTracker(path, resume_step=None)
        # A second start from the same checkpoint finds the head of the `lost` row instead of ours.
        self._repeat_order = found is None or found[0] != self.head
        if found is None:
            before, self.head = self.head, GENESIS
            self._append(step, "lost", {"before": before})
        else:
            self.head = found[0]

    def must_close_row(self, order: int, basis: Mapping[str, object], batch_size: int) -> bool:
        """Whether the open row must be closed before such steps; the same on all ranks.

        All steps of a row share a data order and a batch size, so the examples of each of its
        steps can be computed: row [[0, 30]] of steps 1 to 3 means 10 examples a step.
        """
        if self._steps is None:
            return False
        first, last = self._steps
        examples = sum(end - begin for begin, end in self._examples)
        # Rows with one batch size let `verify` compute the examples of a single step.
        same_size = examples == batch_size * (last - first + 1)
        return not same_size or self._basis != _digest(order, basis)

    def enter(
        self, step: int, order: int, basis: Mapping[str, object], excluded: Sequence[Range]
    ) -> None:
        """Begins a data order, unless it is the current one.

        Args:
            step: number of steps taken.
            order: number of the data order.
            basis: everything that determines it.
            excluded: all of its examples that are skipped.
        """
        # Resuming in the same order repeats no row, so a stopped run has the rows of another that
        # was never stopped.
        digest = _digest(order, basis)
        if digest != self._basis or self._repeat_order:
            # Another mixture may begin within an order, whose earlier rows still hold.
            if order != self._order or self._repeat_order:
                self._excluded, self._corrupt = [], []
            self._order, self._basis, self._repeat_order = order, digest, False
            self._append(step, "order", {"order": order, **basis})
        # The user may have added to data.exclude since the last start.
        if merged([*self._excluded, *excluded]) != self._excluded:
            self.exclude(step, order, excluded, "data.exclude, or as before")

    def add_step(
        self, step: int, examples: Sequence[Range], corrupt: Sequence[CorruptShard] = ()
    ) -> None:
        """Adds the global examples of a step to the open row; writes newly corrupt shards."""
        for dataset, name, first in corrupt:
            shard: list[str | int] = [dataset, name, first]
            if shard not in self._corrupt:
                self._corrupt.append(shard)
                content = {"order": self._order, "dataset": dataset, "shard": name, "first": first}
                self._append(step, "corrupt", content)
        self._steps = (self._steps[0] if self._steps else step, step)
        for first, end in examples:
            if self._examples and self._examples[-1][1] == first:
                self._examples[-1][1] = end
            else:  # a gap (excluded examples) or an overlap (an error, which must not be hidden)
                self._examples.append([first, end])

    def close_row(self, digest: str) -> None:
        """Writes the open row, if any, with the sum of the hashes of all its examples' rows."""
        if self._steps is None:
            return
        # Lists of examples are merged: steps 1 to 100 of a run are one range.
        (first, last), examples = self._steps, self._examples
        self._steps, self._examples = None, []
        content = {"order": self._order, "first_step": first}
        self._append(last, "fed", {**content, "examples": examples, "digest": digest})

    def exclude(self, step: int, order: int, examples: Sequence[Range], reason: str) -> None:
        """Writes that examples of a data order are skipped from `step` on."""
        if order == self._order:
            self._excluded = merged([*self._excluded, *examples])
        ranges = [list(part) for part in examples]
        self._append(step, "excluded", {"order": order, "examples": ranges, "reason": reason})

    def add_state(self, step: int, digest: str) -> None:
        """Writes the digest of the state after a step."""
        self._append(step, "state", {"digest": digest})

    def take_over(self, step: int, program: str) -> None:
        """Begins the ledger of a run whose first `step` steps another program has taken."""
        self._append(step, "taken", {"by": program})

    def _append(self, step: int, kind: str, content: Mapping[str, Any]) -> None:
        row = {"kind": kind, **content}
        # Ranks without a file chain as well, so every rank knows the head.
        self.head = chain(self.head, {"step": step, **row})
        if self._file is not None:
            self._file.log(step, {**row, "head": self.head})

    def state_dict(self) -> Row:
        """State for a checkpoint; every row before it is on disk by then."""
        if self._file is not None:
            self._file.sync()
        return {
            "head": self.head,
            "order": self._order,
            "basis": self._basis,
            "fed": self._steps,
            "examples": [list(part) for part in self._examples],
            "excluded": self._excluded,
            "corrupt": self._corrupt,
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Restores the state of a checkpoint; removes later rows from an open file."""
        self.head, self._order, self._basis = state["head"], state["order"], state["basis"]
        steps = state["fed"]
        self._steps = (steps[0], steps[1]) if steps else None
        # Copies: this object changes its lists in place.
        self._examples = [list(part) for part in state["examples"]]
        self._excluded = [list(part) for part in state["excluded"]]
        self._corrupt = [list(shard) for shard in state.get("corrupt", ())]  # older ones have none
        if self._path is not None:
            self.open(self._path, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _find(path: Path, head: str) -> tuple[str, int] | None:
    """Finds the row with a head, or the `lost` row that replaced it: its head and end (bytes)."""
    if not path.exists():
        return None
    for row, end in intact_rows(path):
        if head in (row["head"], row.get("before")):
            return row["head"], end
    return None


def _digest(order: int, basis: Mapping[str, object]) -> str:
    return _sha256(_canonical({"order": order, **basis}))


def _canonical(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
