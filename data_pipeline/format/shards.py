"""Shards: WebDataset tar files of tokenized documents, memory-mapped and sliced when read.

A shard holds chunks of many whole documents. A chunk is one WebDataset sample of three arrays:

    000000.tokens.npy    uint16 or uint32 [T], the tokens of all its documents end to end
    000000.offsets.npy   int64 [d + 1], document i is tokens[offsets[i]:offsets[i + 1]]
    000000.origin.npy    uint32 [d, 2], (source file, line) of each document

A dataset with sentence boundaries has a fourth:

    000000.sentences.npy  uint32 [k], ascending; tokens[sentences[j]] starts a sentence

A dataset of a task stores the boundaries of a row's texts as "sentences", and labels:

    000000.labels.npy         float32 [k], `samestep.examples.Labels.values` of all documents
    000000.label_offsets.npy  int64 [d + 1]; document i has the labels
                              labels[label_offsets[i]:label_offsets[i + 1]]
    000000.rows.jsonl         held-out shards only: a JSON object for each row, in the same order

A dataset of retrieval stores the query alone as a row's text, a teacher's scores as its labels, if
there are any, and

    000000.passages.npy         uint32 [k], numbers of the passages of all documents
    000000.passage_offsets.npy  int64 [2 d + 1]; document i has the positives
                                passages[passage_offsets[2 i]:passage_offsets[2 i + 1]], and the
                                negatives from there to passage_offsets[2 i + 2]

Its passages are the documents of further shards, numbered from 0 through all of them.

Tar members start at multiples of 512 bytes, and the data of a .npy file start at a multiple of 64
bytes after that. Both are multiples of a token's size, so the whole file can be mapped as one array
of tokens in which every document is a slice. Members are written with `tarfile`: importing
webdataset imports torch, which would cost each build worker seconds and memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from samestep.environment import open_files
from samestep.errors import CorruptError, DataError
from samestep.untrusted import open_regular

# numpy parses headers as Python code. In CPython 3.11.7, threads that do so at the same time
# sometimes fail with SystemError ("AST constructor recursion depth mismatch"), and a good shard
# would be reported as damaged.
_PARSER = threading.Lock()

Tokens: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

# Types of the members that are not "<u4".
_TYPES = {"offsets": "<i8", "labels": "<f4", "label_offsets": "<i8", "passage_offsets": "<i8"}


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the documents of a shard are; about a hundredth of its bytes.

    Attributes:
        start: int64 [D], the index of each document's first token in the mapped file.
        length: int64 [D], number of tokens of each document.
        origin: uint32 [D, 2], the (source file, line) of each document.
        sentences: int64 [K], starts of sentences, in tokens counted over all documents; empty
            unless requested.
        labels: float32 [K], the labels of all documents of a task; empty unless requested.
        label_start: int64 [D + 1]; document i has `labels[label_start[i] : label_start[i + 1]]`.
            Empty unless labels are requested.
        passages: uint32 [P], numbers of the passages of all documents of retrieval; read with
            labels, and empty for other kinds.
        passage_start: int64 [2 D + 1]; document i has the positives
            `passages[passage_start[2 * i] : passage_start[2 * i + 1]]`, and then its negatives.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    origin: npt.NDArray[np.uint32]
    sentences: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    label_start: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    passages: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    passage_start: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )

    @classmethod
    def read(
        cls,
        file: BinaryIO,
        name: str,
        dtype: npt.DTypeLike,
        sentences: bool = False,
        labels: bool = False,
    ) -> ShardIndex:
        """Reads the index of an open shard, from its beginning to its end.

        Args:
            file: the shard; seekable.
            name: path or address of the shard, for messages.
            dtype: of its tokens.
            sentences: whether to read sentence boundaries.
            labels: whether to read labels.

        Raises:
            DataError: the shard is truncated, damaged or of another type.
        """
        with failure_explained(name):
            columns = zip(*_read_chunks(file, np.dtype(dtype), sentences, labels), strict=True)
            *index, all_labels, counts, passages, shares = (
                np.concatenate(parts) for parts in columns
            )
            start, length, origin, texts = index
            label_start = np.concatenate(([0], np.cumsum(counts))) if labels else counts
            passage_start = np.concatenate(([0], np.cumsum(shares))) if len(shares) else shares
            return cls(
                *(start, length, origin, texts),
                *(all_labels, label_start, passages, passage_start),
            )


@dataclass(frozen=True, eq=False)
class Shard(ShardIndex):
    """A shard opened for reading: its index, and its tokens as a memory map.

    Attributes:
        tokens: the whole file as tokens, 1-D; document i is
            `tokens[start[i] : start[i] + length[i]]`.
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
        """Maps a shard.

        Args:
            path: the shard's file.
            dtype: of its tokens.
            sentences: whether to read sentence boundaries.
            sha256: checked if given, which reads the whole file (0.3 to 2 GB per second).
            labels: whether to read labels.

        Raises:
            CorruptError: the shard is truncated, damaged or of another type.
            DataError: it is missing or unreadable, or the process has too many open files.
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
        """Maps an open shard; the map keeps the file's locks after the file is closed."""
        # Both read one open file: another one may have been renamed to the path meanwhile.
        index = ShardIndex.read(file, name, dtype, sentences, labels)
        with failure_explained(name):
            return cls(**vars(index), tokens=np.memmap(file, np.dtype(dtype), mode="r"))


