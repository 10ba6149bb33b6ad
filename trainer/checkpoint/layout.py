"""Tensor files of a checkpoint: which elements of which tensor lie at which bytes of which file.

Each rank writes one safetensors file (https://github.com/huggingface/safetensors#format). It holds
*pieces*. A piece is a rectangle of a logical tensor, that is, of the tensor as a single process
would hold it. The header says of each piece which tensor it is from, the shape of that tensor, and
at which offset the rectangle starts. Nothing else depends on the strategy or on the world size of
the writers, so any number of readers under any strategy can fill their own pieces: each copies what
a stored piece and a wanted piece have in common.

A worked example: the fp32 matrix `w` of shape [5, 2], whose flattened elements are 0 to 9, and the
replicated scalar `step`. Two ranks write under FSDP2, which gives each ceil(5 / 2) = 3 rows:

    file                    bytes of the body  key in the header  shape   offset  elements
    rank-00000.safetensors  0 to 23            w                  [3, 2]  [0, 0]  0 to 5
                            24 to 27           step               []      []      the scalar
    rank-00001.safetensors  0 to 15            w@3,0              [2, 2]  [3, 0]  6 to 9

The body starts after an 8-byte length and the JSON header, which is padded to a multiple of 8. A
key without "@" means that the offset is 0 in all dimensions; a single process writes its tensors
under their own names, as any other program that saves safetensors.

Three ranks read under FSDP2, with ceil(5 / 3) = 2 rows each:

    reader  wants rows  reads of rank-00000   reads of rank-00001
    0       0 and 1     w, bytes 0 to 15
    1       2 and 3     w, bytes 16 to 23     w@3,0, bytes 0 to 7
    2       4                                 w@3,0, bytes 8 to 15

All three read `step`. Under ZeRO a reader's partition is a flat range, say elements 3 to 6. That is
no rectangle but up to 2n - 1 of them for n dimensions, here three: element 3 (the end of row 1),
elements 4 and 5 (row 2), and element 6 (the start of row 3). Each is filled as above.
"""

from __future__ import annotations

import gc
import heapq
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.storage.urls import PARALLEL_REQUESTS
from samestep.stored_json import JsonError
from trainer.accelerators import host_memory
from trainer.checkpoint import files
from trainer.checkpoint.files import Location
from trainer.checkpoint.header import Entry, Place, read_header
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

Elements = Callable[[int, int], Tensor]
"""Reads the elements [start, stop) of a flattened rectangle."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a logical tensor, in memory.

    Attributes:
        name: of the logical tensor.
        shape: of the logical tensor.
        offset: index of the rectangle's first element, per dimension.
        tensor: the elements, with as many dimensions as the logical tensor.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)  # there may be a million of them
class StoredPiece:
    """A rectangle of a logical tensor in a file; its elements are read on access.

    Attributes:
        name: of the logical tensor.
        shape: of the logical tensor.
        offset: index of the rectangle's first element, per dimension.
        lengths: shape of the rectangle.
        dtype: of the elements.
        elements: reads some of them.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    elements: Elements


def local_pieces(name: str, tensor: Tensor) -> list[Piece]:
    """Returns this rank's pieces: one of a plain tensor or a DTensor, any number of a segment."""
    shape, rectangles = whole_shape(tensor), local_rectangles(tensor.detach())
    return [Piece(name, shape, offset, local) for local, offset in rectangles]


