"""Shards: WebDataset tar files of tokenised documents, memory-mapped and sliced when read.

A shard holds chunks of many whole documents. A chunk is one WebDataset sample of three arrays:

    000000.tokens.npy    uint16 or uint32 [T], the tokens of all its documents end to end
    000000.offsets.npy   int64 [d + 1], document i is tokens[offsets[i]:offsets[i + 1]]
    000000.origin.npy    uint32 [d, 2], (source file, line) of each document

With sentences, there is a fourth:

    000000.sentences.npy  uint32 [k], ascending; tokens[sentences[j]] starts a sentence

For rows of a task, "sentences" are their texts, and there are labels:

    000000.labels.npy         float32 [k], `trainer.examples.Labels.values` of all documents
    000000.label_offsets.npy  int64 [d + 1]; document i has labels label_offsets[i] to
                              label_offsets[i + 1]
    000000.rows.jsonl         held-out shards only: a JSON object for each row, in the same order

Tar members start at multiples of 512 bytes and .npy data at multiples of 64 behind that, so a whole
shard can be seen as one array of tokens in which every document is a plain slice. Members are
written with `tarfile` because importing webdataset imports torch, which each build worker would pay
for in seconds and memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import resource
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.format import row_lines
from data_pipeline.format.manifest import ShardInfo
from trainer.errors import CorruptError, DataError
from trainer.examples import TaskRow
from trainer.storage import atomic_write

# numpy parses headers as Python. In CPython 3.11.7, threads that do so at a time now and then fail
# with a SystemError, "AST constructor recursion depth mismatch", and a sound shard would pass for a
# damaged one.
_PARSER = threading.Lock()

Tokens: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

CHUNK_TOKENS = 2**20

_TYPES = {"offsets": "<i8", "labels": "<f4", "label_offsets": "<i8"}  # of members; of others <u4


def write_shard(
    path: Path,
    documents: Sequence[Tokens],
    origin: npt.NDArray[np.uint32],
    dtype: np.dtype[np.generic],
    sentences: Sequence[npt.NDArray[np.int64]] | None = None,
    labels: Sequence[npt.NDArray[np.float32]] | None = None,
    rows: Sequence[TaskRow] | None = None,
) -> ShardInfo:
    """Writes documents to a new shard, atomically.

    Its bytes depend on the arguments only, not on time or machine.

    Args:
        path: the shard's file.
        documents: D arrays of tokens.
        origin: [D, 2], the (source file, line) of each document.
        dtype: of the stored tokens.
        sentences: D arrays of the ascending offsets, within a document, of its sentences' first
            tokens; the first is 0.
        labels: of rows of a task, D arrays of what is to be predicted.
        rows: D rows of a task, to be kept for scores.

    Raises:
        DataError: the disk does not take it.
    """
    assert len(documents) == len(origin) > 0
    offsets = np.concatenate(
        ([0], np.cumsum([len(document) for document in documents], dtype=np.int64))
    )
    # Documents belong to the chunk in which they begin, so a chunk is as long as its last document
    # makes it.
    bounds = [*np.flatnonzero(np.diff(offsets[:-1] // CHUNK_TOKENS, prepend=-1)), len(documents)]
    with atomic_write(path) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for chunk, (first, end) in enumerate(itertools.pairwise(bounds)):
                tokens = np.concatenate(documents[first:end]).astype(dtype, copy=False)
                _add(tar, f"{chunk:06d}.tokens.npy", tokens)
                _add(tar, f"{chunk:06d}.offsets.npy", offsets[first : end + 1] - offsets[first])
                _add(
                    tar, f"{chunk:06d}.origin.npy", origin[first:end].astype(np.uint32, copy=False)
                )
                if sentences is not None:
                    begin = offsets[first:end] - offsets[first]
                    starts = [
                        at + starts for at, starts in zip(begin, sentences[first:end], strict=True)
                    ]
                    _add(
                        tar, f"{chunk:06d}.sentences.npy", np.concatenate(starts).astype(np.uint32)
                    )
                if labels is not None:
                    counts = [len(numbers) for numbers in labels[first:end]]
                    _add(
                        tar,
                        f"{chunk:06d}.labels.npy",
                        np.concatenate(labels[first:end]).astype(np.float32),
                    )
                    _add(
                        tar,
                        f"{chunk:06d}.label_offsets.npy",
                        np.cumsum([0, *counts], dtype=np.int64),
                    )
                if rows is not None:
                    _add_bytes(
                        tar,
                        f"{chunk:06d}.rows.jsonl",
                        b"".join(map(row_lines.dump, rows[first:end])),
                    )
        size = file.tell()
    return ShardInfo(path.name, len(documents), int(offsets[-1]), size, file_sha256(path))


def _add(tar: tarfile.TarFile, name: str, array: npt.NDArray[np.generic]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    _add_bytes(tar, name, buffer.getvalue())


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0, mode 644: the same bytes everywhere
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The documents of a shard without their tokens, to read which takes about a hundredth of it.

    Attributes:
        start: int64 [D], the place of each document's first token in the file, counted in tokens.
        length: int64 [D], tokens of each document.
        origin: uint32 [D, 2], the (source file, line) of each document.
        sentences: int64 [K], where sentences begin, counted in tokens through all documents; empty
            unless asked for.
        labels: float32 [K], what is to be predicted of all documents, where they are rows of a
            task.
        label_start: int64 [D + 1]; document i has `labels[label_start[i] : label_start[i + 1]]`.
            Empty unless asked for, like `labels`.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    origin: npt.NDArray[np.uint32]
    sentences: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    label_start: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @classmethod
    def read(
        cls,
        file: BinaryIO,
        name: str,
        dtype: npt.DTypeLike,
        sentences: bool = False,
        labels: bool = False,
    ) -> ShardIndex:
        """Reads the index of an open shard whose tokens are of type `dtype`, going through it once.

        Args:
            file: the shard; seekable.
            name: where it is, for messages.
            dtype: of its tokens.
            sentences: whether to read where sentences begin, too.
            labels: whether to read what is to be predicted, too.

        Raises:
            DataError: it is cut short, damaged or of another type.
        """
        with _failure_explained(name):
            columns = zip(*_read_chunks(file, np.dtype(dtype), sentences, labels), strict=True)
            *index, all_labels, counts = (np.concatenate(parts) for parts in columns)
            start, length, origin, texts = index
            label_start = np.concatenate(([0], np.cumsum(counts))) if labels else counts
            return cls(start, length, origin, texts, all_labels, label_start)


@dataclass(frozen=True, eq=False)
class Shard(ShardIndex):
    """A shard opened for reading; nothing but its index is read before tokens are used.

    Attributes:
        tokens: 1-D memory map of the whole file as tokens; document i is `tokens[start[i] :
            start[i] + length[i]]`.
    """

    tokens: Tokens = field(kw_only=True)

    @classmethod
    def open(
        cls,
        path: Path,
        dtype: npt.DTypeLike,
        sentences: bool = False,
        sha256: str | None = None,
        labels: bool = False,
    ) -> Shard:
        """Maps a shard whose tokens are of type `dtype`, with or without its `sentences` and
        `labels`.

        With a `sha256`, which its bytes must have, it is read through before: a CPU does 0.3 to 2
            GB a second.

        Raises:
            CorruptError: it is cut short, damaged or of another type.
            DataError: it is missing, or cannot be read, or the process has too many files open.
        """
        with open_file(path, sha256) as file:
            return cls.map(file, str(path), dtype, sentences, labels)

    @classmethod
    def map(
        cls,
        file: BinaryIO,
        name: str,
        dtype: npt.DTypeLike,
        sentences: bool = False,
        labels: bool = False,
    ) -> Shard:
        """Maps an open shard; the map shares the file's locks and keeps them when the file is
        closed.
        """
        index = ShardIndex.read(file, name, dtype, sentences, labels)
        with _failure_explained(name):
            return cls(**vars(index), tokens=np.memmap(file, np.dtype(dtype), mode="r"))


@contextmanager
def open_file(path: Path, sha256: str | None = None) -> Iterator[BinaryIO]:
    """Opens the file of a shard; with a `sha256`, which its bytes must have, it is read through
    before.

    Raises:
        CorruptError: its bytes are others.
        DataError: it is missing, or cannot be read.
    """
    with _failure_explained(str(path)), path.open("rb") as file:
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError("its SHA-256 is not the one in the manifest")
        yield file


def read_rows(file: BinaryIO, name: str, documents: int) -> list[TaskRow]:
    """The rows that an open held-out shard of a task keeps, one for each of its documents.

    Args:
        file: the shard; seekable.
        name: where it is, for messages.
        documents: how many it has.

    Raises:
        DataError: it is damaged, or has none.
    """
    with _failure_explained(name):
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            members = [
                _open_member(tar, member) for member in tar if member.name.endswith(".rows.jsonl")
            ]
            rows = [row_lines.load(line) for member in members for line in member]
        if len(rows) != documents:
            raise ValueError(f"it keeps {len(rows)} rows of {documents}")
        return rows


@contextmanager
def _failure_explained(name: str) -> Iterator[None]:
    """Says in a user's words why the shard `name` cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"the shard {name} is missing; copy it back or build the dataset again"
        ) from None
    except (OSError, ValueError, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise DataError(
                f"cannot open the shard {name}: too many files are open (this process may open "
                f"{limit}); raise the "
                f"limit with ulimit -n, or start a run with smaller data.lanes or data.window"
            ) from error
        explained = DataError if isinstance(error, OSError) else CorruptError
        raise explained(
            f"the shard {name} is cut short or damaged ({error}); copy it again, or build the "
            "dataset again, and "
            f"check the rest with: samestep data verify {name.rpartition('/')[0]}"
        ) from error


def _read_chunks(
    file: BinaryIO, dtype: np.dtype[np.generic], with_sentences: bool, with_labels: bool
) -> Iterator[tuple[npt.NDArray[np.generic], ...]]:
    """Yields the columns of a `ShardIndex` for each chunk.

    Raises ValueError for what is no shard.
    """
    # A tar ends with two blocks of zeros: without them the file was cut short, perhaps between two
    # members.
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 2 * tarfile.BLOCKSIZE))
    if size == 0 or size % tarfile.BLOCKSIZE or any(file.read()):
        raise ValueError("the end of the archive is missing")
    file.seek(0)
    names = ["tokens", "offsets", "origin"]
    names += ["sentences"] * with_sentences + ["labels", "label_offsets"] * with_labels
    before = None  # tokens of the chunks before
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for key, chunk in itertools.groupby(tar, lambda member: member.name.partition(".")[0]):
            parts: dict[str, Any] = {}
            for (
                member
            ) in chunk:  # read as it is met, since going back in a remote file would cost a request
                name = member.name.removeprefix(f"{key}.").removesuffix(".npy")
                if name == "tokens":
                    parts[name] = _locate(tar, member, dtype)
                elif name in names:
                    parts[name] = _load(tar, member, np.dtype(_TYPES.get(name, "<u4")))
            if missing := [name for name in names if name not in parts]:
                raise ValueError(f"no member {key}.{missing[0]}.npy")
            start, count = parts["tokens"]
            offsets, origin = parts["offsets"], parts["origin"].reshape(-1, 2)
            length = np.diff(offsets)
            if (
                len(offsets) != len(origin) + 1
                or length.min(initial=0) < 0
                or (offsets[0], offsets[-1]) != (0, count)
            ):
                raise ValueError(f"the arrays of chunk {key} do not fit together")
            sentences = np.empty(0, dtype=np.int64)
            if with_sentences:
                sentences = parts["sentences"].astype(np.int64)
                documents = offsets[:-1][length > 0]
                if (np.diff(sentences, append=count) < 1).any() or not np.isin(
                    documents, sentences
                ).all():
                    raise ValueError(f"the sentences of chunk {key} do not fit its documents")
            labels, label_counts = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
            if with_labels:
                labels, bounds = parts["labels"], parts["label_offsets"]
                label_counts = np.diff(bounds)
                sound = len(bounds) == len(offsets) and (bounds[0], bounds[-1]) == (0, len(labels))
                if not sound or label_counts.min(initial=0) < 0 or not np.isfinite(labels).all():
                    raise ValueError(f"the labels of chunk {key} do not fit its documents")
            before = before or 0
            yield start + offsets[:-1], length, origin, before + sentences, labels, label_counts
            before += count
    if before is None:
        raise ValueError("the archive is empty")


