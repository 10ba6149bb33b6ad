"""`samestep data push`: copies a finished dataset to an object store.

The manifest is written last, under its own name: without it there is no dataset at the address. It
is written first as `manifest.partial.json`, which says for whom the shards there are, so that a
push that was stopped can go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from data_pipeline.building.progress import Meter
from data_pipeline.format.manifest import MANIFEST, Manifest, ShardInfo
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.remote import SENTENCEPIECE_MODEL, TOKENIZER_FILES
from trainer import storage
from trainer.errors import ConfigError, DataError, ObjectNotFoundError

logger = logging.getLogger(__name__)

PARTIAL_MANIFEST = "manifest.partial.json"

_TRANSFERS = 8  # at a time


def push(folder: Path, url: str, force: bool = False) -> None:
    """Copies a dataset to `url`, or goes on with that.

    Shards that are there already are not sent again.

    Args:
        folder: the dataset.
        url: the address of its copy.
        force: whether another dataset at the address may be replaced.

    Raises:
        ConfigError: nothing can be written at such an address.
        DataError: the dataset is unfinished or damaged, something else is at the address, or a
            transfer fails.
    """
    if not storage.is_url(url) or not storage.is_writable(url):
        raise ConfigError(
            f"nothing can be pushed to {storage.shown(url)}; name a folder of an object store, "
            "such as s3://BUCKET/NAME"
        )
    url = url.rstrip("/")
    dataset = Dataset.open(folder)
    manifest = dataset.manifest
    _free(url, manifest, force)
    storage.upload(folder / MANIFEST, f"{url}/{PARTIAL_MANIFEST}")
    for name in _small_files(folder):
        storage.upload(folder / name, f"{url}/{name}")
    sent = 0
    total = sum(shard.bytes for shard in manifest.shards)
    with Meter("pushing") as meter, ThreadPoolExecutor(_TRANSFERS) as threads:
        for shard, is_new in zip(
            manifest.shards, threads.map(partial(_send, folder, url), manifest.shards), strict=True
        ):
            meter.advance(shard.bytes / total, shard.bytes if is_new else 0, shard.documents)
            sent += is_new
    storage.upload(folder / MANIFEST, f"{url}/{MANIFEST}")
    storage.remove(f"{url}/{PARTIAL_MANIFEST}")
    kept = len(manifest.shards) - sent
    logger.info(
        "pushed %s: %d shards sent, %d were there; train on it with data.path=%s",
        folder,
        sent,
        kept,
        url,
    )


def _small_files(folder: Path) -> Iterator[str]:
    names = (f"tokenizer/{name}" for name in (*TOKENIZER_FILES, SENTENCEPIECE_MODEL))
    yield from (name for name in names if (folder / name).exists())
    yield from (f".cache/{file.name}" for file in sorted(folder.glob(".cache/*.counts")))
    if (folder / "rejected.jsonl").exists():
        yield "rejected.jsonl"


def _free(url: str, manifest: Manifest, force: bool) -> None:
    """Makes sure that what is at the address, if anything, is of the dataset.

    Raises:
        DataError: it is not, and is no other dataset that may be replaced.
    """
    found = [
        there for name in (MANIFEST, PARTIAL_MANIFEST) if (there := _manifest_at(f"{url}/{name}"))
    ]
    if not found and storage.names(url):
        raise DataError(f"{url} is neither empty nor a dataset; push to another address")
    others = [there for there in found if there.digest != manifest.digest]
    if others and not force:
        raise DataError(
            f"{url} holds another dataset; push to another address, or replace it with --force"
        )
    for other in others:
        with ThreadPoolExecutor(_TRANSFERS) as threads:
            list(threads.map(lambda shard: storage.remove(f"{url}/{shard.name}"), other.shards))
    if others:  # last, or its shards would be nobody's if this were stopped
        storage.remove(f"{url}/{MANIFEST}")
        storage.remove(f"{url}/{PARTIAL_MANIFEST}")


def _manifest_at(path: str) -> Manifest | None:
    try:
        return Manifest.parse(storage.read(path), path)
    except ObjectNotFoundError:
        return None


def _send(folder: Path, url: str, shard: ShardInfo) -> bool:
    """Uploads a shard; returns False if an object of its size exists: objects appear whole."""
    address = f"{url}/{shard.name}"
    try:
        if storage.size(address) == shard.bytes:
            return False
    except ObjectNotFoundError:
        pass
    if storage.upload(folder / shard.name, address).sha256 != shard.sha256:
        storage.remove(address)
        raise DataError(
            f"the bytes of {folder / shard.name} have changed (SHA-256 differs); build the dataset "
            "again"
        )
    return True
