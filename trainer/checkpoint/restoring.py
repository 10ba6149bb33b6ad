"""Restoring a rank's tensors from the files of all ranks, of which it opens as few as it can.

1,024 ranks that partition 1,000 tensors write a million pieces. A rank that restores needs a
thousand of them, and mostly finds them in one file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from samestep.storage.urls import PARALLEL_REQUESTS
from trainer.checkpoint import layout
from trainer.checkpoint.collective import gather, on_all_ranks, raise_on_all_ranks
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import Piece, StoredPiece
from trainer.checkpoint.meta import OpenedStep


def fill(tensors: Mapping[str, Tensor], opened: OpenedStep, rank: int, world_size: int) -> None:
    """Fills tensors in place from a checkpoint, see `Checkpointer.fill`. Collective."""
    stored, ours = StoredFiles(opened.files), layout.describe(tensors)

    def compare() -> Comparison:
        # Each rank looks at some of the headers for tensors that differ.
        theirs = stored.describe(range(rank, len(opened.files), world_size))
        return Comparison.of(ours, theirs)

    comparisons = gather(on_all_ranks(compare, world_size), world_size)
    with raise_on_all_ranks(world_size):
        check_compared(ours, comparisons, opened.folder)
        # Each rank reads only what its own pieces overlap.
        wanted = [piece for each in tensors.items() for piece in layout.local_pieces(*each)]
        stored.fill(wanted, rank, world_size)


class StoredFiles:
    """The tensor files of a checkpoint, whose headers are read when they are needed.

    Args:
        paths: in the order of the ranks that wrote them.
    """

    def __init__(self, paths: Iterable[Location]) -> None:
        self.paths = list(paths)
        self._headers: dict[int, layout.Header] = {}

    def describe(self, numbers: Iterable[int]) -> dict[str, str]:
        """Returns dtype and shape of the tensors with pieces in some of the files, by name."""
        found: dict[str, str] = {}
        for header in self._open(numbers):
            found |= header.describe()
        return found

    def _pieces(
        self, numbers: Iterable[int], names: Collection[str]
    ) -> dict[str, list[StoredPiece]]:
        """Returns the pieces of the named tensors in some of the files."""
        found: dict[str, list[StoredPiece]] = {}
        for header in self._open(numbers):
            for piece in header.pieces(names):
                found.setdefault(piece.name, []).append(piece)
        return found

    def fill(self, wanted: Sequence[Piece], rank: int, world_size: int) -> None:
        """Fills the pieces that a rank wants; reads the files with them, and few others.

        Raises:
            CheckpointError: the files do not cover a wanted piece, or one cannot be read.
        """
        left = {n: piece for n, piece in enumerate(wanted) if piece.tensor.numel()}
        missing = {n: piece.tensor.numel() for n, piece in left.items()}
        for batch in self._batches(left, rank * len(self.paths) // world_size):
            found = self._pieces(batch, {piece.name for piece in left.values()})
            here = {n: piece for n, piece in left.items() if piece.name in found}
            for n, copied in layout.copy_overlaps(here, found).items():
                missing[n] -= copied
                # Stored pieces never overlap: it is 0 only if every element was copied.
                if not missing[n]:
                    del left[n]
            if not left:
                return
        for n, piece in left.items():
            raise layout.incomplete(piece, piece.tensor.numel() - missing[n])

    def _batches(self, left: Mapping[int, Piece], guess: int) -> Iterator[list[int]]:
        """Yields the numbers of all files, the most likely holders of the remaining pieces first.

        Args:
            left: the pieces that were not found so far; it changes meanwhile.
            guess: the file of this rank, if the writers have partitioned tensors as the readers.
        """
        # The same strategy and world size: each rank finds its own file again.
        yield [guess]
        likely = {number for piece in left.values() for number in self._writers(piece)} - {guess}
        yield sorted(likely)
        # Ranks hold their parts in the order of ranks, under any strategy. So look around the
        # guess, in ever larger batches: of 8 files, after 4, in 3; 5 and 2; 6, 1, 7 and 0.
        nearest_first = sorted(range(len(self.paths)), key=lambda number: abs(number - guess))
        rest = [number for number in nearest_first if number not in likely | {guess}]
        begin, count = 0, 1
        while begin < len(rest):
            yield rest[begin : begin + count]
            begin, count = begin + count, 2 * count

    def _writers(self, piece: Piece) -> range:
        """The files with a piece, if the writers, one for each file, used torch.chunk's rule."""
        if not piece.shape:
            return range(1)
        rows, first, count = piece.shape[0], piece.offset[0], len(piece.tensor)
        chunk = -(-rows // len(self.paths))
        return range(first // chunk, (first + count - 1) // chunk + 1)

    def _open(self, numbers: Iterable[int]) -> list[layout.Header]:
        numbers = list(numbers)
        missing = [number for number in numbers if number not in self._headers]
        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            opened = pool.map(layout.Header.read, (self.paths[number] for number in missing))
            self._headers |= dict(zip(missing, opened, strict=True))
        return [self._headers[number] for number in numbers]


@dataclass(frozen=True)
class Comparison:
    """How the tensors in some files compare with this run's; small enough to be gathered.

    Attributes:
        found: which of this run's tensors, in sorted order, have pieces there: one bit each.
        others: description of the tensors that are unknown to this run, or different, by name.
    """

    found: bytes
    others: dict[str, str]

    @classmethod
    def of(cls, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Comparison:
        """Compares descriptions of tensors."""
        found = np.array([name in theirs for name in sorted(ours)], dtype=np.bool_)
        others = {name: text for name, text in theirs.items() if ours.get(name) != text}
        return cls(np.packbits(found).tobytes(), others)


def check_compared(
    ours: Mapping[str, str], comparisons: Sequence[Comparison], where: Location
) -> None:
    """Rejects a checkpoint whose tensors, as all ranks have compared them, differ from ours.

    Raises:
        CheckpointError: see `check_same_tensors`.
    """
    bits = [np.frombuffer(each.found, dtype=np.uint8) for each in comparisons]
    found = np.unpackbits(np.bitwise_or.reduce(bits))[: len(ours)].tolist()
    theirs = {name: ours[name] for name, bit in zip(sorted(ours), found, strict=True) if bit}
    for each in comparisons:
        theirs |= each.others
    layout.check_same(ours, theirs, where)
