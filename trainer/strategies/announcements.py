"""Messages between ranks about blocks of batches, through the store of the run.

A collective before each step would make all ranks wait for each other, and gloo's takes 2 (N - 1)
messages one after another. Here each rank sends two messages for a block, and none waits for
another rank as long as blocks are made ahead of need.
"""

from __future__ import annotations

from typing import Protocol

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


class Settings(Protocol):
    """The part of an experiment's section `data` that matters here."""

    @property
    def on_corrupt(self) -> str: ...
    @property
    def blocks_ahead(self) -> int: ...


class Announcements:
    """The largest of all ranks' numbers for each block, counted by the store.

    With 3 ranks, of which the second announces 5 for block 7 and the others 0, the store has

        7/made     3    the number of ranks that have announced one
        7/found    "5 "    numbers above 0; usually there are none, and no such key
        7/largest  5    written by the rank that announces last, read by all

    Args:
        results: the run's store, for `largest`.
        store: another connection to it, for `announce`. A connection answers one call at a time,
            and the main thread may wait in `largest`.
        name: the same on all ranks, and a new one for each loader.
        ranks: their number.
        ahead: number of blocks that may be announced before the result of a block is read.
    """

    def __init__(self, results: Store, store: Store, name: str, ranks: int, ahead: int) -> None:
        self._results, self._store = PrefixStore(name, results), PrefixStore(name, store)
        self._ranks, self._ahead = ranks, ahead

    def announce(self, block: int, number: int) -> None:
        """Tells all ranks a number of 0 or more for a block. For any thread; it does not wait."""
        if number > 0:
            self._store.append(f"{block}/found", f"{number} ")  # type: ignore[attr-defined]
        if self._store.add(f"{block}/made", 1) < self._ranks:
            return
        is_found = self._store.check([f"{block}/found"])
        numbers = self._store.get(f"{block}/found").split() if is_found else ()
        self._store.set(f"{block}/largest", str(max(map(int, numbers), default=0)))
        # All ranks have planned this block, so they have read the results that are `ahead` of it.
        old = block - self._ahead - 1
        for key in ("made", "found", "largest"):
            self._store.delete_key(f"{old}/{key}")

    def largest(self, block: int) -> int:
        """The largest number that a rank has announced for a block; waits until all have."""
        return int(self._results.get(f"{block}/largest"))


class Announcer:
    """Opens the announcements of loaders, for which all ranks open their loaders in one order.

    Args:
        store: of the run. One more connection to it serves all loaders.
        ranks: their number.
    """

    def __init__(self, store: Store, ranks: int) -> None:
        self._store, self._ranks, self._loaders = store, ranks, 0
        self._announcing: Store = store.clone()  # type: ignore[attr-defined]

    def open(self, ahead: int) -> Announcements:
        """Opens the next loader's, which makes this number of blocks ahead of need."""
        self._loaders += 1
        name = f"loader {self._loaders}"
        return Announcements(self._store, self._announcing, name, self._ranks, ahead)
