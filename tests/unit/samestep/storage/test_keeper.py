"""Blobs in another process's memory: complete or absent, only with the secret, and freed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from samestep.errors import ObjectNotFoundError, StorageError
from samestep.storage import keeper, objects
from samestep.storage.channel import Channel, WrongSecretError
from samestep.storage.keeper import Keeper, Upload, request

SECRET = bytes(range(32))


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    with Keeper(SECRET) as first, Keeper(SECRET) as second, Keeper(SECRET) as third:
        yield [first, second, third]


@pytest.fixture
def url(keepers: list[Keeper]) -> str:
    """A folder in the keepers, the first of which is on this process's machine."""
    return keeper.use([each.address for each in keepers], own=0, secret=SECRET)


def test_content_comes_back_whole_and_in_ranges(url: str) -> None:
    parts = (b"head", memoryview(bytes(range(256))), b"", b"tail")  # each a frame
    content = b"".join(parts)
    digest = objects.write(f"{url}/a", *parts)
    assert digest.bytes == objects.size(f"{url}/a") == len(content)
    assert objects.read(f"{url}/a") == content
    edges = [0, 1, 3, 4, 5, 259, 260, 261, 264]
    for start, stop in itertools.combinations(edges, 2):
        assert objects.read_range(f"{url}/a", start, stop) == content[start:stop]
    with objects.open(f"{url}/a") as file:
        assert file.read() == content
    assert objects.write(f"{url}/nothing").bytes == objects.size(f"{url}/nothing") == 0


def test_folders(url: str) -> None:
    for name in ("step-1/a", "step-1/b", "step-10/a"):
        objects.write(f"{url}/{name}", name.encode())
    assert objects.names(url) == ["step-1", "step-10"]
    assert objects.names(f"{url}/step-1") == ["a", "b"]
    assert objects.exists(f"{url}/step-1")
    assert not objects.exists(f"{url}/step")
    objects.remove(f"{url}/step-1/a")
    objects.remove_folder(f"{url}/step-10")
    assert objects.names(url) == ["step-1"]
    assert objects.names(f"{url}/none") == []
    objects.remove_folder(f"{url}/none")
    for name in ("c", "deep/a"):
        objects.write(f"{url}/step-1/{name}", b"more")
    assert objects.sizes(f"{url}/step-1") == {"b": len(b"step-1/b"), "c": 4}
    assert objects.sizes(f"{url}/none") == {}
    objects.remove_files([f"{url}/step-1/{name}" for name in ("b", "none", "deep/a")])
    assert objects.names(f"{url}/step-1") == ["c"]


def test_several_blobs_take_one_request_of_each_keeper(
    keepers: list[Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of a large run reads and removes a note of each rank with every snapshot."""
    addresses = [each.address for each in keepers]
    for own in range(3):  # each machine writes to its own keeper and to the next one
        url = keeper.use(addresses, own, SECRET)
        for rank in range(4):
            objects.write(f"{url}/step-1/{own}-{rank}", b"%d" % own * (rank + 1))
    objects.write(f"{url}/step-1/empty")
    requests, connect = [], keeper._connect

    def counted(*arguments: Any, **details: Any) -> Channel:
        requests.append(arguments[0])
        return connect(*arguments, **details)

    monkeypatch.setattr(keeper, "_connect", counted)
    names = [f"{own}-{rank}" for rank in range(4) for own in range(3)]
    urls = [f"{url}/step-1/{name}" for name in (*names, "empty")]
    assert objects.read_from_keepers(urls) == [
        b"%d" % own * (rank + 1) for rank in range(4) for own in range(3)
    ] + [b""]
    assert len(requests) == 2, "two of the three keepers hold them all"
    with pytest.raises(ObjectNotFoundError, match="cannot read keeper://snapshots"):
        objects.read_from_keepers([*urls, f"{url}/step-1/none"])
    requests.clear()
    objects.remove_files(urls[1:])
    assert sorted(requests) == sorted(addresses)
    assert objects.names(f"{url}/step-1") == [names[0]]
    requests.clear()
    assert objects.read_from_keepers([]) == []
    assert not requests


def test_two_keepers_hold_a_blob_and_one_is_enough_to_read_it(
    url: str, keepers: list[Keeper]
) -> None:
    content = b"x" * 1000
    objects.write(f"{url}/a", content)
    assert [keeper.bytes for keeper in keepers] == [1000, 1000, 0]
    keepers[0].close()
    assert objects.read(f"{url}/a") == content
    assert objects.names(url) == ["a"]
    with pytest.raises(StorageError, match="cannot write keeper://snapshots/b"):
        objects.write(f"{url}/b", content)
    keepers[1].close()
    assert not objects.exists(f"{url}/a"), "no keeper is nothing, not an error"


def test_a_write_that_breaks_off_leaves_the_former_content(keepers: list[Keeper]) -> None:
    for content, ends in ((b"former", True), (b"newer", False)):
        upload = Upload((keepers[0].address,), SECRET, "name")
        upload.write(content)
        upload.close() if ends else upload.discard()
    time.sleep(0.1)
    assert request(keepers[0].address, SECRET, "get", ["name"], 0, 99) == ({"name": 6}, b"former")
    assert keepers[0].bytes == 6


def test_the_secret_is_needed(keepers: list[Keeper]) -> None:
    with pytest.raises(WrongSecretError):
        request(keepers[0].address, bytes(32), "find", ["name"])


def test_memory_is_freed(url: str, keepers: list[Keeper]) -> None:
    for number in range(5):
        objects.write(f"{url}/step-{number}/a", bytes(1000))
        objects.remove_folder(f"{url}/step-{number - 1}")
    assert [keeper.bytes for keeper in keepers] == [1000, 1000, 0]


def test_a_keeper_survives_every_error(
    keepers: list[Keeper], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If its thread ended, requests would be accepted, and wait for an answer."""
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def failing(thread: threading.Thread) -> None:
        if failures and "_serve" in repr(thread._target):  # type: ignore[attr-defined]
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(ConnectionResetError):
        request(keepers[0].address, SECRET, "find", ["a"])
    assert "dropped: can't start new thread" in caplog.text
    with pytest.raises(ConnectionResetError):  # a request of another version
        request(keepers[0].address, SECRET, "get", 7)  # type: ignore[arg-type]
    assert "a request for snapshots in memory fails" in caplog.text
    assert request(keepers[0].address, SECRET, "find", ["a"]) == ({}, b"")


def test_an_answer_that_is_no_list_of_sizes_is_that_of_a_keeper_that_does_not_answer(
    url: str, keepers: list[Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.write(f"{url}/a", b"content")
    send = Channel.send_json
    first = iter([{"snapshots/a": "x"}])
    monkeypatch.setattr(
        Channel,
        "send_json",
        lambda self, message: send(self, message if "do" in message else next(first, message)),
    )
    assert objects.read(f"{url}/a") == b"content"
