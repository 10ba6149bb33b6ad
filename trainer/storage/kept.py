"""What keepers hold, as a store like others: addresses begin with keeper://."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from trainer.storage.attempts import Info
from trainer.storage.keeper import Answer, Put, asking

logger = logging.getLogger(__name__)

COPIES = 2


def store(keepers: Sequence[str], own: int) -> str:
    """Lets this process use keepers; what `keeper://NAME` means here from now on.

    Args:
        keepers: the addresses of all of them; each process has the same.
        own: which of them is that of this node. What this process writes goes there and to the next one.

    Returns:
        The address of a folder.
    """
    fsspec.register_implementation("keeper", KeeperFileSystem, clobber=True)
    fsspec.config.conf["keeper"] = {"keepers": (*keepers[own:], *keepers[:own])}
    return "keeper://snapshots"


def is_kept(url: str) -> bool:
    """Whether an address is one of keepers, which answer as fast as a disk."""
    return url.startswith("keeper:")


class KeeperFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A file lies in two keepers, and is read from the first that has it; one that does not answer has nothing.

    Args:
        keepers: their addresses, the nearest first.
    """

    protocol = "keeper"

    def __init__(self, keepers: Sequence[str], **options: object) -> None:
        super().__init__(**options)
        self.keepers = tuple(keepers)

    def info(self, path: str, **_: object) -> Info:
        for sizes in self._find(path):
            if path in sizes:
                return {"name": path, "size": sizes[path], "type": "file"}
            if sizes:
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Info] | list[str]:
        found = {name for sizes in self._find(path) for name in sizes}
        if not found:
            raise FileNotFoundError(path)
        below = len(path) + 1
        names = sorted({name[:below] + name[below:].partition("/")[0] for name in found})
        return [self.info(name) for name in names] if detail else names

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        begin, stop = start or 0, 2**63 if end is None else end
        for keeper in self.keepers:
            try:
                with asking(keeper, "get", path, start=begin, stop=stop) as (size, answer):
                    if size is None:
                        continue
                    assert isinstance(size, int)
                    wanted = max(0, min(stop, size) - begin)
                    content = answer.read(wanted)
                    if len(content) == wanted:
                        return content
                    raise ConnectionError(f"{len(content)} of {wanted} bytes came")
            except OSError as error:
                _note(keeper, error)
        raise FileNotFoundError(path)

    def rm_file(self, path: str) -> None:
        list(self._ask_each("remove", path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.rm_file(path)

    def _open(self, path: str, mode: str = "rb", **_: object) -> Put | _File:
        return (
            Put(self.keepers[:COPIES], path)
            if mode == "wb"
            else _File(self, path, cache_type="none")
        )

    def _find(self, path: str) -> Iterator[dict[str, int]]:
        """The sizes of what each keeper holds under this name, by name."""
        for sizes in self._ask_each("find", path):
            assert isinstance(sizes, dict)
            yield sizes

    def _ask_each(self, do: str, path: str) -> Iterator[Answer]:
        for keeper in self.keepers:
            try:
                with asking(keeper, do, path) as (answer, _):
                    yield answer
            except OSError as error:
                _note(keeper, error)


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content


def _note(keeper: str, error: OSError) -> None:
    logger.info("the keeper at %s does not answer: %s", ":".join(keeper.split()[:2]), error)
