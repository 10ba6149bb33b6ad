"""The cost of checkpoints against the number of ranks and of tensors.

One process writes the files of all ranks one after the other, as each of them would, and then
restores as one of them. Tensors are small: these are the costs beside reading and writing bytes,
which each rank shares with the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.growth import Figures, Growth, cpu_timed, in_fresh_process, measure, resident
from trainer.checkpoint import integrity, layout, writer
from trainer.checkpoint.layout import Piece
from trainer.checkpoint.restoring import StoredFiles

TENSORS = 1000
"""Tensors of a checkpoint; BERT-large with AdamW has 1,173."""
RANKS = 64
"""Ranks, when the number of tensors grows."""
_COLUMNS = 4


def pieces_of(rank: int, ranks: int, tensors: int) -> list[Piece]:
    """A row of each tensor for each rank, as FSDP2 partitions them."""
    shape = (ranks, _COLUMNS)
    row = torch.full((1, _COLUMNS), float(rank))
    return [Piece(f"model/layer{n}.weight", shape, (rank, 0), row) for n in range(tensors)]


def write(folder: Path, rank: int, ranks: int, tensors: int) -> None:
    """Writes what a rank writes in a save; rank 0 must be the last."""
    content = layout.Staging().copy(pieces_of(rank, ranks, tensors)).result()
    meta = writer.describe(1, ranks, {})
    writer.write_step(folder, content, meta, rank=rank, world_size=ranks, peer_timeout=60.0)


def restore(folder: Path, ranks: int, tensors: int) -> Figures:
    """Restores as the last of the ranks."""
    rank = ranks - 1
    verifying, _ = cpu_timed(lambda: integrity.check_content(folder, rank, ranks))
    before = resident()
    wanted = pieces_of(rank, ranks, tensors)
    wanted = [replace(each, tensor=torch.zeros_like(each.tensor)) for each in wanted]
    stored = StoredFiles(integrity.rank_files(folder))
    filling, _ = cpu_timed(lambda: stored.fill(wanted, rank, ranks))
    memory = resident(before)
    assert all(bool((each.tensor == rank).all()) for each in wanted)
    return {
        "restore: verify this rank's files, CPU s": verifying,
        "restore: fill this rank's tensors, CPU s": filling,
        "restore: memory of that, MiB": memory,
    }


def export(folder: Path) -> Figures:
    """Opens all files in one process, as an export does."""
    before = resident()
    opening, _ = cpu_timed(lambda: layout.read_files(integrity.rank_files(folder)))
    return {
        "export: open all tensors, CPU s": opening,
        "export: memory of that, MiB": resident(before),
    }


def save_and_restore(ranks: int, tensors: int) -> Figures:
    """The costs of a checkpoint with the files of all ranks."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        others = range(1, ranks)

        def write_others() -> None:
            for rank in others:
                write(folder, rank, ranks, tensors)

        writing, _ = cpu_timed(write_others)
        commit, _ = cpu_timed(lambda: write(folder, 0, ranks, tensors))
        kept, _ = cpu_timed(lambda: integrity.check_sizes(folder))
        replicated = {f"{n}": torch.zeros(1) for n in range(tensors)}
        chosen, _ = cpu_timed(lambda: layout.pieces_to_write(replicated, ranks - 1, ranks))
        figures = {"save: one rank's files, CPU s": writing / len(others)} if others else {}
        return {
            **figures,
            "save: commit by rank 0, CPU s": commit,
            "save: compare the sizes of all files, CPU s": kept,
            "save: assign replicated tensors to ranks, CPU s": chosen,
            **in_fresh_process(restore, folder, ranks, tensors),
            **in_fresh_process(export, folder),
        }


def costs(
    ranks: Sequence[int], tensors: Sequence[int], seconds: float
) -> Iterator[tuple[str, list[Growth]]]:
    """Measures checkpoints of these numbers of ranks, then of these numbers of tensors."""
    yield (
        f"Checkpoints of {TENSORS:,} tensors",
        measure("ranks", ranks, lambda n: save_and_restore(n, TENSORS), seconds),
    )
    yield (
        f"Checkpoints of {RANKS} ranks",
        measure("tensors", tensors, lambda n: save_and_restore(RANKS, n), seconds),
    )
