"""How tensors lie in a checkpoint: as pieces of logical tensors, in one safetensors file per rank.

A piece is a rectangle of a logical (unsharded) tensor. What wrote it (one process, DDP, FSDP2,
ZeRO) and how many ranks there were leaves no trace but the way tensors are cut, and reading does
not care: it copies the overlap of the pieces that are there with the pieces that are wanted. Files
follow the safetensors format (https://github.com/huggingface/safetensors#format); where a piece
lies in its tensor stands in their metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer.accelerators import host_memory
from trainer.checkpoint import files
from trainer.checkpoint.files import Location
from trainer.errors import CheckpointError
from trainer.partition import SegmentParameter, is_dtensor, local_rectangles, whole_shape

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Piece:
    """A rectangle of a logical tensor.

    Attributes:
        name: the logical tensor.
        shape: of the logical tensor.
        offset: where the rectangle starts in it, per dimension.
        tensor: the elements of the rectangle, in as many dimensions.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class StoredPiece:
    """A rectangle of a logical tensor whose elements are read when they are asked for.

    Attributes:
        name: the logical tensor.
        shape: of the logical tensor.
        offset: where the rectangle starts in it, per dimension.
        lengths: of the rectangle, per dimension.
        dtype: of its elements.
        elements: reads the elements [start, stop) of the flattened rectangle.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    elements: Callable[[int, int], Tensor]


def stored_piece(piece: Piece) -> StoredPiece:
    """A piece that is in memory, as one that is read."""
    lengths, dtype = tuple(piece.tensor.shape), piece.tensor.dtype
    return StoredPiece(
        piece.name,
        piece.shape,
        piece.offset,
        lengths,
        dtype,
        lambda start, stop: piece.tensor.flatten()[start:stop],
    )


def local_pieces(name: str, tensor: Tensor) -> list[Piece]:
    """The pieces of a tensor that this process holds.

    One of a plain tensor or a DTensor, any number of a segment.
    """
    shape = whole_shape(tensor)
    return [
        Piece(name, shape, offset, local) for local, offset in local_rectangles(tensor.detach())
    ]


def pieces_to_write(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> list[Piece]:
    """The pieces that `rank` is to write.

    Each one is written by exactly one of the ranks that hold it.

    Tensors go, largest first, to the replica with the fewest bytes so far. All ranks come to the
    same answer without speaking to each other. (Of segments each knows its own bytes only; but its
    replicas know the same.)
    """
    pieces = []
    loads: dict[int, list[int]] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        tensor = tensors[name]
        replica, replicas = _replica(tensor, rank, world_size)
        load = loads.setdefault(replicas, [0] * replicas)
        writer = load.index(min(load))
        load[writer] += tensor.nbytes
        if replica == writer:
            pieces += local_pieces(name, tensor)
    return pieces


def _replica(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Which of how many copies of its part of a tensor this rank holds."""
    if isinstance(tensor, SegmentParameter):  # each copy is spread over ranks in a row
        ranks = tensor.segment.group.size()
        return rank // ranks, world_size // ranks
    if not is_dtensor(tensor):
        return rank, world_size
    assert tensor.device_mesh.size() == world_size, "a tensor must be spread over all ranks"
    replica, replicas = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            ranks = tensor.device_mesh.size(dimension)
            replica = replica * ranks + tensor.device_mesh.get_local_rank(dimension)
            replicas *= ranks
    return replica, replicas


class Staging:
    """Host memory that holds a rank's file while it is written, and is kept for the next one.

    Training goes on changing the tensors meanwhile, so they are copied; into memory that was used
    before, which takes a quarter of the time, and is page-locked for tensors on a GPU.
    """

    def __init__(self) -> None:
        self._header = b""
        self._body: Future[Tensor] | None = None
        self._thread = ThreadPoolExecutor(1, "staging")

    def reserve(self, pieces: Iterable[Piece]) -> None:
        """Takes the memory for a file of such pieces in the background, so that the first copy
        finds it there.
        """
        self._reserve(_ordered(pieces))

    def _reserve(self, ordered: Sequence[Piece]) -> Future[Tensor]:
        header, size = _header(ordered)
        if self._body is None or header != self._header:
            self._header, self._body = header, None  # frees the memory before taking other
            device = host_memory.locked_by(piece.tensor for piece in ordered)
            self._body = self._thread.submit(host_memory.reserve, size, device)
        return self._body

    def copy(self, pieces: Iterable[Piece]) -> tuple[bytes, memoryview]:
        """Copies the pieces; returns the file's header and body, good until the next call."""
        ordered = _ordered(pieces)
        body = self._reserve(ordered).result()
        host_memory.copy((piece.tensor for piece in ordered), body)
        return self._header, body.numpy().data