def check_pairs(shard: ShardIndex, name: str) -> None:
    """Checks that each document of a shard is a pair of texts.

    Args:
        shard: with sentences.
        name: path or address of the shard, for messages.

    Raises:
        CorruptError: one is not; the SHA-256 in a stranger's manifest fits any content.
    """
    with failure_explained(name):
        # The document of each text: a pair has two texts, so each document must be there twice.
        document = np.searchsorted(np.cumsum(shard.length), shard.sentences, side="right")
        if not np.array_equal(document, np.repeat(np.arange(len(shard.length)), 2)):
            raise ValueError("a document is no pair of two texts")


def check_tokens(shard: Shard, name: str, vocab_size: int) -> None:
    """Checks that all tokens of a shard are in the vocabulary: on a GPU, others stop the process.

    Raises:
        CorruptError: one is not.
    """
    # The documents of a chunk follow each other in the file, so chunks are a few long slices.
    end = shard.start + shard.length
    bounds = [0, *np.flatnonzero(shard.start[1:] != end[:-1]) + 1, len(end)]
    with failure_explained(name):
        for first, behind in itertools.pairwise(bounds if len(end) else []):
            largest = shard.tokens[shard.start[first] : end[behind - 1]].max(initial=0)
            if largest >= vocab_size:
                raise ValueError(f"it has the token {largest} of a vocabulary of {vocab_size}")


@contextmanager
def open_file(path: Path, sha256: str | None = None) -> Iterator[BinaryIO]:
    """Opens the file of a shard; checks its SHA-256 first, if given.

    Raises:
        CorruptError: the SHA-256 differs.
        DataError: the file is missing or unreadable.
    """
    with failure_explained(str(path)), open_regular(path) as file:
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError("its SHA-256 is not the one in the manifest")
        yield file


