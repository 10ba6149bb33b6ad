"""Raw text in WebDataset tar files: one document per sample, found by the `webdataset` library.

The library expands lists of shards, runs `pipe:` commands, splits names into key and suffix, groups
members into samples, and passes the errors of a sample to a handler. Three steps are not left to
it. Addresses are opened by `samestep.storage`: the library starts curl or gsutil, knows no `s3://`,
and does not resume. Members are read here: its loop reads sparse members whole, decompresses
without a bound, and takes a damaged header for the end of the tar. Text is decoded here: workers
would import torch with it, and its decoders unpickle.
"""

from __future__ import annotations

import io
import math
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self, TypeAlias

from data_pipeline.sources import UTF8, BadRecord, Problem, Record, decode_utf8
from data_pipeline.sources.encodings import named, normalized, recoded
from data_pipeline.sources.files import (
    DAMAGE,
    check_expansion,
    compression_of,
    damage,
    decompressed,
    find,
    open_file,
    read_records,
    uncompressed,
)
from data_pipeline.sources.kinds import jsonl
from samestep import storage
from samestep.errors import ConfigError, DataError

ALLOW_PIPE = "SAMESTEP_ALLOW_PIPE"
"""Environment variable that allows commands as paths. No setting: a recipe may be a stranger's."""

Keys: TypeAlias = Callable[[str], tuple[str | None, str | None]]
"""Splits the name of a member into key and suffix; None if it belongs to no sample."""

_PIPE = "pipe:"
_PICKLES = ("pickle", "pkl", "pth", "pyd")
_LIST = re.compile(r"\{|(?<!\[)::")  # in an address, [:: begins IPv6
_RANGE = re.compile(r"\{(\d{1,18})\.\.(\d{1,18})\}")
_MOST_SHARDS = 1_000_000
_META = re.compile(r"__[^/]*__($|/)")
"""Members that WebDataset keeps for itself."""
_RESERVED = re.compile(r"__.*__")
"""Suffixes by which the library marks a sample: it would drop one that has such a member."""
_HIDDEN = re.compile(r"(^|/)\.[^/]*$")
"""Hidden files, as those that macOS adds."""
_MOST_NAME = 4096  # characters; the library's time grows with their square
_READ_BYTES = 2**16


@dataclass(frozen=True)
class Config:
    """Where the documents are.

    Attributes:
        paths: tar files, glob patterns or URLs, also as brace lists (`a-{000..099}.tar`);
            `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.xz` and `.tar.zst` are decompressed.
            `pipe:COMMAND` is the output of a shell command, if SAMESTEP_ALLOW_PIPE is 1 in the
            environment.
        member: suffix of the members that are documents, as WebDataset counts it: from the first
            dot of the name, in upper or lower case, so `text.json` for `a/0001.text.JSON`. With
            `*.` before it, keys may have dots: `*.txt` finds `v1.0001.txt`. Members may be
            compressed, as `0001.txt.gz`. Other members of a sample are skipped; a sample without
            such a document is rejected.
        field: key of the text if `member` ends in `json` or `jsn`; dots reach into nested objects.
        encoding: of the text, as Python names it: utf-8, cp1252, latin-1, utf-16 and others.
    """

    paths: tuple[str, ...]
    member: str = "txt"
    field: str = "text"
    encoding: str = UTF8

    def __post_init__(self) -> None:
        if uncompressed(self.member.lower()).rpartition(".")[2] in _PICKLES:
            raise ConfigError(
                f"member is {self.member!r}, a pickle, which can run any code and is never read. "
                "Store the text as txt or json."
            )

    def build(self) -> WebDataset:
        """Finds the files."""
        encoding = normalized(self.encoding)
        return WebDataset(_shards(self.paths), self.field, self.member, encoding=encoding)