def pieces_to_write(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> list[Piece]:
    """Returns the pieces that `rank` writes; of all ranks with a piece, exactly one writes it.

    Tensors are assigned largest first, each to the replica with the fewest bytes so far. The
    replicas of a shard compute the same assignment without communication, since they hold equally
    large parts. Bytes are counted separately for each number of replicas.

    With four ranks, a replicated tensor has four replicas. Under HSDP with two copies of the model
    a sharded parameter has two, and each of its shards is held by one rank of each copy.
    """
    pieces = []
    # Number of replicas -> (bytes, replica) of each of them; a heap, with the next writer first.
    loads: dict[int, list[tuple[int, int]]] = {}
    # Largest first balances best; names break ties, so replicas sort alike.
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        tensor = tensors[name]
        replica, replicas = _replica(tensor, rank, world_size)
        if replicas not in loads:
            loads[replicas] = [(0, number) for number in range(replicas)]
        load, writer = loads[replicas][0]
        heapq.heapreplace(loads[replicas], (load + tensor.nbytes, writer))
        if replica == writer:
            pieces += local_pieces(name, tensor)
    return pieces


def _replica(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Returns which copy of its shard of a tensor this rank holds, and the number of copies."""
    # Consecutive ranks share a copy: of 4 ranks in groups of 2, ranks 2 and 3 hold copy 1.
    if isinstance(tensor, SegmentParameter):
        ranks = tensor.segment.group.size()
        return rank // ranks, world_size // ranks
    if not is_dtensor(tensor):
        return rank, world_size
    mesh = tensor.device_mesh
    replica, replicas = rank // mesh.size(), world_size // mesh.size()
    # The replicated mesh dimensions are the digits of a number, the replica.
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            ranks = mesh.size(dimension)
            replica = replica * ranks + mesh.get_local_rank(dimension)
            replicas *= ranks
    return replica, replicas


class Staging:
    """Host memory for a rank's file while it is written, kept for the next save.

    The tensors are copied because training changes them during an asynchronous save. Copying into
    memory that was used before takes a quarter of the time (no page faults). For tensors on a GPU
    the memory is page-locked.
    """

    def __init__(self) -> None:
        self._header = b""
        self._body: Future[Tensor] | None = None
        self._thread = ThreadPoolExecutor(1, "staging")

    def reserve(self, pieces: Iterable[Piece]) -> Future[Tensor]:
        """Allocates the memory for a file in the background, unless it is there already."""
        ordered = _in_file_order(pieces)
        header, size = _header(ordered)
        if self._body is None or header != self._header:
            # Drop the old memory before the new is allocated, so both never exist together.
            self._header, self._body = header, None
            device = host_memory.locked_by(piece.tensor for piece in ordered)
            self._body = self._thread.submit(host_memory.reserve, size, device)
        return self._body

    def copy(self, pieces: Iterable[Piece]) -> Future[tuple[bytes, memoryview]]:
        """Copies the pieces in the background; until it is done, they must not change.

        Returns header and body of the file, valid until the next call.
        """
        ordered = _in_file_order(pieces)
        body, header = self.reserve(ordered), self._header
        tensors = [piece.tensor for piece in ordered]
        computed = host_memory.computed(tensors)

        def copied() -> tuple[bytes, memoryview]:
            memory = body.result()  # reserved before, by the same thread
            host_memory.copy(tensors, memory, computed)
            return header, memory.numpy().data

        return self._thread.submit(copied)


def _in_file_order(pieces: Iterable[Piece]) -> list[Piece]:
    """Sorts pieces by element size, widest first: every piece is then aligned to its elements."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def _header(pieces: Sequence[Piece]) -> tuple[bytes, int]:
    """Returns the header of a file with these pieces in this order, and the size of its body."""
    entries: dict[str, object] = {}
    places = {}
    start = 0
    for piece in pieces:
        key, tensor = piece.name, piece.tensor
        if any(piece.offset):  # several pieces of a tensor may lie in one file
            key += "@" + ",".join(map(str, piece.offset))
        assert key not in entries, f"two pieces named {key}"
        assert tensor.dtype in _DTYPE_NAMES, f"{key}: checkpoints cannot hold {tensor.dtype}"
        stop = start + tensor.nbytes
        entries[key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        places[key] = {"name": piece.name, "shape": piece.shape, "offset": piece.offset}
        start = stop
    # The format allows only strings in the metadata, so ours is JSON inside JSON.
    entries["__metadata__"] = {"format": "pt", "pieces": json.dumps(places)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, start


def read_files(paths: Iterable[Location]) -> StoredTensors:
    """Opens the tensors in the files of all ranks; reads the headers only.

    Raises:
        CheckpointError: a file cannot be read.
    """
    tensors: dict[str, list[StoredPiece]] = {}
    with _no_garbage_collection(), ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        for pieces in pool.map(lambda path: list(Header.read(path).pieces()), paths):
            for piece in pieces:
                tensors.setdefault(piece.name, []).append(piece)
    return StoredTensors(tensors)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Runs a block that makes many objects which stay.

    Looking for garbage among the pieces of 1,024 ranks would take two thirds of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        content: reads bytes of the file.
        body: where the tensors' bytes begin.
        entries: key -> dtype, shape and place of the piece.
        places: key -> name, shape and offset: the piece's place in its tensor.
    """

    content: Elements
    body: int
    entries: dict[str, Entry]
    places: dict[str, Place]

    @classmethod
    def read(cls, path: Location) -> Header:
        # Eight bytes of length, the JSON header, then the tensors' bytes.
        content = files.open_bytes(path)
        try:
            body, entries, places = read_header(content, _DTYPES)
        except JsonError as error:
            raise CheckpointError(
                f"{path} is damaged: in its header, {error}. Check the disk, and use another step"
            ) from error
        return cls(content, body, entries, places)

    def describe(self) -> dict[str, str]:
        """Dtype and shape of the tensors with pieces in this file, by name."""
        return {
            place["name"]: _describe(_DTYPES[self.entries[key]["dtype"]], place["shape"])
            for key, place in self.places.items()
        }

    def pieces(self, names: Collection[str] | None = None) -> Iterator[StoredPiece]:
        """Yields the pieces; with `names`, only the pieces of these tensors."""
        for key, place in self.places.items():
            if names is not None and place["name"] not in names:
                continue
            entry = self.entries[key]
            dtype = _DTYPES[entry["dtype"]]
            begin = self.body + entry["data_offsets"][0]
            shape, offset, lengths = map(tuple, (place["shape"], place["offset"], entry["shape"]))
            elements = partial(_elements, self.content, begin, dtype)
            yield StoredPiece(place["name"], shape, offset, lengths, dtype, elements)


def _elements(content: Elements, begin: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    found = content(begin + start * dtype.itemsize, begin + stop * dtype.itemsize)
    if len(found) != (stop - start) * dtype.itemsize:
        raise CheckpointError("a file of tensors ends too early. Use another step")
    return found.view(dtype)


def fill(wanted: Sequence[Piece], stored: Mapping[str, Sequence[StoredPiece]]) -> None:
    """Fills the wanted pieces from the stored pieces of the same tensors, and reads little else.

    Raises:
        CheckpointError: the stored pieces do not cover a wanted one, or a file cannot be read.
    """
    for number, copied in copy_overlaps(dict(enumerate(wanted)), stored).items():
        # Stored pieces never overlap, so the count is right only if every element was copied.
        if copied != wanted[number].tensor.numel():
            raise incomplete(wanted[number], copied)


def incomplete(target: Piece, copied: int) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {copied} of the {target.tensor.numel()} elements of {target.name} "
        "that this process needs. It is incomplete: restore another step"
    )


def copy_overlaps(
    wanted: Mapping[int, Piece], stored: Mapping[str, Sequence[StoredPiece]]
) -> dict[int, int]:
    """Copies to wanted pieces what stored ones have of them; returns numbers of elements."""

    def copy(target: Piece) -> int:
        return sum(_copy_overlap(source, target) for source in stored[target.name])

    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        return dict(zip(wanted, pool.map(copy, wanted.values()), strict=True))


@torch.no_grad()
def _copy_overlap(source: StoredPiece, target: Piece) -> int:
    """Copies the elements that two pieces of a tensor share. Returns their number.

    In the example above, reader 1 wants rows [2, 4) of `w` and rank 0 stored rows [0, 3). Their
    overlap is row 2: `from_source` is [2:3, 0:2] and `to_target` is [0:1, 0:2].
    """
    from_source, to_target = [], []
    lengths = target.tensor.shape
    for source_start, source_length, target_start, target_length in zip(
        source.offset, source.lengths, target.offset, lengths, strict=True
    ):
        start = max(source_start, target_start)
        stop = min(source_start + source_length, target_start + target_length)
        if stop <= start:
            return 0
        from_source.append(slice(start - source_start, stop - source_start))
        to_target.append(slice(start - target_start, stop - target_start))
    # Whole rows are read, as they are contiguous in the file; a scalar is a row of one element.
    rows, *rest = from_source or [slice(0, 1)]
    row = math.prod(source.lengths[1:])
    block = source.elements(rows.start * row, rows.stop * row).view(-1, *source.lengths[1:])
    place = target.tensor[tuple(to_target)]
    place.copy_(block[(slice(None), *rest)].reshape(place.shape))
    return place.numel()


class StoredTensors(Mapping[str, Tensor]):
    """Tensors that are read on access, whole or in part; nothing is cached.

    Attributes:
        pieces: of each tensor.
    """

    def __init__(self, pieces: Mapping[str, Sequence[StoredPiece]]) -> None:
        self.pieces = pieces

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], make: Callable[[Tensor], Tensor] = Tensor.detach
    ) -> StoredTensors:
        """Wraps whole tensors; `make` is applied to a tensor whenever it is read."""
        pieces = {}
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            start = (0,) * len(shape)
            elements = partial(_make_elements, make, tensor)
            pieces[name] = [StoredPiece(name, shape, start, shape, tensor.dtype, elements)]
        return cls(pieces)

    def with_added(self, added: Mapping[str, str]) -> StoredTensors:
        """Returns the same tensors, with others of equal shape added to some: name -> other."""
        pieces = dict(self.pieces)
        for name, other in added.items():
            first = self.pieces[name][0]
            start = (0,) * len(first.shape)
            elements = partial(_add_elements, self, (name, other))
            pieces[name] = [replace(first, offset=start, lengths=first.shape, elements=elements)]
        return StoredTensors(pieces)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.elements(name, 0, math.prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor; reads no elements."""
        return self.pieces[name][0].shape

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Reads elements [start, stop) of a flattened tensor; at most the rows that contain them.

        Raises:
            CheckpointError: some of them are not stored.
        """
        first = self.pieces[name][0]
        # Stored whole by one rank: no other piece is needed.
        if first.lengths == first.shape:
            return first.elements(start, stop)
        # Rows [begin, end) are the smallest rectangle with all of these elements.
        row = max(1, math.prod(first.shape[1:]))
        begin, end = start // row, -(-stop // row)
        rows = torch.empty(end - begin, *first.shape[1:], dtype=first.dtype)
        fill([Piece(name, first.shape, (begin, *[0] * (rows.ndim - 1)), rows)], self.pieces)
        return rows.flatten()[start - begin * row : stop - begin * row]


def _add_elements(tensors: StoredTensors, names: tuple[str, str], start: int, stop: int) -> Tensor:
    first, second = (tensors.elements(name, start, stop) for name in names)
    return first + second


def _make_elements(
    make: Callable[[Tensor], Tensor], tensor: Tensor, start: int, stop: int
) -> Tensor:
    return make(tensor).flatten()[start:stop]


def describe(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns dtype and shape of each tensor, as `StoredFiles.describe` does."""
    return {name: _describe(each.dtype, whole_shape(each)) for name, each in tensors.items()}


def check_same_tensors(
    wanted: Mapping[str, Tensor], stored: Mapping[str, Sequence[StoredPiece]], where: Location
) -> None:
    """Rejects a checkpoint whose tensors differ from the wanted ones in name, shape or dtype.

    Raises:
        CheckpointError: with the first few names of each difference.
    """
    theirs = {name: _describe(pieces[0].dtype, pieces[0].shape) for name, pieces in stored.items()}
    check_same(describe(wanted), theirs, where)


def check_same(ours: Mapping[str, str], theirs: Mapping[str, str], where: Location) -> None:
    differences = {
        "missing in it": sorted(ours.keys() - theirs.keys()),
        "unknown to this run": sorted(theirs.keys() - ours.keys()),
        "different": [
            f"{name} ({theirs[name]} in it, {ours[name]} in this run)"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ],
    }
    found = []
    for what, names in differences.items():
        if names:
            more = " and others" if len(names) > _NAMES_SHOWN else ""
            found.append(f"{len(names)} {what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
    if found:
        raise CheckpointError(
            f"{where} is a checkpoint of another model or optimizer. Tensors {'; '.join(found)}. "
            "Use the configuration that it was saved with (in its meta.json), or start in another "
            "output folder"
        )


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
