"""Local files and objects behind URLs: atomic local writes, and object stores through fsspec.

Every operation on a URL is retried after transient failures (lost connections, time-outs,
throttling, server errors). A failure that remains is raised as a `StorageError` in one paragraph.
`StorageError` is both a `DataError` and a `CheckpointError`, so callers need not translate it.
Credentials, endpoints and proxies come from where the stores' own tools look for them.
"""

from samestep.addresses import shown
from samestep.storage.attempts import is_url, is_writable, under_way
from samestep.storage.local import (
    CHUNK_BYTES,
    Digest,
    atomic_write,
    chunks,
    copy,
    make_folder,
    new_folder,
    sync_folder,
    with_literal_names,
    write_text,
)
from samestep.storage.objects import (
    create,
    download,
    exists,
    glob,
    names,
    open,
    read,
    read_from_keepers,
    read_range,
    remove,
    remove_files,
    remove_folder,
    size,
    sizes,
    upload,
    write,
)

__all__ = [
    "CHUNK_BYTES",
    "Digest",
    "atomic_write",
    "chunks",
    "copy",
    "create",
    "download",
    "exists",
    "glob",
    "is_url",
    "is_writable",
    "make_folder",
    "names",
    "new_folder",
    "open",
    "read",
    "read_from_keepers",
    "read_range",
    "remove",
    "remove_files",
    "remove_folder",
    "shown",
    "size",
    "sizes",
    "sync_folder",
    "under_way",
    "upload",
    "with_literal_names",
    "write",
    "write_text",
]