def _ordered(pieces: Iterable[Piece]) -> list[Piece]:
    """As they lie in a file: wide elements first, which keeps them aligned."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def _header(pieces: Sequence[Piece]) -> tuple[bytes, int]:
    """The head of a safetensors file with the pieces in this order, and the size of its body."""
    entries: dict[str, object] = {}
    places = {}
    start = 0
    for piece in pieces:
        key = (
            f"{piece.name}@{','.join(map(str, piece.offset))}" if any(piece.offset) else piece.name
        )
        assert key not in entries, f"two pieces named {key}"
        assert piece.tensor.dtype in _DTYPE_NAMES, (
            f"{piece.name}: checkpoints hold no {piece.tensor.dtype}"
        )
        entries[key] = {
            "dtype": _DTYPE_NAMES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [start, start + piece.tensor.nbytes],
        }
        places[key] = {"name": piece.name, "shape": piece.shape, "offset": piece.offset}
        start += piece.tensor.nbytes
    entries["__metadata__"] = {"format": "pt", "pieces": json.dumps(places)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, start


def read_pieces(path: Location) -> list[StoredPiece]:
    """The pieces in a rank's file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    content = files.open_bytes(path)
    body = 8 + int.from_bytes(content(0, 8).numpy().tobytes(), "little")
    entries = json.loads(content(8, body).numpy().tobytes())
    pieces = []
    for key, place in json.loads(entries.pop("__metadata__")["pieces"]).items():
        entry = entries[key]
        dtype, lengths = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        elements = partial(_elements, content, body + entry["data_offsets"][0], dtype)
        pieces.append(
            StoredPiece(
                place["name"],
                tuple(place["shape"]),
                tuple(place["offset"]),
                lengths,
                dtype,
                elements,
            )
        )
    return pieces


def _elements(
    content: Callable[[int, int], Tensor], begin: int, dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    return content(begin + start * dtype.itemsize, begin + stop * dtype.itemsize).view(dtype)


def group_by_name(pieces: Iterable[StoredPiece]) -> dict[str, list[StoredPiece]]:
    """The pieces of each logical tensor."""
    groups: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        groups.setdefault(piece.name, []).append(piece)
    return groups


def fill(wanted: Sequence[Piece], stored: Mapping[str, Sequence[StoredPiece]]) -> None:
    """Copies into each wanted piece its elements from the stored pieces of the same tensor, and
    reads little more.

    Raises:
        CheckpointError: a wanted piece is not covered, or a file cannot be read.
    """

    def copy(target: Piece) -> int:
        return sum(_copy_overlap(source, target) for source in stored[target.name])

    with ThreadPoolExecutor(files.THREADS) as pool:
        for target, copied in zip(wanted, pool.map(copy, wanted), strict=True):
            if copied != target.tensor.numel():
                raise CheckpointError(
                    f"the checkpoint holds {copied} of the {target.tensor.numel()} elements of "
                    f"{target.name} that are "
                    f"wanted; it was not written whole: restore another step"
                )


@torch.no_grad()
def _copy_overlap(source: StoredPiece, target: Piece) -> int:
    """Copies what two pieces of a tensor have in common; returns the number of elements."""
    from_source, to_target = [], []
    for source_start, source_length, target_start, target_length in zip(
        source.offset, source.lengths, target.offset, target.tensor.shape, strict=True
    ):
        start = max(source_start, target_start)
        stop = min(source_start + source_length, target_start + target_length)
        if stop <= start:
            return 0
        from_source.append(slice(start - source_start, stop - source_start))
        to_target.append(slice(start - target_start, stop - target_start))
    rows, row = from_source[0] if from_source else slice(0, 1), math.prod(source.lengths[1:])
    elements = source.elements(rows.start * row, rows.stop * row)
    block = (
        elements.view(-1, *source.lengths[1:])[(slice(None), *from_source[1:])]
        if from_source
        else elements[0]
    )
    target.tensor[tuple(to_target)].copy_(block)
    return block.numel()


class StoredTensors(Mapping[str, Tensor]):
    """Tensors that are read from the disk when they are asked for, whole or some elements.

    None is kept.

    Attributes:
        pieces: those of each tensor.
    """

    def __init__(self, pieces: Mapping[str, Sequence[StoredPiece]]) -> None:
        self.pieces = pieces

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.elements(name, 0, math.prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; reads no elements."""
        return self.pieces[name][0].shape

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened tensor.

        Reads no more than the rows that they lie in.

        Raises:
            CheckpointError: some of them were not stored.
        """
        first = self.pieces[name][0]
        if first.lengths == first.shape:
            return first.elements(start, stop)
        row = max(1, math.prod(first.shape[1:]))
        begin, end = start // row, -(-stop // row)
        rows = torch.empty(end - begin, *first.shape[1:], dtype=first.dtype)
        fill([Piece(name, first.shape, (begin, *[0] * (rows.ndim - 1)), rows)], self.pieces)
        return rows.flatten()[start - begin * row : stop - begin * row]


def check_same_tensors(
    wanted: Mapping[str, Tensor], stored: Mapping[str, Sequence[StoredPiece]], where: Location
) -> None:
    """Refuses a checkpoint whose tensors differ from the wanted ones in name, shape or element
    type.

    Raises:
        CheckpointError: naming the first few of each difference.
    """
    ours = {name: _describe(tensor.dtype, whole_shape(tensor)) for name, tensor in wanted.items()}
    theirs = {name: _describe(pieces[0].dtype, pieces[0].shape) for name, pieces in stored.items()}
    differences = {
        "missing in it": sorted(ours.keys() - theirs.keys()),
        "unknown to this run": sorted(theirs.keys() - ours.keys()),
        "different": [
            f"{name} ({theirs[name]} in it, {ours[name]} in this run)"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ],
    }
    if any(differences.values()):
        found = "; ".join(
            f"{len(names)} {what}: {_first(names)}" for what, names in differences.items() if names
        )
        raise CheckpointError(
            f"{where} is a checkpoint of another model or optimizer. Tensors {found}. "
            "Use the configuration that it was saved with (in its meta.json), or start in another "
            "output folder"
        )


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
