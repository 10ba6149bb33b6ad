"""The cache of shards: each is fetched once, verified, kept while in use; the size is bounded.

Kills do no harm.
"""

import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from data_pipeline.reading.cache import ShardCache
from samestep.errors import ConfigError, DataError
from samestep.storage import attempts
from tests.processes import fork
from tests.waiting import until
from tests.web import WebServer

SIZE = 4000


@dataclass(frozen=True)
class Shards:
    """Files on a web server that take the part of shards."""

    web: WebServer
    content: tuple[bytes, ...]

    def address(self, number: int) -> tuple[str, str, int]:
        content = self.content[number]
        return f"{self.web.url}/{number}", hashlib.sha256(content).hexdigest(), len(content)

    def open(self, cache: ShardCache, number: int) -> BinaryIO:
        return cache.open(*self.address(number))

    def fetch(self, cache: ShardCache, number: int) -> None:
        cache.fetch(*self.address(number))

    def get(self, cache: ShardCache, number: int) -> None:
        with self.open(cache, number) as file:
            assert file.read() == self.content[number]

    def kept(self, cache: ShardCache) -> list[int]:
        names = [hashlib.sha256(content).hexdigest() for content in self.content]
        return sorted(names.index(path.stem) for path in cache.folder.glob("*.tar"))


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shards]:
    monkeypatch.setattr(attempts, "_DELAYS", (0.01, 0.01))
    folder = tmp_path / "served"
    folder.mkdir()
    content = tuple(random.Random(number).randbytes(SIZE) for number in range(8))
    for number, data in enumerate(content):
        (folder / str(number)).write_bytes(data)
    with closing(WebServer(folder)) as web:
        yield Shards(web, content)


def make_cache(folder: Path, limit: int = 100 * SIZE) -> ShardCache:
    cache = ShardCache(folder / "cache", limit)
    cache.prepare()
    return cache


def partial_files(cache: ShardCache) -> list[Path]:
    return list(cache.folder.glob("*.partial"))


def test_threads_that_want_the_same_shard_fetch_it_once(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: shards.get(cache, i % 2), range(32)))
    assert shards.web.contents == {"0": 1, "1": 1}
    assert not partial_files(cache)


GET_ALL = """
import sys
from pathlib import Path
from data_pipeline.reading.cache import ShardCache
folder, *wanted = sys.argv[1:]
cache = ShardCache(Path(folder), 10**9)
for shard in wanted:
    url, sha256, size = shard.split()
    print(cache.open(url, sha256, int(size)).name, flush=True)
"""


def start_process(cache: ShardCache, shards: Shards, numbers: list[int]) -> subprocess.Popen[str]:
    wanted = [" ".join(map(str, shards.address(number))) for number in numbers]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", GET_ALL, str(cache.folder), *wanted]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_processes_share_what_they_fetch(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    shards.web.held = True
    processes = [start_process(cache, shards, numbers) for numbers in ([0, 1, 2, 3], [0, 3, 2, 1])]
    wait_for(lambda: shards.web.contents["0"])
    shards.web.release()
    outputs = [process.communicate(timeout=30)[0].split() for process in processes]
    assert [len(output) for output in outputs] == [4, 4]
    assert set(outputs[0]) == set(outputs[1])
    assert shards.web.contents == {str(number): 1 for number in range(4)}


wait_for = partial(until, seconds=20)


@pytest.mark.long
def test_a_process_that_is_killed_while_it_fetches_leaves_no_trouble(
    shards: Shards, tmp_path: Path
) -> None:
    cache = make_cache(tmp_path, limit=3 * SIZE)
    shards.web.held = True
    process = start_process(cache, shards, [0])
    wait_for(lambda: shards.web.contents["0"])
    (partial,) = partial_files(cache)
    assert partial.stat().st_size == SIZE  # its space is taken, though half of it has not come
    process.send_signal(signal.SIGKILL)
    process.wait()
    shards.web.release()
    assert partial.exists()
    shards.get(cache, 1)  # another shard: what the dead process left is removed to make room
    assert not partial.exists()
    process = start_process(cache, shards, [0])
    assert process.wait(timeout=20) == 0
    shards.get(cache, 0)
    assert shards.kept(cache) == [0, 1]


