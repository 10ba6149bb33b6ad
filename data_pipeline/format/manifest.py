"""The manifest of a dataset: its shards, their contents and their sources.

A build writes it last, so a folder with a manifest is a finished dataset.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from samestep.config import Tree
from samestep.errors import DataError
from samestep.storage import Digest, write_text
from samestep.stored_json import Count, JsonError, Matching, Sha256, checked, parse_json
from samestep.tasks import TASKS, TaskKind
from samestep.untrusted import is_plain, open_regular, read_regular

SPLIT_UP = "split the text into several (source.document=paragraph for plain text)"
"""What to do with a corpus of one document, of which none can be held out."""

FORMAT = 1
MANIFEST = "manifest.json"
MOST_BYTES = 2**30  # of a manifest, with some millions of shards

_SMALL_FILE = re.compile(r"(tokenizer/)?\w[\w.-]*", re.ASCII)
_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
PASSAGES = "passages"
"""Name among the splits of the shards of passages, which rows of retrieval number through."""
_SPLITS = {"train", "heldout", PASSAGES}


@dataclass(frozen=True)
class ShardInfo:
    """One tar file: its name in the folder, its size and its SHA-256."""

    name: str
    documents: Count
    tokens: Count
    bytes: Count
    sha256: Sha256

    @property
    def digest(self) -> Digest:
        """The size and the SHA-256 alone."""
        return Digest(self.sha256, self.bytes)


@dataclass(frozen=True)
class TaskLabels:
    """Labels of the rows of a task.

    Attributes:
        kind: of the task.
        labels: names of classes or tags, or the name of a regression's number; empty for multiple
            choice and question answering.
    """

    kind: TaskKind
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a dataset folder.

    Attributes:
        format: version of the layout of the folder.
        tokenizer_fingerprint: `Tokenizer.fingerprint` of the tokenizer that was used.
        vocab_size: number of ids of that tokenizer; every token is below it.
        dtype: of the tokens in the shards, "uint16" or "uint32".
        source: the resolved source section of the build's configuration.
        files: the source files; the first column of a shard's `origin` indexes it.
        documents_in: records read. For all kinds but retrieval, the sum of the documents in all
            shards and of `documents_rejected`.
        documents_rejected: reason, without the values of records -> number of records.
        splits: "train" and "heldout" -> shards, in order; and "passages" of retrieval, each passage
            a document, numbered from 0 through all shards.
        settings: the other settings of the build that shape the shards.
        duplicates: number of documents with the text of an earlier one; None: not counted.
        small_files: all other files of the folder by name, such as tokenizer/tokenizer.json, but
            for the cache; None: an earlier version has built it and did not hash them.
        scored: whether a teacher has scored the passages of retrieval.
    """

    format: int
    tokenizer_fingerprint: str
    vocab_size: Count
    dtype: Annotated[str, Matching("uint16|uint32")]
    source: Tree
    files: tuple[str, ...]
    documents_in: Count
    documents_rejected: dict[str, Count]
    splits: dict[str, tuple[ShardInfo, ...]]
    settings: Tree = field(default_factory=dict)
    duplicates: Count | None = None
    small_files: dict[str, Digest] | None = None
    scored: bool = False

    # Cached: every shard of an open dataset asks for it, and it covers all shards.
    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of tokenizer, dtype and the checksums of all shards, in order."""
        shards = {
            split: [shard.sha256 for shard in shards] for split, shards in self.splits.items()
        }
        # What decides the tokens: names of shards, sources and settings may differ.
        content = [self.format, self.tokenizer_fingerprint, self.dtype, shards]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def token_dtype(self) -> np.dtype[np.unsignedinteger]:
        """`dtype` as a numpy dtype."""
        return np.dtype(self.dtype)

    @property
    def has_sentences(self) -> bool:
        """Whether the shards hold sentence boundaries."""
        return "sentences" in self.settings

    @property
    def target_file(self) -> int | None:
        """For pairs of texts in two files, the distance in `files` from source to target file."""
        return self.settings.get("target_file")

    @property
    def task(self) -> TaskLabels | None:
        """The labels, if the documents are rows of a task."""
        stored = self.settings.get("task")
        return None if stored is None else TaskLabels(stored["target"], tuple(stored["labels"]))

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """The shards of all splits."""
        return tuple(shard for split in sorted(self.splits) for shard in self.splits[split])

    def save(self, folder: Path) -> None:
        """Writes `manifest.json` atomically; equal manifests have equal bytes."""
        tree = dataclasses.asdict(self)
        # The bytes of older manifests never change.
        if self.small_files is None:
            del tree["small_files"]
        if not self.scored:
            del tree["scored"]
        tree["checksum"] = _checksum(tree)
        write_text(folder / MANIFEST, json.dumps(tree, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Reads the manifest of a finished dataset.

        Raises:
            DataError: the manifest is missing, damaged or of another version.
        """
        path = folder / MANIFEST
        try:
            content = read_regular(path)
        except FileNotFoundError:
            if not folder.exists():
                raise DataError(
                    f"{folder} holds no finished dataset: there is no folder {folder.absolute()}. "
                    f"Correct data.path, or build it with: samestep data build CONFIG "
                    f"output={folder}"
                ) from None
            raise DataError(
                f"{folder} holds no finished dataset (no {MANIFEST}). Finish it with: samestep "
                f"data build CONFIG output={folder}"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}. Build the dataset again.") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, path: str) -> Manifest:
        """Reads a manifest from the bytes of the file `path`.

        Raises:
            DataError: the manifest is damaged or of another version.
        """
        try:
            tree = parse_json(content, dict[str, Any], MOST_BYTES)
        except JsonError as error:
            raise DataError(f"cannot read {path}: {error}. Build the dataset again.") from error
        version = tree.get("format")
        if version != FORMAT:
            raise DataError(
                f"{path} has format {version!r}, but this program reads format {FORMAT}. Build the "
                "dataset again."
            )
        # Manifests of older builds have none.
        if tree.pop("checksum", None) not in (None, _checksum(tree)):
            raise DataError(
                f"{path} was changed after the build: its checksum is of another content. Restore "
                "it, or build the dataset again."
            )
        try:
            # Before the types: a key of a newer version says more than a value would.
            if unknown := tree.keys() - {each.name for each in dataclasses.fields(cls)}:
                raise ValueError(f"{min(unknown)!r} is no part of it")
            manifest = checked(tree, cls)
            _check(manifest)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}). Build the dataset again.") from error
        return manifest

    def check_tokenizer(self, folder: Path) -> None:
        """Compares the files of the tokenizer with their hashes.

        Args:
            folder: of the dataset.

        Raises:
            DataError: one is missing or has changed.
        """
        for name, digest in (self.small_files or {}).items():
            if not name.startswith("tokenizer/"):
                continue
            path = folder / name
            try:
                with open_regular(path) as file:
                    is_same = Digest.of(file) == digest
            except OSError as error:
                raise DataError(f"cannot read {path}: {error}. Copy it again.") from error
            if not is_same:
                raise DataError(
                    f"{path} has changed since the build (SHA-256 differs). Restore it, or build "
                    "the dataset again."
                )


def _checksum(tree: Tree) -> str:
    """Hex SHA-256 of the content of a manifest."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _check(manifest: Manifest) -> None:
    """Validates names: one from a stranger's address, such as ../../x, must not leave the cache.

    Raises:
        ValueError: naming an entry that no build would write.
    """
    if unknown := manifest.splits.keys() - _SPLITS:
        raise ValueError(f"the split {min(unknown)!r} is unknown")
    if (task := manifest.settings.get("task")) is not None:
        labels = task["labels"] if task["target"] in TASKS else None
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError(f"settings.task is {task!r}")
    for name in manifest.small_files or {}:
        if not _SMALL_FILE.fullmatch(name):
            raise ValueError(f"small_files has {name!r}, which no build writes")
    for split, shards in manifest.splits.items():
        for index, shard in enumerate(shards):
            if not (is_plain(shard.name) and _PLAIN_NAME.fullmatch(shard.name)):
                raise ValueError(
                    f"splits.{split}[{index}].name is {shard.name!r}, not the plain name of a file"
                )


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest dtype that holds every token id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
