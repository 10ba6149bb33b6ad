"""`samestep data export`: writes a dataset as plain WebDataset, one sample for each document.

A shard appears under its name once it is complete. `export.partial.json` is written first and says
whose shards are there, so an export that was stopped can resume; `export.json` comes last.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import numpy as np

from data_pipeline.building.progress import Meter
from data_pipeline.format.manifest import Manifest, ShardInfo
from data_pipeline.format.shards import Shard
from data_pipeline.reading.dataset import Dataset
from data_pipeline.tokenizers.settings import SAVED_FILES
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep import storage
from samestep.errors import ConfigError, CorruptError, DataError, StorageError
from samestep.storage import flock, objects
from samestep.untrusted import inside, read_regular

logger = logging.getLogger(__name__)

RECORD, PARTIAL = "export.json", "export.partial.json"
LOSSY = (
    "txt is decoded from the tokens and is not the original text: case, white space and unknown "
    "characters may be lost"
)


def export(location: str, target: str) -> None:
    """Writes the documents of a dataset to `target`, or resumes that.

    Args:
        location: the dataset's folder or address.
        target: a folder, local or of an object store; empty, or with an export of this dataset.

    Raises:
        ConfigError: the target cannot be written, or another export is writing it.
        DataError: the dataset is unfinished or damaged, the target holds something else, or a
            transfer fails.
    """
    target = target.rstrip("/")
    if storage.is_url(target) and not storage.is_writable(target):
        raise ConfigError(
            f"{storage.shown(target)} cannot be written. Name a local folder, or one of an object "
            "store, such as s3://BUCKET/NAME."
        )
    dataset = Dataset.open(location)
    manifest, tokenizer = dataset.manifest, dataset.tokenizer
    if manifest.task is not None and manifest.task.kind == "retrieval":
        raise DataError(
            f"{dataset.name} has rows that name passages by numbers, and samples hold texts. "
            "Export another dataset."
        )
    record = _record(manifest)
    # Before anything is written: another export's shards would be mixed with these.
    present = _check_target(target, record)
    with ExitStack() as held:
        if not storage.is_url(target):
            held.enter_context(_alone(Path(target)))
        if RECORD not in present:
            _write(target, PARTIAL, methodcaller("write", record))
        for name in [f"tokenizer/{name}" for name in SAVED_FILES]:
            if (path := inside(dataset.path, name)).exists():
                _write(target, name, methodcaller("write", read_regular(path)))
        total = sum(shard.bytes for shard in manifest.shards)
        written = 0
        with Meter("exporting") as meter:
            for split, shards in manifest.splits.items():
                # Numbered anew, as a split may lack shards and a brace list has no gaps.
                for number, info in enumerate(shards):
                    name = f"{split}-{number:06d}"
                    is_new = f"{name}.tar" not in present
                    if is_new:
                        shard = _open(dataset, info)
                        fill = partial(_fill, shard, manifest, tokenizer, name)
                        _write(target, f"{name}.tar", fill)
                    meter.advance(info.bytes / total, info.bytes * is_new, info.documents)
                    written += is_new
        # In this order: without a record, nobody could say whose shards these are.
        _write(target, RECORD, methodcaller("write", record))
        _remove(target, PARTIAL)
    documents = sum(shard.documents for shard in manifest.shards)
    logger.info(
        f"exported {dataset.name} to {storage.shown(target)}: {documents:,} documents, {written} "
        f"shards written, {len(manifest.shards) - written} were there. {LOSSY}"
    )
    for split, shards in manifest.splits.items():
        if shards:
            logger.info(
                "%s", f"{storage.shown(target)}/{split}-{{000000..{len(shards) - 1:06d}}}.tar"
            )


def _record(manifest: Manifest) -> bytes:
    """The content of `export.json`, which is the same for each export of a dataset."""
    splits = {
        split: {"shards": len(shards), "documents": sum(shard.documents for shard in shards)}
        for split, shards in manifest.splits.items()
    }
    record: dict[str, object] = {
        "format": 1,
        "dataset": manifest.digest,
        "vocab_size": manifest.vocab_size,
        "sources": manifest.files,
        "splits": splits,
        "lossy": LOSSY,
    }
    if manifest.task is not None:
        record["task"] = {"kind": manifest.task.kind, "labels": manifest.task.labels}
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


def _check_target(target: str, record: bytes) -> set[str]:
    """Returns the names of the files that are at the target.

    Raises:
        DataError: they belong to something else than an export of this dataset.
    """
    try:
        is_new = not storage.is_url(target) and not os.path.lexists(target)
        listed = [] if is_new else _names(target)
        records = [_read(target, name) for name in listed if name in (RECORD, PARTIAL)]
    except OSError as error:
        raise DataError(
            f"{target} cannot be read: {error.strerror}. Export to another folder."
        ) from error
    # A lock, and files that a killed export has left, say nothing.
    if any(not name.startswith(".") for name in listed) and not records:
        raise DataError(
            f"{storage.shown(target)} is neither empty nor an export. Empty it, or export to "
            "another address."
        )
    if any(content != record for content in records):
        raise DataError(
            f"{storage.shown(target)} holds the export of another dataset. Empty it, or export to "
            "another address."
        )
    return set(listed)


def _parts(manifest: Manifest) -> str | None:
    """What the parts of a document are, if the shards store where they begin."""
    if manifest.task is not None or manifest.target_file is not None:
        return "texts"
    return "sentences" if manifest.has_sentences else None


def _open(dataset: Dataset, info: ShardInfo) -> Shard:
    """Opens a shard and compares all of it with the manifest.

    Raises:
        DataError: it is damaged or forged.
    """
    manifest = dataset.manifest
    shard = dataset.open_shard(info, _parts(manifest) is not None, True, manifest.task is not None)
    files = int(shard.origin[:, 0].max(initial=0)) + 1
    if files > len(manifest.files) or len(shard.length) != info.documents:
        raise CorruptError(
            f"{info.name} of {dataset.name} has {len(shard.length)} documents of {files} files, "
            f"and its manifest says {info.documents} of {len(manifest.files)}. Build it again"
        )
    return shard


def _fill(
    shard: Shard, manifest: Manifest, tokenizer: Tokenizer, name: str, file: BinaryIO
) -> None:
    """Writes a shard's documents as samples.

    Args:
        name: of the new shard; keys begin with it.
    """
    from webdataset import TarWriter  # imports torch

    # Without a fixed time, the bytes of a shard would differ each time.
    with TarWriter(file, mtime=0) as tar:
        for number, sample in enumerate(_samples(shard, manifest, tokenizer)):
            tar.write({"__key__": f"{name}-{number:07d}", **sample})
            tar.tarstream.members = []  # or it would remember all


def _samples(shard: Shard, manifest: Manifest, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """Yields the members of each document, by suffix."""
    kind, first = _parts(manifest), 0
    for number, length in enumerate(shard.length.tolist()):
        tokens = shard.tokens[shard.start[number] : shard.start[number] + length]
        file, line = shard.origin[number].tolist()
        # Where the document came from, as `samestep ledger step` names it.
        about: dict[str, object] = {"source": manifest.files[file], "line": line}
        texts = [tokens]
        if kind is not None:
            # Both count tokens from the begin of the shard.
            begin, end = np.searchsorted(shard.sentences, [first, first + length])
            starts = shard.sentences[begin:end] - first
            about[kind] = starts.tolist()
            if kind == "texts":
                texts = np.split(tokens, starts[1:])
        if manifest.task is not None:
            begin, end = shard.label_start[number : number + 2]
            about["labels"] = shard.labels[begin:end].tolist()
        first += length
        text = "\n".join(map(tokenizer.decode, texts))
        yield {"tokens.npy": np.asarray(tokens), "json": about, "txt": text}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks a local target, and removes what a killed export has left in it."""
    with ExitStack() as held:
        try:
            storage.make_folder(folder)
            lock = held.enter_context(flock.open_lock(folder / ".lock"))
            flock.lock_or_reject(lock, f"another export writes to {folder}. Wait until it ends.")
            for path in (*folder.glob(".*.tmp"), *folder.glob("tokenizer/.*.tmp")):
                if path.is_file():  # of somebody else, if it is a folder
                    path.unlink()
        except OSError as error:
            raise StorageError(
                f"cannot write to {folder}: {error.strerror}. Export to another folder."
            ) from error
        yield


def _names(target: str) -> list[str]:
    return objects.names(target) if storage.is_url(target) else os.listdir(target)


def _read(target: str, name: str) -> bytes:
    path = f"{target}/{name}"
    return objects.read(path) if storage.is_url(target) else read_regular(Path(path))


def _write(target: str, name: str, fill: Callable[[BinaryIO], object]) -> None:
    """Writes a file of the target, which appears once it is complete."""
    if not storage.is_url(target):
        with storage.atomic_write(Path(target, name)) as file:
            fill(file)
        return
    with TemporaryDirectory() as folder:
        with storage.atomic_write(Path(folder, "file")) as file:  # explains a full disk
            fill(file)
        objects.upload(Path(folder, "file"), f"{target}/{name}")


def _remove(target: str, name: str) -> None:
    if storage.is_url(target):
        objects.remove(f"{target}/{name}")
    else:
        Path(target, name).unlink(missing_ok=True)
