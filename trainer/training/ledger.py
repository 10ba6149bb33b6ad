"""The ledger: what a run was fed, in rows of which each is chained to all those before it.

A row is a line of RUN/ledger.jsonl, {"step", "time", "kind", ..., "head"}, and of one of these kinds:

    order     from here on, examples are counted in this data order; all that determines it
    fed       steps, the global examples that they took, and the sum of the hashes of the rows that were really fed
    excluded  global examples that are passed over, and why
    corrupt   a shard that is passed over from a global example on, because its bytes have changed
    lost      the rows before this one were missing or damaged when the run was continued
    taken     the steps up to this one were taken elsewhere, by another program; the first row of such a run

A head is the SHA-256 of the head before and the row's content. The time is not part of it, nor is anything else that
may differ between two runs of the same steps: equal heads mean that two runs were fed the same, from the first step on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from trainer.monitoring.jsonl import JsonlTracker
from trainer.ranges import merged

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]
Range: TypeAlias = Sequence[int]
"""Examples [first, end) by their global numbers."""

CorruptShard: TypeAlias = tuple[str, str, int]
"""Digest of the dataset, name of the shard, and the first global example that is passed over."""

GENESIS = "0" * 64
"""The head of a ledger without rows."""

_UNCHAINED = ("time", "head")


class LedgerState(TypedDict, total=False):
    """Where a ledger stands, as checkpoints keep it; older ones have no `corrupt`."""

    head: str
    order: int
    basis: str
    fed: Sequence[int] | None
    examples: list[list[int]]
    excluded: list[list[int]]
    corrupt: list[list[str | int]]


def chain(head: str, row: Mapping[str, object]) -> str:
    """The head that a row leads to, from the one before it."""
    content = {name: value for name, value in row.items() if name not in _UNCHAINED}
    return hashlib.sha256(f"{head} {_canonical(content)}".encode()).hexdigest()


def intact_rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Yields the rows of a ledger up to the first that does not follow from those before it.

    Yields:
        A row, and where in the file it ends, in bytes.
    """
    head, end = GENESIS, 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                row = json.loads(line)
            except ValueError:
                return
            if (
                not isinstance(row, dict)
                or not line.endswith(b"\n")
                or row.get("head") != chain(head, row)
            ):
                return
            head = row["head"]
            yield row, end


def corrupt_shards(rows: Iterable[Row], order: int) -> list[CorruptShard]:
    """The shards that rows of a ledger say were passed over in a data order."""
    return [
        (row["dataset"], row["shard"], row["first"])
        for row in rows
        if row["kind"] == "corrupt" and row["order"] == order
    ]