@contextmanager
def failure_explained(name: str) -> Iterator[None]:
    """Turns errors from reading the shard `name` into messages that name the fix."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"the shard {name} is missing. Copy it back or build the dataset again."
        ) from None
    except (OSError, ValueError, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            limits = open_files(0)
            limit = "unknown" if limits is None else limits[0]
            raise DataError(
                f"cannot open the shard {name}: too many files are open (the limit of this process "
                f"is {limit}). Raise it with ulimit -n, or reduce data.lanes or data.window."
            ) from error
        explained = DataError if isinstance(error, OSError) else CorruptError
        raise explained(
            f"the shard {name} is truncated or damaged ({error}). Copy it again or build the "
            "dataset again, and check the other shards with: samestep data verify "
            f"{name.rpartition('/')[0]}"
        ) from error


def _read_chunks(
    file: BinaryIO, dtype: np.dtype[np.generic], with_sentences: bool, with_labels: bool
) -> Iterator[tuple[npt.NDArray[np.generic], ...]]:
    """Yields the columns of a `ShardIndex` for each chunk.

    Raises:
        ValueError: the file is not a shard.
    """
    # A tar ends with two blocks of zeros. Without them it was truncated, perhaps exactly between
    # two members, where `tarfile` would not notice.
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 2 * tarfile.BLOCKSIZE))
    if size == 0 or size % tarfile.BLOCKSIZE or any(file.read()):
        raise ValueError("the end of the archive is missing")
    file.seek(0)
    names = ["tokens", "offsets", "origin"]
    names += ["sentences"] * with_sentences + ["labels", "label_offsets"] * with_labels
    optional = ["passages", "passage_offsets"] * with_labels
    before = None  # number of tokens in the chunks so far
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for key, chunk in itertools.groupby(tar, lambda member: member.name.partition(".")[0]):
            parts: dict[str, Any] = {}
            # Members are read in the order of the file: seeking back in a remote file would cost a
            # request.
            for member in chunk:
                name = member.name.removeprefix(f"{key}.").removesuffix(".npy")
                if name == "tokens":
                    parts[name] = _locate(tar, member, dtype)
                elif name in names or name in optional:
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
                # A sentence begins where a document does, so sentences never cross documents.
                documents = offsets[:-1][length > 0]
                ascending = (np.diff(sentences, append=count) >= 1).all()
                if not ascending or not np.isin(documents, sentences).all():
                    raise ValueError(f"the sentences of chunk {key} do not fit its documents")
            labels, label_counts = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
            if with_labels:
                labels, bounds = parts["labels"], parts["label_offsets"]
                label_counts = np.diff(bounds)
                sound = len(bounds) == len(offsets) and (bounds[0], bounds[-1]) == (0, len(labels))
                if not sound or label_counts.min(initial=0) < 0 or not np.isfinite(labels).all():
                    raise ValueError(f"the labels of chunk {key} do not fit its documents")
            passages, shares = np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64)
            if optional and optional[0] in parts:
                passages, bounds = parts["passages"], parts.get("passage_offsets", shares)
                shares = np.diff(bounds)
                sound = len(bounds) == 2 * len(offsets) - 1
                sound = sound and (bounds[0], bounds[-1]) == (0, len(passages))
                if not sound or shares.min(initial=0) < 0:
                    raise ValueError(f"the passages of chunk {key} do not fit its documents")
            before = before or 0
            yield (
                *(start + offsets[:-1], length, origin, before + sentences),
                *(labels, label_counts, passages, shares),
            )
            before += count
    if before is None:
        raise ValueError("the archive is empty")


def open_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Opens a member of a shard.

    Raises:
        ValueError: it is no plain file.
    """
    # A sparse member of some bytes may declare terabytes of zeros.
    stream = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if stream is None:
        raise ValueError(f"{member.name} is no plain file")
    return stream


def _open_npy(
    tar: tarfile.TarFile, member: tarfile.TarInfo, dtype: np.dtype[np.generic]
) -> IO[bytes]:
    """Opens a .npy member and reads up to its data."""
    stream = open_member(tar, member)
    try:
        np.lib.format.read_magic(stream)
        with _PARSER:
            _, fortran_order, found = np.lib.format.read_array_header_1_0(stream)
    # numpy parses the header as Python code, so damage can raise errors of many types.
    except Exception as error:
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
    """Start of a member's data in the file, and their number, both in units of `dtype`."""
    # numpy pads headers to 64 bytes and tar to 512, so data begins at a whole token.
    header = _open_npy(tar, member, dtype).tell()
    return (member.offset_data + header) // dtype.itemsize, (member.size - header) // dtype.itemsize
