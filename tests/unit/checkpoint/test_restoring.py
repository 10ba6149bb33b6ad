"""A rank restores from few of the files of all ranks, and from all if it must."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.storage import objects
from tests.faulty_proxy import FaultyProxy
from trainer.checkpoint import files, integrity, layout, restoring, writer
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import Piece
from trainer.checkpoint.meta import open_step, read_meta

SHAPES = {"matrix": (64, 3), "uneven": (37, 2), "short": (5, 4), "bias": (64,), "scalar": ()}


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def by_rows(tensors: dict[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """The pieces of a rank under FSDP2; rank 0 writes the scalar."""
    pieces = []
    for name, tensor in tensors.items():
        if not tensor.ndim:
            pieces += [Piece(name, (), (), tensor)] if rank == 0 else []
            continue
        rows = -(-len(tensor) // ranks)
        if len(part := tensor[rank * rows : (rank + 1) * rows]):
            offset = (rank * rows, *[0] * (tensor.ndim - 1))
            pieces.append(Piece(name, tuple(tensor.shape), offset, part))
    return pieces


def by_elements(tensors: dict[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """The pieces of a rank if all elements of vectors are one line, cut into equal parts."""
    pieces, begin = [], 0
    total = sum(each.numel() for each in tensors.values())
    first, end = (total * number // ranks for number in (rank, rank + 1))
    for name, tensor in tensors.items():
        a, b = max(0, first - begin), min(tensor.numel(), end - begin)
        begin += tensor.numel()
        if a < b and tensor.ndim:
            width = tensor[0].numel()
            # Whole rows only, which are shared out by their first element.
            rows = slice(-(-a // width), -(-b // width))
            if len(part := tensor[rows]):
                offset = (rows.start, *[0] * (tensor.ndim - 1))
                pieces.append(Piece(name, tuple(tensor.shape), offset, part))
        elif a < b:
            pieces.append(Piece(name, (), (), tensor))
    return pieces


SPLITS = {"rows": by_rows, "elements": by_elements}


def write(folder: Path, parts: Sequence[Sequence[Piece]]) -> list[Location]:
    paths: list[Location] = []
    for rank, pieces in enumerate(parts):
        paths.append(folder / f"rank-{rank:05d}.safetensors")
        files.write(paths[-1], *layout.Staging().copy(pieces).result())
    return paths


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that have been opened."""
    found: list[str] = []
    open_bytes = files.open_bytes

    def recorded(path: Location):
        found.append(path.name)
        return open_bytes(path)

    monkeypatch.setattr(files, "open_bytes", recorded)
    return found


@pytest.mark.parametrize("ranks", [4, 16, 37])
@pytest.mark.parametrize("split", SPLITS)
def test_a_rank_of_as_many_opens_its_own_file_only(tmp_path, opened, split, ranks) -> None:
    """However many there are: 1,024 ranks would open a million files otherwise."""
    tensors = {name: tensor for name, tensor in whole().items() if tensor.ndim}
    paths = write(tmp_path, [SPLITS[split](tensors, rank, ranks) for rank in range(ranks)])
    for rank in (0, ranks // 2, ranks - 1):
        opened.clear()
        result = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        wanted = SPLITS[split](result, rank, ranks)
        restoring.StoredFiles(paths).fill(wanted, rank, ranks)
        expected = SPLITS[split](tensors, rank, ranks)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, expected, strict=True))
        assert opened == ([paths[rank].name] if wanted else [])


def test_other_numbers_of_ranks_open_what_they_need(tmp_path, opened) -> None:
    tensors = {"matrix": whole()["matrix"], "bias": whole()["bias"]}
    paths = write(tmp_path, [by_rows(tensors, rank, 16) for rank in range(16)])
    for ranks, rank in ((8, 5), (32, 11), (4, 3)):
        opened.clear()
        result = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        restoring.StoredFiles(paths).fill(by_rows(result, rank, ranks), rank, ranks)
        assert len(opened) == max(1, 16 // ranks)


@pytest.mark.parametrize(("writers", "readers"), list(itertools.product([1, 3, 8, 40], repeat=2)))
@pytest.mark.parametrize(("saved", "restored"), list(itertools.product(SPLITS, repeat=2)))
def test_every_partition_restores_from_every_other(
    tmp_path, saved, restored, writers, readers
) -> None:
    tensors = whole()
    paths = write(tmp_path, [SPLITS[saved](tensors, rank, writers) for rank in range(writers)])
    result = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for rank in range(readers):
        wanted = SPLITS[restored](result, rank, readers)
        restoring.StoredFiles(paths).fill(wanted, rank, readers)
    assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())


def test_all_files_are_tried_before_an_element_is_missing(tmp_path, opened) -> None:
    tensors = {"matrix": torch.ones(8, 2)}
    parts = [by_rows(tensors, rank, 8) for rank in range(8)]
    parts[6] = []
    paths = write(tmp_path, parts)
    result = Piece("matrix", (8, 2), (0, 0), torch.zeros(8, 2))
    with pytest.raises(CheckpointError, match=r"holds 14 of the 16 elements of matrix"):
        restoring.StoredFiles(paths).fill([result], 0, 1)
    assert sorted(opened) == [path.name for path in paths]