def _shards(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Expands lists and patterns: the files, sorted, and then the commands.

    Raises:
        ConfigError: a list is malformed, a file is missing, or commands are not allowed.
    """
    shards = [shard for pattern in patterns for shard in _expanded(pattern)]
    commands = dict.fromkeys(shard for shard in shards if shard.startswith(_PIPE))
    if commands and os.environ.get(ALLOW_PIPE) != "1":
        raise ConfigError(
            f"source.paths has {storage.shown(next(iter(commands)))!r}, which a shell would run. "
            f"If you trust it, set {ALLOW_PIPE}=1 in the environment."
        )
    files = tuple(shard for shard in shards if shard not in commands)
    return (*(find(files) if files or not commands else ()), *commands)


def _expanded(pattern: str) -> list[str]:
    if "\0" in pattern:
        raise ConfigError(f"source.paths: {pattern!r} has a NUL. Remove it.")
    # The name of a file is no list, as in `find`.
    if not _LIST.search(pattern) or os.path.exists(os.path.expanduser(pattern)):
        return [pattern]
    counts = (abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(pattern))
    if math.prod(counts) > _MOST_SHARDS:  # the library would make them all
        raise ConfigError(
            f"source.paths: {storage.shown(pattern)!r} stands for more than {_MOST_SHARDS:,} files."
        )
    from webdataset.shardlists import expand_urls  # imports torch

    try:
        expanded: list[str] = expand_urls(pattern)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"source.paths: {storage.shown(pattern)!r} is no list of shards ({error}). Correct it."
        ) from None
    return expanded


def _open(path: str) -> tuple[BinaryIO, str]:
    """Opens a shard; see `files.OpenFile`. The output of a command is copied to a temporary file.

    A command may fail at its end. So it ends before the first record of its output is read.

    Raises:
        OSError, DataError: it cannot be read.
    """
    if not path.startswith(_PIPE):
        return open_file(path)
    from webdataset.gopen import gopen_pipe

    # Seekable, as a record's progress and its compression are found by seeking.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    pipe = None
    try:
        with gopen_pipe(path) as pipe:
            storage.copy(iter(lambda: pipe.read(storage.CHUNK_BYTES), b""), file)
    except (OSError, ValueError) as error:
        file.close()
        failed = pipe is not None and pipe.proc.returncode
        raise DataError(
            f"cannot read {storage.shown(path)}: "
            + (f"the command ended with {failed}" if failed else str(error))
            + ". Run it by hand to see why."
        ) from error
    file.seek(0)
    name = f"{_PIPE}{compression_of(file.read(10))}"
    file.seek(0)
    return file, name


@dataclass(frozen=True)
class WebDataset(jsonl.JsonLines):
    """Reads the member `member` of each sample; a record's line is its number in the tar."""

    member: str

    def records(self) -> Iterator[Record]:
        return read_records(self.files, self._documents, open_file=_open)

    def decode(self, data: bytes) -> str:
        is_json = self._suffix.endswith(("json", "jsn"))
        return super().decode(data) if is_json else decode_utf8(data)

    @property
    def _suffix(self) -> str:
        """The suffix of documents in lower case, not compressed."""
        return uncompressed(self.member.lower().removeprefix("*."))

    def _documents(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        # Imported here: it imports torch, which takes seconds.
        from webdataset.tariterators import base_plus_ext, group_by_keys

        keys: Keys = self._split_at_last if self.member.startswith("*.") else base_plus_ext
        failures, repeated = list[Exception](), list[str]()
        name = ""

        def members() -> Iterator[dict[str, str | bytes]]:
            nonlocal name
            try:
                for name, content in _members(file, keys, self._suffix):
                    yield {"fname": name, "data": content, "__url__": ""}
            except Exception as error:
                # Raised below: the library would lose the sample that it has read before.
                failures.append(error)

        # Called while the library adds the member `name` to the sample that comes next.
        def handler(error: Exception) -> bool:
            repeated.append(name)
            return True

        number, stored, expanded = 0, 0, 0
        for sample in group_by_keys(members(), keys=keys, handler=handler):
            key, _ = sample.pop("__key__"), sample.pop("__url__")
            documents = [suffix for suffix in sample if isinstance(sample[suffix], bytes)]
            texts: list[bytes] = []
            if repeated:
                texts.append(Problem.of(f"a name twice in a sample: {repeated[0]}"))
                repeated.clear()
            elif len(documents) > 1:
                texts.append(Problem.of(f"several documents in a sample: {key}.{documents[1]}"))
            elif documents:
                content = sample[documents[0]]
                plain = _plain(content, f"{key}.{documents[0]}")
                texts.append(self._in_utf8(plain))
                stored, expanded = stored + len(content), expanded + len(plain)
                check_expansion(expanded, stored)
            elif not failures:  # else the damage may have cost the document
                texts += self._missing(list(sample.values()))
            yield from enumerate(texts, start=number + 1)
            number += len(texts)
        if failures:
            raise failures[0]

    def _split_at_last(self, name: str) -> tuple[str, str] | tuple[None, None]:
        """Splits a name before as many dots as `*.txt` has: "v1.0.txt.gz" before "txt.gz"."""
        dots = self._suffix.count(".") + 1
        key, *parts = uncompressed(name).rsplit(".", dots)
        is_sample = len(parts) == dots and key and "/" not in "".join(parts)
        return (key, name[len(key) + 1 :]) if is_sample else (None, None)

    def _missing(self, names: list[str]) -> Iterator[Problem]:
        """Yields a Problem for each document that a sample without any may hold."""
        # "v1.0001.txt" and "v1.0002.txt" have one key, "v1", and are two documents.
        texts = [name for name in names if uncompressed(name.lower()).endswith(f".{self._suffix}")]
        for name in texts or names[:1]:
            reason = f"no member {self._suffix!r} in a sample: {name}"
            if texts:
                reason += (
                    ". Its suffix begins at the first dot of the name: set source.member to "
                    f"'*.{self._suffix}'"
                )
            elif not name.endswith(" a link"):
                reason += ". If it is elsewhere in the tar, sort the tar by name"
            yield Problem.of(reason)

    def _in_utf8(self, content: bytes) -> bytes:
        if self.encoding == UTF8 or isinstance(content, Problem):
            return content
        try:
            return named(recoded(io.BytesIO(content), self.encoding).read(), self.encoding)
        except BadRecord as error:  # the next member may be valid
            return Problem.of(str(error))


def _members(file: BinaryIO, keys: Keys, document: str) -> Iterator[tuple[str, str | bytes]]:
    """Yields the names of a tar's members, with the bytes of documents, or the name again.

    Args:
        keys: splits a name.
        document: suffix of documents.

    Raises:
        EOFError, BadRecord: the tar is truncated, damaged or has a member that is refused.
    """
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined] # or it would remember all
                name = member.name
                if "\0" in name or len(name) > _MOST_NAME:
                    raise BadRecord(f"the name of a member is long or has a NUL: {name[:100]}")
                key, suffix = keys(name)
                # Without a dot, as README, a file belongs to no sample.
                if member.isdir() or _META.match(name) or not key or suffix is None:
                    continue
                if _RESERVED.fullmatch(suffix):
                    continue
                is_document = uncompressed(suffix.lower()) == document
                if _HIDDEN.search(name) and not (is_document and key.endswith("/")):
                    continue
                if not member.isreg():
                    yield name, f"{name}, which is a link"
                elif not is_document:  # not even read
                    yield name, name
                elif member.issparse():  # some bytes may declare terabytes of zeros
                    raise BadRecord("sparse member")
                else:
                    stream = tar.extractfile(member)
                    assert stream is not None, "it is a regular file"
                    yield name, stream.read()
            _check_end(tar)
    except tarfile.ReadError as error:
        raise EOFError from error  # the tar ends before its end mark


def _plain(content: bytes, name: str) -> bytes:
    """The content of a document, decompressed if its name says so."""
    if uncompressed(name) == name:
        return content
    try:
        return decompressed(content, name)
    except DAMAGE as error:
        return Problem.of(f"{damage(error)} in a tar: {name}")


class _Member(tarfile.TarInfo):
    """A member with an intact header; `tarfile` alone takes a damaged one for the end mark."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # the end mark
            raise
        except tarfile.InvalidHeaderError:  # type: ignore[attr-defined]
            raise BadRecord("corrupt file") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def _check_end(tar: tarfile.TarFile) -> None:
    """Checks that a tar ends with two blocks of zeros, of which one has been read.

    Raises:
        ReadError: the second one is cut off.
        BadRecord: data follow, so the zeros may have been the header of a member.
    """
    rest = tar.fileobj
    assert rest is not None, "it is open"
    block = rest.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("unexpected end of data")
    while block:
        if block.strip(b"\0"):
            raise BadRecord("corrupt file")
        block = rest.read(_READ_BYTES)
