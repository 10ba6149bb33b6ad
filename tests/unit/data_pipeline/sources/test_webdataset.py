"""WebDataset tars are read through the library: lists of shards, addresses, samples, errors."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import zstandard

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.sources import files
from data_pipeline.sources.kinds.webdataset import ALLOW_PIPE, Config
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError
from samestep.storage import attempts, objects
from tests.server import QuietServer
from tests.unit.data_pipeline.sources.test_parquet import parsed


def tar(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if "\0" in name:
                member.name, member.pax_headers = "plain", {"path": name}
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with three shards of two documents."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ALLOW_PIPE, raising=False)
    for name, content in shards().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def shards() -> dict[str, bytes]:
    return {
        f"s-{i}.tar": tar((f"{i}0.txt", f"text {i}0".encode()), (f"{i}1.txt", b"text"))
        for i in "012"
    }


def read(*paths: str, member: str = "txt") -> list[tuple[str, int, str]]:
    return parsed(Config(paths, member).build())


def of(content: bytes, member: str = "txt") -> list[str]:
    """The documents and problems of a tar."""
    Path("a.tar").write_bytes(content)
    return [text for _, _, text in read("a.tar", member=member)]


def test_lists_of_shards_are_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read("s-*.tar")
    assert len(whole) == 6
    assert read("s-{0..2}.tar") == whole
    assert read("s-{2,0}.tar", "s-1.tar") == whole
    assert read("s-0.tar::s-1.tar::s-2.tar") == whole
    assert read(f"{folder}/s-{{0..2}}.tar") == whole
    monkeypatch.setenv("WDS_SHARDS", "0..2")
    assert read("s-{${SHARDS}}.tar") == whole
    (folder / "{0..1}.tar").write_bytes((folder / "s-0.tar").read_bytes())
    assert len(read("{0..1}.tar")) == 2, "the name of a file is no list"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s-{0..3}.tar", "source.paths: no file matches 's-3.tar'"),
        ("s-{0..2.tar", "source.paths: 's-{0..2.tar' is no list of shards"),
        ("s-{${NONE}}.tar", "no list of shards .*wds_WDS_NONE"),
        ("s-0\0.tar", "has a NUL"),
    ],
)
def test_lists_that_name_no_shards(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config((path,)).build()


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(folder: Path) -> Iterator[str]:
    """The address of a web server with the working folder."""
    with QuietServer(("127.0.0.1", 0), partial(Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_web_server_is_read_without_a_program(
    folder: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_DELAYS", (0.01,) * 5)
    monkeypatch.setattr(subprocess, "Popen", None)
    for name, content in shards().items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    source = Config((f"{web}/s-{{0..2}}.tar.gz",)).build()
    assert source.files == tuple(f"{web}/s-{i}.tar.gz" for i in range(3))
    assert [text for *_, text in parsed(source)] == [text for *_, text in read("s-*.tar")]
    (folder / "s-1.tar.gz").unlink()
    with pytest.raises(DataError, match=rf"cannot read {web}/s-1.tar.gz"):
        parsed(source)
    with pytest.raises(ConfigError, match=rf"no file matches '{web}/s-1.tar.gz'"):
        Config((f"{web}/s-{{0..2}}.tar.gz",)).build()


def test_a_bucket_is_read_without_a_program(
    s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    for name, content in shards().items():
        objects.write(f"{s3_folder}/{name}", content)
    found = read(f"{s3_folder}/s-{{0..2}}.tar")
    assert [text for *_, text in found] == [text for *_, text in read("s-*.tar")]
    with pytest.raises(ConfigError, match=r"no file matches 's3://bucket/\S+/s-3.tar'"):
        read(f"{s3_folder}/s-{{0..3}}.tar")


def test_commands_run_only_if_the_environment_allows_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "pipe:cat s-{0..1}.tar"
    with pytest.raises(ConfigError, match=r"'pipe:cat s-0.tar', which a shell would run"):
        read(command)
    monkeypatch.setenv(ALLOW_PIPE, "1")
    source = Config(("s-2.tar", command)).build()
    assert source.files == ("s-2.tar", "pipe:cat s-0.tar", "pipe:cat s-1.tar")
    assert list(source.records()) == list(source.records())
    texts = [text for *_, text in parsed(source)]
    assert texts == ["text 20", "text", "text 00", "text", "text 10", "text"]
    assert list(source.records())[-1].read == 1
    assert len(read("pipe:gzip -c s-0.tar")) == 2, "the content says how it is compressed"
    with pytest.raises(DataError, match=r"cannot read pipe:cat s-0.tar; exit 3: .* ended with 3"):
        read("pipe:cat s-0.tar; exit 3")


def test_compressed_members_are_decompressed() -> None:
    compress = zstandard.ZstdCompressor().compress
    content = tar(
        ("0.txt.gz", gzip.compress(b"one")),
        ("1.TXT.ZST", compress(b"two")),
        ("2.txt.gz", gzip.compress(b"three" * 99)[:-9]),
        ("3.txt.gz", b"not compressed"),
        ("4.txt.gz", gzip.compress(b"five")),
        ("4.txt", b"five"),
    )
    expected = [
        "one",
        "two",
        "! truncated file in a tar: 2.txt.gz",
        "! corrupt file in a tar: 3.txt.gz",
        "! several documents in a sample: 4.txt",
    ]
    assert of(content) == expected
    assert of(content, "txt.gz") == expected
    rows = tar(("0.json.gz", gzip.compress(b'{"text": "one"}')), ("1.json", b'{"text": "two"}'))
    assert of(rows, "json") == ["one", "two"]


def test_members_cannot_hide_a_decompression_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_FREE_BYTES", 2**20)
    bomb = gzip.compress(bytes(2**22))
    assert of(tar(("0.txt", b"one"), ("1.txt.gz", bomb), ("2.txt", b"two"))) == [
        "one",
        "! decompression bomb in a tar: 1.txt.gz",
        "two",
    ]
    small = gzip.compress(b" " * 2**19)
    many = of(tar(*((f"{i}.txt.gz", small) for i in range(9))))
    assert many[-1] == "! decompression bomb"
    assert len(many) < 9


def test_keys_with_dots_are_read_if_the_member_says_so() -> None:
    content = tar(
        ("a.b/v1.0.json", b"{}"),
        ("a.b/v1.0.txt", b"one"),
        ("a.b/v1.1.txt.gz", gzip.compress(b"two")),
        ("a.b/README", b""),
        ("a.b/._v1.1.txt", b""),
        ("a.b/v1.2.en.txt", b"three"),
    )
    assert of(content, "*.txt") == ["one", "two", "three"]
    assert of(content, "*.en.TXT")[-1] == "three"
    assert of(content)[0].startswith("! no member 'txt' in a sample: a.b/v1.0.txt. Its suffix")


def test_a_name_twice_in_a_sample_is_counted() -> None:
    content = tar(("0.txt", b"a"), ("0.txt", b"b"), ("1.txt", b"c"), ("1.__key__", b""))
    assert of(content) == [
        "! a name twice in a sample: 0.txt",
        "c",
    ]


def test_names_by_which_the_library_marks_samples_cost_no_document() -> None:
    """It drops a sample with a member __bad__."""
    content = tar(("0.txt", b"a"), ("0.__bad__", b""), ("1.__local_path__", b""), ("1.txt", b"b"))
    assert of(content) == ["a", "b"]


def test_a_list_of_endless_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 1,000,000 files"):
        Config(("a-{0..999999999}.tar",)).build()
    with pytest.raises(ConfigError, match="more than 1,000,000 files"):
        Config(("{0..9999}/{0..9999}.tar",)).build()


def test_the_sample_before_the_damage_is_read_and_none_is_missed_behind_it() -> None:
    whole = tar(("0.txt", b"one"), ("0.jpg", bytes(600)), ("1.jpg", b"x"), ("1.txt", bytes(600)))
    assert of(whole[: 3 * 512 + 700]) == ["one", "! truncated file"]
    assert of(whole[: 7 * 512 + 700]) == ["one", "! truncated file"]


@pytest.mark.parametrize("name", ["a\0.txt", "a" * 5000 + ".txt"])
def test_names_that_no_file_has_end_the_tar(name: str) -> None:
    first, last = of(tar(("0.txt", b"one"), (name, b"two"), ("1.txt", b"three")))
    assert first == "one"
    assert last.startswith("! the name of a member is long or has a NUL: a")


@pytest.mark.parametrize("member", ["pkl", "a.pyd", "*.PICKLE", "pth.gz"])
def test_pickles_are_refused_by_name(member: str) -> None:
    with pytest.raises(ConfigError, match="a pickle, which can run any code and is never read"):
        Config(("s-0.tar",), member)


def test_workers_decode_without_the_library() -> None:
    program = (
        "import sys; from data_pipeline.sources.kinds.webdataset import Config\n"
        "source = Config(('s-0.tar',), 'json').build()\n"
        "assert source.decode(b'{\"text\": \"one\"}') == 'one'\n"
        "sys.exit(bool({'torch', 'webdataset'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.long
def test_any_number_of_workers_builds_the_same(dataset_folder: Path) -> None:
    def built(name: str, workers: int) -> dict[str, bytes]:
        build(
            BuildConfig(
                source=Config(("s-{0..2}.tar",)),
                tokenizer=TokenizerConfig(path=str(dataset_folder / "tokenizer")),
                output=name,
                workers=workers,
                shard_bytes=10,
                heldout_fraction=0.0,
            )
        )
        return {path.name: path.read_bytes() for path in Path(name).glob("*.tar")}

    one = built("one", 1)
    assert one == built("two", 2)
    assert len(one) > 2