def test_the_shard_that_a_killed_process_was_fetching_is_fetched_anew(
    shards: Shards, tmp_path: Path
) -> None:
    cache = make_cache(tmp_path)
    name = hashlib.sha256(shards.content[0]).hexdigest()
    for left in (shards.content[0][: SIZE // 2], bytes(2 * SIZE)):
        (cache.folder / f"{name}.partial").write_bytes(left)
        shards.get(cache, 0)
        assert not partial_files(cache)
        (cache.folder / f"{name}.tar").unlink()


def test_a_process_that_is_forked_during_a_download_does_not_keep_its_lock(
    shards: Shards, tmp_path: Path
) -> None:
    cache = make_cache(tmp_path)
    shards.web.held = True
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(shards.fetch, cache, 0)
        wait_for(lambda: shards.web.contents["0"])
        child = fork()
        if child == 0:
            signal.pause()
        try:
            shards.web.release()
            fetched.result(timeout=20)
            with (cache.folder / f"{shards.address(0)[1]}.tar").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                assert file.read() == shards.content[0]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_the_least_recently_used_go_first(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path, limit=3 * SIZE + SIZE // 2)
    for number in (0, 1, 2, 0, 3, 0, 4):
        shards.get(cache, number)
        assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit
    assert shards.kept(cache) == [0, 3, 4]
    assert shards.web.contents["0"] == 1


def test_what_is_mapped_is_kept_until_the_map_is_gone(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path, limit=SIZE)
    with shards.open(cache, 0) as file:
        mapped = np.memmap(file, np.uint8, mode="r")  # type: ignore[call-overload]
    view = mapped[10:20].view(np.ndarray)
    del mapped
    shards.get(cache, 1)
    shards.get(cache, 2)
    assert shards.kept(cache) == [0, 2]
    assert view.tobytes() == shards.content[0][10:20]
    del view
    shards.get(cache, 3)
    assert shards.kept(cache) == [3]


def test_only_what_is_needed_may_exceed_the_limit(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path, limit=SIZE)
    with shards.open(cache, 0):
        shards.get(cache, 1)
        with pytest.raises(DataError, match="no room to download shards in advance"):
            shards.fetch(cache, 2)
        assert shards.kept(cache) == [0]
    shards.fetch(cache, 2)
    assert shards.kept(cache) == [2]


def test_threads_and_evictions_at_once(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path, limit=2 * SIZE)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: shards.get(cache, i * 5 % 8), range(60)))
    shards.get(
        cache, min(set(range(8)) - set(shards.kept(cache)), default=0)
    )  # nothing else is in use any more
    assert len(shards.kept(cache)) <= 2
    assert not partial_files(cache)


def test_a_download_that_is_cut_off_is_repaired(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    shards.web.cut = 2
    shards.get(cache, 0)
    assert shards.web.contents["0"] == 3


def test_wrong_bytes_never_get_into_the_cache(shards: Shards, tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    shards.web.flipped.add("0")
    with pytest.raises(
        DataError, match=rf"{shards.web.url}/0 has the SHA-256 .* damaged or replaced"
    ):
        shards.get(cache, 0)
    (shards.web.folder / "1").write_bytes(shards.content[1][:-1])
    with pytest.raises(DataError, match=rf"{shards.web.url}/1 has {SIZE - 1} bytes, not {SIZE}"):
        shards.get(cache, 1)
    (shards.web.folder / "2").unlink()
    with pytest.raises(DataError, match=rf"{shards.web.url}/2"):
        shards.get(cache, 2)
    assert shards.kept(cache) == []
    assert not partial_files(cache)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two shards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = f"size={4 * 4096}"  # a page for the folder of the cache, one for the lock
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_smaller_than_the_limit_is_the_limit(shards: Shards, small_disk: Path) -> None:
    cache = make_cache(small_disk)
    assert cache.capacity <= 4 * 4096 < cache.limit
    for number in range(8):
        shards.get(cache, number)
    assert 0 < len(shards.kept(cache)) < 5
    refused = r"cannot store shards in .*: No space left.*All its shards are in use"
    with ExitStack() as in_use, pytest.raises(DataError, match=refused):
        _ = [in_use.enter_context(shards.open(cache, number)) for number in range(8)]
    assert not partial_files(cache)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=rf"{tmp_path}/file/cache/shards: Not a directory. Set data.cache .*writ"
    ):
        ShardCache.open_folder(str(tmp_path / "file/cache")).prepare()


def test_the_default_folder_can_be_chosen_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_CACHE", str(tmp_path))
    assert ShardCache.open_folder(size="1.5GB") == ShardCache(tmp_path / "shards", 1_500_000_000)
    monkeypatch.setenv("SAMESTEP_CACHE", "")
    assert ShardCache.open_folder().folder == Path.home() / ".cache/samestep/shards"
    with pytest.raises(ConfigError, match="cache_size"):
        ShardCache.open_folder(size="much")
