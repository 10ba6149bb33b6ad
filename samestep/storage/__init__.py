"""Local files, and which paths are URLs. `storage.objects` reads and writes what URLs name."""

from samestep.addresses import shown
from samestep.storage.local import (
    CHUNK_BYTES,
    Digest,
    atomic_write,
    chunks,
    copy,
    make_folder,
    sync_folder,
    with_literal_names,
    write_text,
)
from samestep.storage.urls import is_hub_path, is_keeper_url, is_url, is_writable, under_way

__all__ = [
    "CHUNK_BYTES",
    "Digest",
    "atomic_write",
    "chunks",
    "copy",
    "is_hub_path",
    "is_keeper_url",
    "is_url",
    "is_writable",
    "make_folder",
    "shown",
    "sync_folder",
    "under_way",
    "with_literal_names",
    "write_text",
]
