"""Checkpoints in an object store: what `files` calls where a folder is no `Path`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from threading import Lock

import torch
from torch import Tensor

from samestep.storage import Digest, is_keeper_url, objects, shown
from samestep.storage.urls import PARALLEL_REQUESTS

_BLOCK_BYTES = 2**18  # takes an object store about as long as a byte
_BLOCKS_KEPT = 8  # per file
# Large ranges are read in parts of this size: parallel parts are faster, and cheaper to retry.
_PART_BYTES = 2**25


@dataclass(frozen=True)
class Url:
    """The address of an object or a folder of objects, with the methods of a `Path` used here.

    The other methods are as the functions of `files` of the same names.
    """

    url: str

    def __str__(self) -> str:
        return shown(self.url)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        return Url(self.url.rpartition("/")[0])

    @property
    def in_keepers(self) -> bool:
        """Whether it is served by keepers, which answer as fast as a local disk."""
        return is_keeper_url(self.url)

    def exists(self) -> bool:
        return objects.exists(self.url)

    def open(self, _mode: str) -> BufferedReader:
        return objects.open(self.url)

    def write(self, *parts: bytes | memoryview) -> Digest:
        return objects.write(self.url, *parts)

    def create(self, content: bytes) -> bool:
        return objects.create(self.url, content)

    def read(self) -> bytes:
        return objects.read(self.url)

    def size(self) -> int:
        return objects.size(self.url)

    def sizes(self) -> dict[str, int]:
        return objects.sizes(self.url)

    def names(self) -> list[str]:
        return objects.names(self.url)

    def remove(self) -> None:
        objects.remove(self.url)

    def remove_files(self, names: Iterable[str]) -> None:
        objects.remove_files([f"{self.url}/{name}" for name in names])

    def remove_folder(self) -> None:
        objects.remove_folder(self.url)

    def open_bytes(self) -> Callable[[int, int], Tensor]:
        return _Ranges(self.url)


class _Ranges:
    """Reads ranges of an object; small ones, such as neighboring biases, from cached blocks."""

    def __init__(self, url: str) -> None:
        size = objects.size(url)
        self._url = url
        self._lock = Lock()
        self._block = lru_cache(_BLOCKS_KEPT)(
            lambda start: objects.read_range(url, start, min(start + _BLOCK_BYTES, size))
        )

    def __call__(self, start: int, stop: int) -> Tensor:
        if start == stop:  # torch.frombuffer rejects an empty buffer
            return torch.empty(0, dtype=torch.uint8)
        if stop - start >= _BLOCK_BYTES:
            content = self._read_parts(start, stop)
        else:
            first = start - start % _BLOCK_BYTES
            # Under the lock, or threads that need the same block would all request it.
            with self._lock:
                blocks = b"".join(self._block(begin) for begin in range(first, stop, _BLOCK_BYTES))
            content = bytearray(blocks[start - first : stop - first])
        return torch.frombuffer(content, dtype=torch.uint8)

    def _read_parts(self, start: int, stop: int) -> bytearray:
        content = bytearray(stop - start)

        def read_part(begin: int) -> None:
            end = min(begin + _PART_BYTES, stop)
            content[begin - start : end - start] = objects.read_range(self._url, begin, end)

        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            list(pool.map(read_part, range(start, stop, _PART_BYTES)))
        return content
