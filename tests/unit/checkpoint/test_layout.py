"""Tensors are divided into pieces and stored in files, and any reader gets them back."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samestep.errors import CheckpointError
from tests.processes import run_ranks
from trainer import partition
from trainer.accelerators import host_memory
from trainer.checkpoint import Checkpointer, Config, files, layout
from trainer.checkpoint.layout import Piece, StoredPiece
from trainer.partition import Segment, SegmentParameter


def write(path: Path, pieces: list[Piece]) -> None:
    files.write(path, *layout.Staging().copy(pieces).result())


def whole(name: str, tensor: Tensor) -> Piece:
    (piece,) = layout.local_pieces(name, tensor)
    return piece


def _slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


def stored(pieces: Iterable[Piece]) -> dict[str, list[StoredPiece]]:
    """The same pieces, as if they were in files."""
    found: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        tensor = piece.tensor.flatten()
        elements = partial(_slice, tensor)
        lengths, dtype = tuple(piece.tensor.shape), tensor.dtype
        each = StoredPiece(piece.name, piece.shape, piece.offset, lengths, dtype, elements)
        found.setdefault(piece.name, []).append(each)
    return found


TENSORS = {
    "float32": torch.arange(12.0).view(3, 4),
    "bfloat16": torch.arange(7).to(torch.bfloat16),
    "float64": torch.tensor([[1e-300]], dtype=torch.float64),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "odd name / é@1,2 [x]": torch.ones(1),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def test_file_is_plain_safetensors_and_reads_back_to_the_bit(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", [whole(name, tensor) for name, tensor in TENSORS.items()])
    ours = layout.read_files([tmp_path / "f.safetensors"])
    theirs = load_file(tmp_path / "f.safetensors")
    assert ours.keys() == theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        for read in (ours[name], theirs[name]):
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert (
                read.numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes()
                if name != "bfloat16"
                else True
            )
            assert torch.equal(read.nan_to_num(0.0), tensor.nan_to_num(0.0))


def test_several_pieces_of_a_tensor_may_lie_in_one_file(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", cut(torch.arange(77.0).view(11, 7), [4], [2]))
    result = torch.zeros(11, 7)
    layout.fill([whole("w", result)], layout.read_files([tmp_path / "f.safetensors"]).pieces)
    assert torch.equal(result, torch.arange(77.0).view(11, 7))


def test_file_may_hold_nothing(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", [])
    assert len(layout.read_files([tmp_path / "f.safetensors"])) == 0
    assert load_file(tmp_path / "f.safetensors") == {}


def test_the_example_of_the_module_is_right(tmp_path: Path) -> None:
    """Two writers, three readers and a flat partition, as in the docstring of `layout`."""
    w, step = torch.arange(10.0).view(5, 2), whole("step", torch.tensor(7.0))
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        piece = Piece("w", (5, 2), (rows.start, 0), w[rows])
        write(tmp_path / f"rank-0000{rank}.safetensors", [piece, step] if rank == 0 else [piece])
    stored = layout.read_files(sorted(tmp_path.iterdir())).pieces
    assert [(each.offset, each.lengths) for each in stored["w"]] == [
        ((0, 0), (3, 2)),
        ((3, 0), (2, 2)),
    ]
    for file, keys, body in (("0", {"w", "step"}, 28), ("1", {"w@3,0"}, 16)):
        path = tmp_path / f"rank-0000{file}.safetensors"
        assert load_file(path).keys() == keys
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        assert header % 8 == 0
        assert len(content) - header == body
    readers = [torch.full((rows, 2), torch.nan) for rows in (2, 2, 1)]
    layout.fill([Piece("w", (5, 2), (2 * i, 0), each) for i, each in enumerate(readers)], stored)
    assert torch.equal(torch.cat(readers), w)
    flat = torch.full((4,), torch.nan)
    rectangles = partition.rectangles(flat, 3, (5, 2))
    assert [offset for _, offset in rectangles] == [(1, 1), (2, 0), (3, 0)]
    layout.fill([Piece("w", (5, 2), offset, view) for view, offset in rectangles], stored)
    assert flat.tolist() == [3, 4, 5, 6]


def test_staging_copies_and_is_used_again() -> None:
    staging = layout.Staging()
    tensor = torch.ones(1000)
    _, body = staging.copy([whole("a", tensor)]).result()
    address = torch.frombuffer(body, dtype=torch.float32).data_ptr()
    tensor.zero_()
    assert torch.frombuffer(body, dtype=torch.float32).sum() == 1000
    _, again = staging.copy([whole("a", tensor)]).result()
    assert torch.frombuffer(again, dtype=torch.float32).data_ptr() == address
    _, larger = staging.copy([whole("a", tensor), whole("b", torch.ones(1))]).result()
    assert len(larger) == 4004


def test_training_goes_on_while_a_save_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is held back before the tensors change."""
    tensor, may_copy = torch.ones(10), threading.Event()
    copy = host_memory.copy
    monkeypatch.setattr(host_memory, "copy", lambda *arguments: (may_copy.wait(), copy(*arguments)))
    checkpointer = Checkpointer(tmp_path, Config(), rank=0, world_size=1)
    checkpointer.save(1, {"w": tensor}, {}, wait_for_copy=False)
    update = threading.Thread(target=lambda: (checkpointer.copied(), tensor.zero_()))
    update.start()
    time.sleep(0.1)
    assert tensor.all()
    may_copy.set()
    update.join()
    checkpointer.wait()
    assert not tensor.any()
    assert load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")["w"].all()