@pytest.mark.long
def test_opening_all_files_looks_for_no_garbage(tmp_path) -> None:
    """The time would grow faster than the number of pieces, none of which is garbage."""
    tensors = {f"{n}": torch.ones(8, 1) for n in range(300)}
    paths = write(tmp_path, [by_rows(tensors, rank, 8) for rank in range(8)])
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        assert len(layout.read_files(paths)) == len(tensors)
    finally:
        gc.callbacks.remove(note)
    assert collections.count("start") <= 2  # one is due when all is over
    assert gc.isenabled()


def test_ranks_compare_tensors_by_halves(tmp_path) -> None:
    """Each looks at some of the files; a tensor is missing if none of them has it."""
    halves = [{"a": "x", "b": "x"}, {"b": "x", "c": "x"}]
    same = {"a": "x", "b": "x", "c": "x"}

    def check(ours: dict[str, str]) -> None:
        compared = [restoring.Comparison.of(ours, half) for half in halves]
        restoring.check_compared(ours, compared, tmp_path)

    check(same)
    for ours, problem in (
        (same | {"d": "x"}, "1 missing in it: d"),
        ({"a": "x", "c": "x"}, "1 unknown to this run: b"),
        (same | {"c": "y"}, r"1 different: c \(x in it, y in this run\)"),
        ({}, "3 unknown to this run: a, b, c"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            check(ours)


def test_the_first_writers_with_the_fewest_bytes_are_chosen() -> None:
    """As ever, or two versions would disagree about who writes a tensor."""
    sizes = np.random.default_rng(0).integers(1, 9, 200).tolist()
    tensors = {f"{n:03d}": torch.zeros(size) for n, size in enumerate(sizes)}
    loads, expected = [0] * 7, dict[str, int]()
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        expected[name] = loads.index(min(loads))
        loads[expected[name]] += tensors[name].nbytes
    for rank in range(7):
        names = {piece.name for piece in layout.pieces_to_write(tensors, rank, 7)}
        assert names == {name for name, writer in expected.items() if writer == rank}


def save(folder: Location, ranks: int) -> None:
    """What all ranks write in a save; rank 0 is the last."""
    for rank in [*range(1, ranks), 0]:
        content = layout.Staging().copy([]).result()
        meta = writer.describe(1, ranks, {})
        writer.write_step(folder, content, meta, rank=rank, world_size=ranks, peer_timeout=30.0)


def requests_of_a_commit(proxy: FaultyProxy, url: str, ranks: int) -> list[str]:
    """The requests of rank 0 about the notes of the others."""
    proxy.behave()
    save(files.location(url), ranks)
    return [each for each in proxy.requests if "list-type" in each or "delete" in each]


@pytest.mark.long
def test_the_notes_of_all_ranks_are_listed_and_removed_at_once(faulty_s3, s3_folder) -> None:
    """Other requests read each note, eight at a time."""
    few = requests_of_a_commit(faulty_s3, f"{s3_folder}/few", 3)
    many = requests_of_a_commit(faulty_s3, f"{s3_folder}/many", 40)
    assert len(few) == len(many) == 2
    names = objects.names(f"{s3_folder}/many")
    assert len(names) == 43  # 40 tensor files, meta.json, checksums.json and COMMITTED
    assert not [name for name in names if name.startswith("rank-") and name.endswith(".json")]


@pytest.mark.long
def test_sizes_of_all_files_are_one_listing(faulty_s3, s3_folder) -> None:
    found = []
    for ranks in (2, 30):
        folder = files.location(f"{s3_folder}/{ranks}")
        save(folder, ranks)
        faulty_s3.behave()
        integrity.check_sizes(folder)
        found.append(len(faulty_s3.requests))
    assert found[0] == found[1]
    objects.remove(f"{s3_folder}/30/rank-00007.safetensors")
    with pytest.raises(CheckpointError, match="rank-00007"):
        integrity.check_sizes(folder)
    objects.write(f"{s3_folder}/30/rank-00007.safetensors", b"short")
    with pytest.raises(CheckpointError, match=r"rank-00007\..* it has 5 bytes"):
        integrity.check_sizes(folder)


def test_a_description_is_read_with_one_get_for_each_file(faulty_s3, s3_folder) -> None:
    """COMMITTED, checksums.json and meta.json."""
    folder = files.location(s3_folder)
    save(folder, 1)
    faulty_s3.behave()
    assert read_meta(folder)["world_size"] == 1
    assert len([each for each in faulty_s3.requests if each.startswith("GET")]) == 3


@pytest.mark.long
def test_requests_of_a_restore_do_not_depend_on_the_number_of_ranks(faulty_s3, s3_folder) -> None:
    """Of one rank, that is: it verifies and opens one file however many there are."""
    found = []
    for ranks in (3, 20):
        folder = files.location(f"{s3_folder}/{ranks}")
        tensors = {"matrix": torch.arange(4.0 * ranks).view(ranks, 4)}
        for rank in [*range(1, ranks), 0]:
            content = layout.Staging().copy(by_rows(tensors, rank, ranks)).result()
            meta = writer.describe(1, ranks, {})
            writer.write_step(folder, content, meta, rank=rank, world_size=ranks, peer_timeout=30.0)
        faulty_s3.behave()
        integrity.check_content(folder, ranks - 1, ranks)
        paths = open_step(folder).files
        result = torch.zeros(ranks, 4)
        wanted = by_rows({"matrix": result}, ranks - 2, ranks)
        restoring.StoredFiles(paths).fill(wanted, ranks - 2, ranks)
        assert torch.equal(result[ranks - 2], tensors["matrix"][ranks - 2])
        found.append(len(faulty_s3.requests))
    assert found[0] == found[1]
