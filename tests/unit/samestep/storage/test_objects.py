"""Objects on a real S3 server and a real HTTP server, with every failure that servers have."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest
from botocore.exceptions import ClientError

from samestep import storage
from samestep.errors import ConfigError, MissingExtra, ObjectNotFoundError, StorageError
from samestep.storage import attempts, objects
from tests.faulty_proxy import Fault, FaultyProxy
from tests.processes import fork

CONTENT = bytes(range(256)) * 1024


@pytest.fixture
def web(faulty_s3: FaultyProxy, s3_folder: str) -> str:
    """The address of the folder for clients that know nothing of S3."""
    return s3_folder.replace("s3://", f"{faulty_s3.url}/")


def test_what_is_written_is_there(s3_folder: str) -> None:
    url = f"{s3_folder}/a/b.bin"
    assert not objects.exists(url)
    assert objects.names(s3_folder) == []
    digest = objects.write(url, CONTENT[:1000], b"", memoryview(CONTENT)[1000:])
    assert digest == storage.Digest(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    assert objects.read(url) == CONTENT
    assert objects.size(url) == len(CONTENT)
    assert objects.read_range(url, 7, 19) == CONTENT[7:19]
    objects.write(f"{s3_folder}/a/empty")
    assert objects.read(f"{s3_folder}/a/empty") == b""
    assert objects.names(s3_folder) == ["a"]
    assert objects.names(f"{s3_folder}/a/") == ["b.bin", "empty"]
    assert objects.glob(f"{s3_folder}/*/*.bin") == [url]
    assert objects.exists(f"{s3_folder}/a")
    objects.remove(url)
    objects.remove(url)
    assert objects.names(f"{s3_folder}/a") == ["empty"]
    objects.remove_folder(s3_folder)
    objects.remove_folder(s3_folder)
    assert not objects.exists(s3_folder)


def test_a_name_that_exists_comes_before_a_pattern(s3_folder: str) -> None:
    for name in ("a[1].txt", "a1.txt", "b[1]/c.txt", "b1/c.txt", "d2/c.txt"):
        objects.write(f"{s3_folder}/{name}", b"x")
    assert objects.glob(f"{s3_folder}/a[1].txt") == [f"{s3_folder}/a[1].txt"]
    assert objects.glob(f"{s3_folder}/b[1]/*.txt") == [f"{s3_folder}/b[1]/c.txt"]
    assert objects.glob(f"{s3_folder}/d[12]/*.txt") == [f"{s3_folder}/d2/c.txt"]


@pytest.mark.long
def test_a_folder_of_many_objects_takes_few_requests(
    faulty_s3: FaultyProxy, s3_folder: str
) -> None:
    for number in range(12):
        objects.write(f"{s3_folder}/{number:02}", b"x" * number)
    objects.write(f"{s3_folder}/deep/a", b"x")
    faulty_s3.behave()
    assert objects.sizes(s3_folder) == {f"{number:02}": number for number in range(12)}
    objects.remove_files([f"{s3_folder}/{number:02}" for number in range(2, 20)])
    assert len(faulty_s3.requests) == 2
    assert objects.names(s3_folder) == ["00", "01", "deep"]
    assert objects.sizes(f"{s3_folder}/none") == {}
    objects.remove_files([])


@pytest.mark.parametrize("name", ["sweep[1]", "sweep*", "sweep?"])
def test_an_address_is_no_pattern(s3_folder: str, name: str) -> None:
    """Removing `sweep[1]` does not remove `sweep1`."""
    others = [f"{s3_folder}/{other}" for other in ("sweep1", f"{name}0")]
    for folder in (f"{s3_folder}/{name}", *others):
        for file in ("a", "b", "deep/c"):
            objects.write(f"{folder}/{file}", b"x")
    objects.remove_files([f"{s3_folder}/{name}/{file}" for file in ("none", "b")])
    assert objects.names(f"{s3_folder}/{name}") == ["a", "deep"]
    objects.remove_folder(f"{s3_folder}/{name}")
    objects.remove_folder(f"{s3_folder}/{name}")
    assert not objects.exists(f"{s3_folder}/{name}")
    for folder in others:
        assert objects.names(folder) == ["a", "b", "deep"]
        assert objects.names(f"{folder}/deep") == ["c"]


def test_an_open_object_is_a_file(s3_folder: str) -> None:
    url = f"{s3_folder}/file"
    objects.write(url, CONTENT)
    with objects.open(url) as file:
        assert file.read(3) == CONTENT[:3]
        assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
        assert file.read() == CONTENT[-5:]
        assert file.read(1) == b""
        file.seek(100)
        assert file.read() == CONTENT[100:]
    with objects.open(url) as file:
        assert b"".join(file) == CONTENT


def test_large_objects_go_in_parts(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.storage.objects._PART_BYTES", 5 * 2**20)
    (tmp_path / "large").write_bytes(os.urandom(11 * 2**20))
    digest = objects.upload(tmp_path / "large", f"{s3_folder}/large")
    with (tmp_path / "back").open("wb") as file:
        assert objects.download(f"{s3_folder}/large", file, digest.bytes, digest.sha256) == digest
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_transient_failures_do_no_harm(
    faulty_s3: FaultyProxy, s3_folder: str, web: str, scheme: str, tmp_path: Path
) -> None:
    """Lost connections, server errors, throttling and truncated answers, at any point."""
    faults: list[Fault] = [503, "drop", 429, "truncate", 500]
    written, url = f"{s3_folder}/x", f"{s3_folder if scheme == 's3' else web}/x"
    faulty_s3.faults = faults.copy()
    objects.write(written, CONTENT)
    for read in (objects.read, lambda url: objects.read_range(url, 0, len(CONTENT))):
        faulty_s3.faults = faults.copy()
        assert read(url) == CONTENT
    faulty_s3.faults = [None, *faults]
    with (tmp_path / "x").open("wb") as file:
        objects.download(url, file)
    assert (tmp_path / "x").read_bytes() == CONTENT
    faulty_s3.faults = faults.copy()
    assert objects.names(s3_folder) == ["x"]
    faulty_s3.faults = faults.copy()
    objects.remove_folder(s3_folder)
    assert not faulty_s3.faults
    assert not objects.exists(written)


def test_permanent_failures_are_explained(
    faulty_s3: FaultyProxy, s3_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    objects.write(f"{s3_folder}/x", b"former")
    faulty_s3.always = 503
    faulty_s3.requests.clear()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            StorageError,
            match=rf"^cannot read {s3_folder}/x: .+; check the network and the endpoint",
        ),
    ):
        objects.read_range(f"{s3_folder}/x", 0, 1)
    assert len(faulty_s3.requests) == 6
    assert caplog.text.count("trying again in 0.01 s") == 5
    faulty_s3.always = "drop"
    with pytest.raises(StorageError, match=f"cannot write {s3_folder}/x"):
        objects.write(f"{s3_folder}/x", b"new")
    faulty_s3.always = None
    assert objects.read(f"{s3_folder}/x") == b"former"


def test_client_errors_are_not_retried(faulty_s3: FaultyProxy, s3_folder: str, web: str) -> None:
    for url, status in product((s3_folder, web), (401, 403, 400)):
        faulty_s3.always = status
        faulty_s3.requests.clear()
        with pytest.raises(StorageError) as caught:
            objects.read_range(f"{url}/x", 0, 1)
        assert not isinstance(caught.value, ObjectNotFoundError)
        assert len(faulty_s3.requests) == 1
        if status != 400:
            assert ("AWS_ACCESS_KEY_ID" if url == s3_folder else "log-in") in str(caught.value)


@pytest.mark.long
def test_rejected_credentials_of_a_store_that_has_answered_may_be_renewed(
    faulty_s3: FaultyProxy, s3_folder: str, web: str, caplog: pytest.LogCaptureFixture
) -> None:
    objects.write(f"{s3_folder}/x", CONTENT)
    for url, status in ((s3_folder, 403), (web, 401)):
        with objects.open(f"{url}/x") as file:
            faulty_s3.faults = [status] * 5
            assert file.read(3) == CONTENT[:3]
            assert not faulty_s3.faults
    faulty_s3.faults = [403] * 4
    objects.write(f"{s3_folder}/y", CONTENT)
    faulty_s3.faults = [401] * 4
    assert objects.names(s3_folder) == ["x", "y"]
    assert "trying again in 0.01 s" in caplog.text
    faulty_s3.always = 403
    with pytest.raises(StorageError, match=r"check the name and who may read.*AWS_PROFILE"):
        objects.read(f"{s3_folder}/x")


def test_a_forbidden_object_is_not_waited_for(faulty_s3: FaultyProxy, s3_folder: str) -> None:
    """Without the right to list, S3 answers 403 for an object that is not there."""
    objects.write(f"{s3_folder}/x", CONTENT)
    assert objects.size(f"{s3_folder}/x") == len(CONTENT)
    faulty_s3.requests.clear()
    faulty_s3.faults = [403, None, 403]
    with pytest.raises(StorageError, match=f"cannot read {s3_folder}/y"):
        objects.read(f"{s3_folder}/y")
    assert [request.rpartition("/")[2] for request in faulty_s3.requests] == ["y", "x", "y"]


@pytest.mark.long
def test_renewed_credentials_are_read_from_their_file(
    faulty_s3: FaultyProxy, s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by files that are open."""
    credentials = tmp_path / "credentials"

    def renew(key: str) -> None:
        lines = ["[default]", f"aws_access_key_id = {key}", "aws_secret_access_key = x"]
        credentials.write_text("\n".join(lines))

    renew("first")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    faulty_s3.key = "first"
    content = CONTENT * (2 * storage.CHUNK_BYTES // len(CONTENT))
    objects.write(f"{s3_folder}/x", content)
    with objects.open(f"{s3_folder}/x") as file:
        begin = file.read(7)
        faulty_s3.key = "second"
        renew("second")
        assert begin + file.read() == content
    assert objects.names(s3_folder) == ["x"]
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_expired_tokens_are_rejected_credentials() -> None:
    """S3 answers them with 400, not 401 or 403."""
    answer = {"Error": {"Code": "ExpiredToken"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    error = ClientError(answer, "GetObject")  # type: ignore[arg-type]
    assert attempts._Failure.of(error).status == 403


@pytest.mark.parametrize("operation", [objects.read, objects.size, objects.open])
def test_what_is_not_there_is_named(s3_folder: str, web: str, operation: object) -> None:
    assert callable(operation)
    with pytest.raises(
        ObjectNotFoundError, match=f"{s3_folder}/x: .*does not exist; check the bucket and the name"
    ):
        operation(f"{s3_folder}/x")
    with pytest.raises(
        ObjectNotFoundError, match=r"s3://nowhere/x: The specified bucket does not exist"
    ):
        operation("s3://nowhere/x")
    with pytest.raises(ObjectNotFoundError, match=r"/x: (Not Found|it does not exist);"):
        operation(f"{web}/x")
    with pytest.raises(
        ObjectNotFoundError,
        match=r"cannot write s3://nowhere/x: The specified bucket does not exist",
    ):
        objects.write("s3://nowhere/x", b"")


def test_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.storage.attempts._DELAYS", (0.01,))
    with pytest.raises(
        StorageError,
        match=r"cannot read http://127.0.0.1:1/x: .*; check the network and the endpoint",
    ):
        objects.open("http://127.0.0.1:1/x")


def test_messages_hold_no_secrets(
    faulty_s3: FaultyProxy, web: str, caplog: pytest.LogCaptureFixture
) -> None:
    address = web.replace("://", "://user:p@ssword@") + "/x?X-Amz-Signature=5ec7e7"
    for status in (503, 403, 404):
        faulty_s3.always = status
        with pytest.raises(StorageError) as caught:
            objects.read(address)
        text = f"{caught.value}{caplog.text}"
        assert f"{web}/x: " in text
        assert "5ec7e7" not in text
        assert "ssword" not in text


def test_a_server_without_ranges(faulty_s3: FaultyProxy, s3_folder: str, web: str) -> None:
    objects.write(f"{s3_folder}/x", CONTENT)
    faulty_s3.ranges = False
    assert objects.read_range(f"{web}/x", 1000, 1007) == CONTENT[1000:1007]
    with objects.open(f"{web}/x") as file:
        file.seek(70_000)
        assert file.read(5) == CONTENT[70_000:70_005]
        faulty_s3.faults = ["truncate"]
        assert file.read() == CONTENT[70_005:]


def test_downloads_are_checked(faulty_s3: FaultyProxy, s3_folder: str, tmp_path: Path) -> None:
    digest = objects.write(f"{s3_folder}/x", CONTENT)
    with (tmp_path / "x").open("wb") as file:
        with pytest.raises(
            StorageError, match=rf"{s3_folder}/x has {len(CONTENT)} bytes, not 5: .*upload it again"
        ):
            objects.download(f"{s3_folder}/x", file, 5)
        faulty_s3.requests.clear()
        with pytest.raises(
            StorageError, match=rf"has the SHA-256 {digest.sha256}, not 12ab: .*upload it again"
        ):
            objects.download(f"{s3_folder}/x", file, sha256="12ab")
        assert sum(request.startswith("GET") for request in faulty_s3.requests) == 3


def test_an_object_that_was_replaced_during_a_download_leaves_no_tail(
    s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, copy = f"{s3_folder}/x", objects.copy
    digest = objects.write(f"{s3_folder}/new", CONTENT[:1000])
    objects.write(url, CONTENT)

    def copy_and_replace(content: Iterable[bytes], file: BinaryIO) -> storage.Digest:
        monkeypatch.undo()
        copied = copy(content, file)
        objects.write(url, CONTENT[:1000])
        return copied

    monkeypatch.setattr(objects, "copy", copy_and_replace)
    with (tmp_path / "x").open("wb") as file:
        assert objects.download(url, file, sha256=digest.sha256) == digest
    assert (tmp_path / "x").read_bytes() == CONTENT[:1000]


def test_a_write_that_fails_leaves_nothing(s3_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.storage.objects._PART_BYTES", 5 * 2**20)

    def parts() -> object:
        yield bytes(6 * 2**20)
        raise KeyboardInterrupt

    monkeypatch.setattr("samestep.storage.objects.chunks", lambda _: parts())
    with pytest.raises(KeyboardInterrupt):
        objects.write(f"{s3_folder}/x")
    assert objects.names(s3_folder) == []


def test_what_is_shown_of_an_address() -> None:
    assert storage.shown("at s3://user:password@host/x?signature=secret") == "at s3://host/x"
    assert storage.shown("hf://tiny@main and hf://datasets/a/b@main/*.json?") == (
        "hf://tiny@main and hf://datasets/a/b@main/*.json?"
    )


def test_unknown_addresses_are_refused() -> None:
    assert storage.is_url("s3://bucket/x")
    assert not storage.is_url("/a/b:c")
    with pytest.raises(
        ConfigError, match=r"'sftp://host/x' has an unsupported scheme. Use s3, gs, http"
    ):
        storage.is_url("sftp://user:password@host/x")
    assert storage.is_writable("gs://bucket/x")
    assert not storage.is_writable("https://host/x")


def test_the_user_s_own_configuration_counts(
    s3_server: str, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    chosen = {"endpoint_url": s3_server, "config_kwargs": {"read_timeout": 5}}
    monkeypatch.setitem(fsspec.config.conf, "s3", chosen)
    objects.write(f"{s3_folder}/x", CONTENT)
    assert objects.read(f"{s3_folder}/x") == CONTENT


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtra, match=r"'gcsfs'.*pip install .gcsfs>="):
        objects.read("gs://bucket/x")


def test_threads_and_forks(s3_folder: str) -> None:
    objects.write(f"{s3_folder}/x", CONTENT)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(objects.read, [f"{s3_folder}/x"] * 16)) == {CONTENT}
    child = fork()
    if child == 0:
        os._exit(0 if objects.read(f"{s3_folder}/x") == CONTENT else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