def test_a_copy_that_fails_is_a_save_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object) -> None:
        raise MemoryError("no memory is left")

    monkeypatch.setattr(host_memory, "copy", no_memory)
    checkpointer = Checkpointer(tmp_path, Config(), rank=0, world_size=1)
    checkpointer.save(1, {"w": torch.ones(10)}, {})
    with pytest.raises(CheckpointError, match="step-00000001 failed: no memory is left"):
        checkpointer.wait()
    assert not (tmp_path / "step-00000001").exists()


def test_staging_is_reserved_ahead() -> None:
    staging, tensor = layout.Staging(), torch.ones(1000)
    staging.reserve([whole("a", tensor)])
    reserved = staging._body
    assert reserved is not None
    _, body = staging.copy([whole("a", tensor)]).result()
    assert torch.frombuffer(body, dtype=torch.float32).data_ptr() == reserved.result().data_ptr()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_replicated_tensors_are_written_once_and_evenly(world_size: int) -> None:
    tensors = {f"t{i}": torch.zeros(1 + (37 * i) % 100) for i in range(200)} | {
        "step": torch.tensor(0.0)
    }
    ranks = [layout.pieces_to_write(tensors, rank, world_size) for rank in range(world_size)]
    written = [piece.name for pieces in ranks for piece in pieces]
    assert sorted(written) == sorted(tensors)
    loads = [sum(piece.tensor.nbytes for piece in pieces) for pieces in ranks]
    assert max(loads) - min(loads) <= 400, "they differ by less than the largest tensor"


def test_copies_of_segments_are_written_once() -> None:
    """As machines of a TPU slice hold them, where each copy of the model lies on several."""
    pair = cast(dist.ProcessGroup, SimpleNamespace(size=lambda: 2))
    written = []
    for rank in range(4):
        part = SegmentParameter(
            torch.zeros(6), Segment((4, 3), 6 * (rank % 2), pair), requires_grad=False
        )
        written += [(rank, piece.offset) for piece in layout.pieces_to_write({"w": part}, rank, 4)]
    assert written == [(0, (0, 0)), (1, (2, 0))]


def cut(tensor: Tensor, row_cuts: list[int], column_cuts: list[int]) -> list[Piece]:
    rows, columns = [0, *row_cuts, tensor.shape[0]], [0, *column_cuts, tensor.shape[1]]
    return [
        Piece("w", tuple(tensor.shape), (r0, c0), tensor[r0:r1, c0:c1])
        for r0, r1 in itertools.pairwise(rows)
        for c0, c1 in itertools.pairwise(columns)
    ]


@pytest.mark.parametrize(
    ("row_cuts", "column_cuts"), [([], []), ([3, 3, 9], []), ([1], [2, 5]), ([11], [0, 7])]
)
@pytest.mark.parametrize(("into_rows", "into_columns"), [([], []), ([2, 7], []), ([5], [1, 4])])
def test_any_cut_fills_any_other(
    row_cuts: list[int],
    column_cuts: list[int],
    into_rows: list[int],
    into_columns: list[int],
    tmp_path: Path,
) -> None:
    tensor = torch.randn(11, 7, generator=torch.Generator().manual_seed(0))
    for rank, piece in enumerate(cut(tensor, row_cuts, column_cuts)):
        write(tmp_path / str(rank), [piece])
    found = layout.read_files(tmp_path.iterdir()).pieces
    result = torch.zeros(11, 7)
    layout.fill(cut(result, into_rows, into_columns), found)
    assert torch.equal(result, tensor)