def _open_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = tar.extractfile(member)
    if stream is None:
        raise ValueError(f"{member.name} is no file")
    return stream


def _open_npy(
    tar: tarfile.TarFile, member: tarfile.TarInfo, dtype: np.dtype[np.generic]
) -> IO[bytes]:
    """Opens a .npy member and reads up to its data."""
    stream = _open_member(tar, member)
    try:
        np.lib.format.read_magic(stream)
        with _PARSER:
            _, fortran_order, found = np.lib.format.read_array_header_1_0(stream)
    except (
        Exception
    ) as error:  # numpy parses the header as Python: damage raises anything from its tokenizer up
        raise ValueError(f"{member.name} has no readable header") from error
    if fortran_order or found != dtype:
        raise ValueError(f"{member.name} holds {found}, not {dtype}")
    return stream


def _load(
    tar: tarfile.TarFile, member: tarfile.TarInfo, dtype: np.dtype[np.generic]
) -> npt.NDArray[np.generic]:
    return np.frombuffer(_open_npy(tar, member, dtype).read(), dtype)


def _locate(
    tar: tarfile.TarFile, member: tarfile.TarInfo, dtype: np.dtype[np.generic]
) -> tuple[int, int]:
    """Where a member's data begin in the file, and how many they are, both in units of `dtype`."""
    header = _open_npy(tar, member, dtype).tell()
    return (member.offset_data + header) // dtype.itemsize, (member.size - header) // dtype.itemsize