class Ledger:
    """Chains rows. All ranks do so alike, and the first one writes them.

    Attributes:
        head: that of the last row.
        fed: the steps that are in no row yet, as (first, last); None if there are none.
    """

    def __init__(self) -> None:
        self.head = GENESIS
        self.fed: tuple[int, int] | None = None
        self._examples: list[list[int]] = []
        self._order, self._basis = 0, ""
        self._excluded: list[list[int]] = []
        self._corrupt: list[list[str | int]] = []
        self._announce = False  # the order, though it is the same: its row is lost
        self._path: Path | None = None
        self._file: JsonlTracker | None = None

    def open(self, path: Path, step: int) -> None:
        """Says where rows go; those that are there are cut back to `head`.

        Where that is not to be found, the file is set aside and a ledger begun that says so: it takes a proof from the
        user, not the run.

        Args:
            path: the file; made if missing.
            step: the run's number of steps.
        """
        self._path = path
        self.close()
        found = (GENESIS, 0) if self.head == GENESIS else _find(path, self.head)
        if found is None:
            aside = path.with_suffix(".lost")
            if path.exists():
                path.replace(aside)
            logger.warning(
                "%s does not lead to the checkpoint of step %d: it was changed or removed, or is that of another run; "
                "training goes on, but what was fed up to this step cannot be verified any more (what there was of it "
                "is in %s)",
                *(path, step, aside.name),
            )
        elif path.exists():
            os.truncate(path, found[1])
        self._file = JsonlTracker(path, resume_step=None)
        self._announce = found is None or found[0] != self.head
        if found is None:
            before, self.head = self.head, GENESIS
            self._append(step, "lost", {"before": before})
        else:
            self.head = found[0]

    def must_close_row(self, order: int, basis: Mapping[str, object], batch_size: int) -> bool:
        """Whether the steps that are in no row yet need one before such steps follow; the same on all ranks."""
        if self.fed is None:
            return False
        examples = sum(end - first for first, end in self._examples)
        same_size = examples == batch_size * (self.fed[1] - self.fed[0] + 1)
        return not same_size or self._basis != _digest(order, basis)

    def enter(
        self, step: int, order: int, basis: Mapping[str, object], excluded: Sequence[Range]
    ) -> None:
        """Begins a data order, unless it is the one that the rows are about.

        Args:
            step: the run's number of steps.
            order: the number of the data order.
            basis: all that determines it.
            excluded: all examples of it that are passed over.
        """
        digest = _digest(order, basis)
        if digest != self._basis or self._announce:
            self._order, self._basis, self._announce = order, digest, False
            self._excluded, self._corrupt = [], []
            self._append(step, "order", {"order": order, **basis})
        if merged([*self._excluded, *excluded]) != self._excluded:
            self.exclude(step, order, excluded, "data.exclude, or as before")

    def feed(
        self, step: int, examples: Sequence[Range], corrupt: Sequence[CorruptShard] = ()
    ) -> None:
        """Takes note of the global examples that a step took; writes which shards are passed over, if that is new."""
        for dataset, name, first in corrupt:
            shard: list[str | int] = [dataset, name, first]
            if shard not in self._corrupt:
                self._corrupt.append(shard)
                self._append(
                    step,
                    "corrupt",
                    {"order": self._order, "dataset": dataset, "shard": name, "first": first},
                )
        self.fed = (self.fed[0] if self.fed else step, step)
        for first, end in examples:
            if self._examples and self._examples[-1][1] == first:
                self._examples[-1][1] = end
            else:  # after examples that are excluded; or before others, which nothing may hide
                self._examples.append([first, end])

    def close_row(self, digest: str) -> None:
        """Writes the steps that are in no row yet, with the sum of the hashes of all rows that they were fed."""
        if self.fed is None:
            return
        (first, last), examples = self.fed, self._examples
        self.fed, self._examples = None, []
        content = {
            "order": self._order,
            "first_step": first,
            "examples": examples,
            "digest": digest,
        }
        self._append(last, "fed", content)

    def exclude(self, step: int, order: int, examples: Sequence[Range], reason: str) -> None:
        """Writes that examples of a data order are passed over from `step` on."""
        if order == self._order:
            self._excluded = merged([*self._excluded, *examples])
        ranges = [list(part) for part in examples]
        self._append(step, "excluded", {"order": order, "examples": ranges, "reason": reason})

    def take_over(self, step: int, program: str) -> None:
        """Begins the ledger of a run whose first `step` steps another program has taken."""
        self._append(step, "taken", {"by": program})

    def _append(self, step: int, kind: str, content: Mapping[str, Any]) -> None:
        row = {"kind": kind, **content}
        self.head = chain(self.head, {"step": step, **row})
        if self._file is not None:
            self._file.log(step, {**row, "head": self.head})

    def state_dict(self) -> LedgerState:
        """Where the ledger stands, for a checkpoint; what it refers to is on the disk by then."""
        if self._file is not None:
            self._file.sync()
        return {
            "head": self.head,
            "order": self._order,
            "basis": self._basis,
            "fed": self.fed,
            "examples": [list(part) for part in self._examples],
            "excluded": self._excluded,
            "corrupt": self._corrupt,
        }

    def load_state_dict(self, state: LedgerState, step: int) -> None:
        """Goes back to where a ledger stood; rows after that are removed from the file."""
        self.head, self._order, self._basis = state["head"], state["order"], state["basis"]
        fed = state["fed"]
        self.fed = (fed[0], fed[1]) if fed else None
        self._examples, self._excluded = (
            [list(part) for part in state[name]] for name in ("examples", "excluded")
        )
        self._corrupt = [
            list(shard) for shard in state.get("corrupt", ())
        ]  # or of a version that passed over none
        if self._path is not None:
            self.open(self._path, step)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _find(path: Path, head: str) -> tuple[str, int] | None:
    """The row of a ledger with this head, or that has taken its place: its head, and where it ends in the file."""
    if not path.exists():
        return None
    return next(
        (
            (row["head"], end)
            for row, end in intact_rows(path)
            if head in (row["head"], row.get("before"))
        ),
        None,
    )


def _digest(order: int, basis: Mapping[str, object]) -> str:
    return hashlib.sha256(_canonical({"order": order, **basis}).encode()).hexdigest()


def _canonical(content: Mapping[str, object]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