@pytest.mark.parametrize(
    ("row_cuts", "column_cuts"), [([], []), ([3, 3, 9], []), ([11], [0, 7]), ([1], [2, 5])]
)
def test_stored_tensors_are_read_whole_or_in_part(
    row_cuts: list[int], column_cuts: list[int]
) -> None:
    tensor = torch.arange(77).view(11, 7)
    scalar = whole("scalar", torch.tensor(5.0))
    tensors = layout.StoredTensors(stored([*cut(tensor, row_cuts, column_cuts), scalar]))
    assert list(tensors) == ["w", "scalar"]
    assert tensors.shape("w") == (11, 7)
    assert torch.equal(tensors["w"], tensor)
    assert torch.equal(tensors["scalar"], torch.tensor(5.0))
    for start, stop in [(0, 0), (0, 77), (20, 22), (21, 49), (77, 77), (76, 77)]:
        assert torch.equal(tensors.elements("w", start, stop), tensor.flatten()[start:stop])


def test_reading_a_part_needs_no_other_part() -> None:
    tensor = torch.arange(77.0).view(11, 7)
    tensors = layout.StoredTensors(stored(cut(tensor, [3, 6, 9], [])[1:3]))
    assert torch.equal(tensors.elements("w", 21, 63), tensor[3:9].flatten())
    with pytest.raises(CheckpointError, match=r"holds 7 of the 14 elements of w "):
        tensors.elements("w", 14, 28)


def test_a_hole_is_found() -> None:
    tensor = torch.ones(4, 2)
    pieces = cut(tensor, [1, 3], [])
    with pytest.raises(CheckpointError, match=r"holds 4 of the 8 elements of w .*another step"):
        layout.fill([whole("w", torch.zeros(4, 2))], stored([pieces[0], pieces[2]]))


SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1, 1),
    "bias": (7,),
    "matrix": (11, 6),
    "stack": (5, 3, 4),
    "kernel": (2, 3, 2, 5),
}


def split(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """A tensor of zeros as this process holds it.

    Some of its rows, or a flat range between random bounds.
    """
    whole = torch.zeros(shape, dtype=torch.bfloat16 if name == "stack" else torch.float32)
    if kind == "rows":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return distribute_tensor(
            whole, mesh, [Shard(0) if shape else Replicate()], src_data_rank=None
        )
    numbers, rank, group = np.random.default_rng(len(name)), dist.get_rank(), dist.group.WORLD
    assert group is not None
    ends = [
        0,
        *sorted(numbers.integers(0, whole.numel() + 1, group.size() - 1).tolist()),
        whole.numel(),
    ]
    part = whole.flatten()[ends[rank] : ends[rank + 1]]
    return SegmentParameter(part, Segment(shape, ends[rank], group), requires_grad=False)


def carry(source: Path, target: Path, kind: str) -> None:
    """Restores what other ranks have saved, and saves it under another sharding."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = {name: split(name, shape, kind) for name, shape in SHAPES.items()}
    found = layout.read_files(source.iterdir()).pieces
    layout.check_same_tensors(tensors, found, source)
    layout.fill([piece for each in tensors.items() for piece in layout.local_pieces(*each)], found)
    write(target / str(rank), layout.pieces_to_write(tensors, rank, world_size))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.long
def test_any_split_restores_as_any_other(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["stack"] = tensors["stack"].bfloat16()
    folders = [tmp_path / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    write(folders[0] / "0", layout.pieces_to_write(tensors, 0, 1))
    for i, (world_size, kind) in enumerate(
        [(4, "segments"), (3, "rows"), (3, "segments"), (2, "rows")]
    ):
        run_ranks(world_size, carry, folders[i], folders[i + 1], kind)
        files_of_ranks = list(folders[i + 1].iterdir())
        assert len(files_of_ranks) == world_size
        moved = layout.read_files(files_of_ranks)
        written = {
            name: sum(math.prod(piece.lengths) for piece in found)
            for name, found in moved.pieces.items()
        }
        assert written == {name: tensor.numel() for name, tensor in tensors.items()}, (
            "each element is written once"
        )
        assert all(torch.equal(moved[name], tensor) for name, tensor in tensors.items())


def test_differences_are_named_and_counted() -> None:
    found = stored(whole(name, torch.zeros(2)) for name in ["a", "b", "c", "d", "e", "same"])
    wanted = {"same": torch.zeros(2), "a": torch.zeros(3), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        layout.check_same_tensors(wanted, found, Path("run/step-00000001"))
    message = str(caught.value)
    assert "run/step-00000001 is a checkpoint of another model" in message
    assert "1 missing in it: new" in message
    assert "4 unknown to this run: b, c, d and others" in message
    assert "1 different: a (float32 [2] in it, float32 [3] in this run)" in message


def test_another_element_type_is_refused() -> None:
    found = stored([whole("a", torch.zeros(2))])
    with pytest.raises(CheckpointError, match=r"float32 \[2\] in it, bfloat16 \[2\] in this run"):
        layout.check_same_tensors({"a": torch.zeros(2).bfloat16()}, found, Path("x"))
