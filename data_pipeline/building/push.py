"""`samestep data push`: copies a finished dataset to an object store.

The manifest is written last under its own name: without it there is no dataset at the address. At
the start it is written as `manifest.partial.json`, which says whose shards are there, so a push
that was stopped can resume.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from data_pipeline.building.progress import Meter
from data_pipeline.building.verify import SMALL_FILES
from data_pipeline.format.manifest import MANIFEST, Manifest, ShardInfo
from data_pipeline.reading.dataset import Dataset
from samestep import storage
from samestep.errors import ConfigError, DataError, ObjectNotFoundError
from samestep.storage import Digest, objects

logger = logging.getLogger(__name__)

PARTIAL_MANIFEST = "manifest.partial.json"

_TRANSFERS = 8  # at a time


def push(folder: Path, url: str, force: bool = False) -> None:
    """Copies a dataset to `url`, or resumes that; shards that are there are not sent again.

    Args:
        folder: the dataset.
        url: address of the copy.
        force: replace another dataset at the address.

    Raises:
        ConfigError: such an address cannot be written.
        DataError: the dataset is unfinished or damaged, the address holds something else, or a
            transfer fails.
    """
    if not storage.is_url(url) or not storage.is_writable(url):
        raise ConfigError(
            f"{storage.shown(url)} cannot be written. Name a folder of an object store, such as "
            "s3://BUCKET/NAME."
        )
    url = url.rstrip("/")
    manifest = Dataset.open(folder).manifest
    replaced = _make_way(url, manifest, force)
    # The new owner's manifest before the old one's goes.
    objects.upload(folder / MANIFEST, f"{url}/{PARTIAL_MANIFEST}")
    if replaced:
        objects.remove(f"{url}/{MANIFEST}")
    counts = [f".cache/{file.name}" for file in sorted(folder.glob(".cache/*.counts"))]
    digests = manifest.small_files
    for name in (*SMALL_FILES, *counts):
        if name in counts or (name in digests if digests else (folder / name).exists()):
            _upload(folder, url, name, (digests or {}).get(name))
        else:
            # Of a former dataset: its tokenizer.json would be used instead of our spiece.model.
            objects.remove(f"{url}/{name}")
    sent = 0
    total = sum(shard.bytes for shard in manifest.shards)
    with Meter("pushing") as meter, ThreadPoolExecutor(_TRANSFERS) as threads:
        results = threads.map(partial(_send, folder, url), manifest.shards)
        for shard, is_new in zip(manifest.shards, results, strict=True):
            meter.advance(shard.bytes / total, shard.bytes * is_new, shard.documents)
            sent += is_new
    # In this order: without a manifest, nobody could say whose shards these are.
    objects.upload(folder / MANIFEST, f"{url}/{MANIFEST}")
    objects.remove(f"{url}/{PARTIAL_MANIFEST}")
    logger.info(
        f"pushed {folder}: {sent} shards sent, {len(manifest.shards) - sent} were there. Train on "
        f"it with data.path={url}"
    )


def _make_way(url: str, manifest: Manifest, force: bool) -> bool:
    """Removes the shards and counts of another dataset from the address, if `force`.

    Its manifest stays, for the caller to replace: at every moment one there names the owner of the
    files, so a push that is stopped can be repeated.

    Returns:
        Whether there was another dataset.

    Raises:
        DataError: the address holds something else.
    """
    found = []
    for name in (MANIFEST, PARTIAL_MANIFEST):
        with suppress(ObjectNotFoundError):
            found.append(Manifest.parse(objects.read(f"{url}/{name}"), f"{url}/{name}"))
    if not found and objects.names(url):
        raise DataError(
            f"{url} is neither empty nor a dataset. Empty it, or push to another address."
        )
    others = [other for other in found if other.digest != manifest.digest]
    if not others:
        return False
    if not force:
        raise DataError(
            f"{url} holds another dataset. Push to another address, or replace it with --force."
        )
    shards = {f"{url}/{shard.name}" for other in others for shard in other.shards}
    cached = objects.names(f"{url}/.cache")
    counts = {f"{url}/.cache/{name}" for name in cached if name.endswith(".counts")}
    with ThreadPoolExecutor(_TRANSFERS) as threads:
        list(threads.map(objects.remove, shards | counts))
    return True


def _upload(folder: Path, url: str, name: str, expected: Digest | None) -> None:
    """Uploads a file of a dataset.

    Raises:
        DataError: it cannot be read, or its bytes are not the expected ones.
    """
    try:
        digest = objects.upload(folder / name, f"{url}/{name}")
    except OSError as error:
        raise DataError(f"cannot read {folder / name}: {error}. Copy it back.") from error
    if expected is not None and digest.sha256 != expected.sha256:
        objects.remove(f"{url}/{name}")
        raise DataError(
            f"the bytes of {folder / name} have changed (SHA-256 differs). Build the dataset again."
        )


def _send(folder: Path, url: str, shard: ShardInfo) -> bool:
    """Uploads a shard; returns False if it is there already."""
    # The size is enough to know it, since objects appear only when they are complete.
    with suppress(ObjectNotFoundError):
        if objects.size(f"{url}/{shard.name}") == shard.bytes:
            return False
    _upload(folder, url, shard.name, shard.digest)
    return True
