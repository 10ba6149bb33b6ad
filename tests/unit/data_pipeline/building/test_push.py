"""A push makes a whole copy of a dataset or none, goes on where it was stopped, and overwrites
nothing unasked.
"""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.building.push import PARTIAL_MANIFEST, push
from data_pipeline.building.verify import verify
from data_pipeline.format.manifest import MANIFEST, Manifest
from data_pipeline.inspection.report import inspect
from data_pipeline.reading.dataset import Dataset
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError
from samestep.storage import Digest, objects


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def dataset(dataset_folder: Path, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(
            dataset_folder, tmp_path / "dataset", ignore=shutil.ignore_patterns(".cache")
        )
    )


def sent(caplog: pytest.LogCaptureFixture, folder: Path, url: str, **options: Any) -> str:
    with caplog.at_level(logging.INFO, "data_pipeline.building.push"):
        caplog.clear()
        push(folder, url, **options)
    return caplog.messages[-1].partition(": ")[2].partition(".")[0]


@pytest.mark.long
def test_a_copy_is_whole_and_looks_like_the_original(
    dataset: Path, s3_folder: str, caplog: Any
) -> None:
    assert sent(caplog, dataset, s3_folder + "/") == "6 shards sent, 0 were there"
    assert verify(s3_folder) == []
    assert objects.read(f"{s3_folder}/{MANIFEST}") == (dataset / MANIFEST).read_bytes()
    assert not objects.exists(f"{s3_folder}/{PARTIAL_MANIFEST}")
    local, remote = Dataset.open(dataset), Dataset.open(s3_folder)
    assert remote.tokenizer.fingerprint == local.tokenizer.fingerprint
    assert remote.name == s3_folder
    first, second = inspect(local), inspect(remote)
    assert (first.forecasts, first.histogram.tolist()) == (
        second.forecasts,
        second.histogram.tolist(),
    )
    assert sent(caplog, dataset, s3_folder) == "0 shards sent, 6 were there"


def test_a_stopped_push_goes_on_and_is_no_dataset_before(
    dataset: Path, s3_folder: str, caplog: Any
) -> None:
    shard = dataset / "train-000004.tar"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"the bytes of .*train-000004.tar have changed"):
        push(dataset, s3_folder)
    with pytest.raises(DataError, match="no finished dataset at that URL"):
        Dataset.open(s3_folder)
    assert not objects.exists(f"{s3_folder}/train-000004.tar")
    content[1000] ^= 1
    shard.write_bytes(content)
    there = sum(name.endswith(".tar") for name in objects.names(s3_folder))
    assert there > 0
    assert sent(caplog, dataset, s3_folder) == f"{6 - there} shards sent, {there} were there"
    assert verify(s3_folder) == []


def test_what_is_wrong_with_a_copy_is_found(dataset: Path, s3_folder: str) -> None:
    push(dataset, s3_folder)
    content = bytearray((dataset / "train-000001.tar").read_bytes())
    content[1000] ^= 1
    objects.write(f"{s3_folder}/train-000001.tar", bytes(content))
    objects.write(f"{s3_folder}/train-000002.tar", bytes(content[:5000]))
    objects.remove(f"{s3_folder}/train-000003.tar")
    objects.write(f"{s3_folder}/tokenizer/tokenizer.json", b"{}")
    found = verify(s3_folder)
    expected = [
        "cannot read the tokenizer",
        "bytes have changed",
        "5000 bytes instead of",
        "cannot read s3://",
    ]
    assert len(found) == len(expected)
    assert all(words in problem for words, problem in zip(expected, found, strict=True)), found


def test_what_is_at_the_address_is_not_overwritten_unasked(
    dataset: Path, s3_folder: str, caplog: Any
) -> None:
    objects.write(f"{s3_folder}/thesis.txt", b"years of work")
    for force in (False, True):
        with pytest.raises(DataError, match="neither empty nor a dataset"):
            push(dataset, s3_folder, force=force)
    objects.remove(f"{s3_folder}/thesis.txt")
    push(dataset, s3_folder)
    manifest = Manifest.load(dataset)
    smaller = Manifest(
        **{**vars(manifest), "splits": {**manifest.splits, "train": manifest.splits["train"][1:3]}}
    )
    smaller.save(dataset)
    with pytest.raises(DataError, match=r"holds another dataset\. .*--force"):
        push(dataset, s3_folder)
    assert sent(caplog, dataset, s3_folder, force=True) == "3 shards sent, 0 were there"
    assert verify(s3_folder) == []
    assert len([name for name in objects.names(s3_folder) if name.endswith(".tar")]) == 3


def without_a_shard(dataset: Path) -> Path:
    """Another dataset with the same names of files, and a tokenizer of other ones."""
    other = Path(shutil.copytree(dataset, dataset.with_name("other")))
    manifest = Manifest.load(other)
    train = manifest.splits["train"][1:]
    replace(manifest, splits={**manifest.splits, "train": train}).save(other)
    (other / "tokenizer" / "tokenizer.json").rename(other / "tokenizer" / "spiece.model")
    return other


def test_a_forced_push_leaves_nothing_of_the_former_dataset(dataset: Path, s3_folder: str) -> None:
    (dataset / ".cache").mkdir()
    (dataset / ".cache" / "old.counts").write_bytes(b"counts")
    other = without_a_shard(dataset)
    (other / ".cache" / "old.counts").rename(other / ".cache" / "new.counts")
    (dataset / "rejected.jsonl").write_text("{}\n")
    push(dataset, s3_folder)
    push(other, s3_folder, force=True)
    assert objects.names(f"{s3_folder}/.cache") == ["new.counts"]
    assert objects.names(f"{s3_folder}/tokenizer") == sorted(
        path.name for path in (other / "tokenizer").iterdir()
    )
    assert not objects.exists(f"{s3_folder}/rejected.jsonl")


def test_a_push_removes_the_tokenizer_that_a_former_dataset_has_left(
    dataset: Path, s3_folder: str
) -> None:
    other = without_a_shard(dataset)
    push(other, s3_folder)
    objects.write(f"{s3_folder}/tokenizer/tokenizer.json", b"{}")
    push(other, s3_folder)
    assert "tokenizer.json" not in objects.names(f"{s3_folder}/tokenizer")


@pytest.mark.parametrize(
    ("action", "name"),
    [
        ("remove", "train-000001.tar"),
        ("upload", PARTIAL_MANIFEST),
        ("remove", MANIFEST),
        ("upload", "tokenizer/spiece.model"),
    ],
)
def test_a_forced_push_that_was_stopped_goes_on(
    dataset: Path, s3_folder: str, monkeypatch: pytest.MonkeyPatch, action: str, name: str
) -> None:
    other = without_a_shard(dataset)
    push(dataset, s3_folder)
    do = getattr(objects, action)

    def stop(*arguments: Any) -> Any:
        if arguments[-1] == f"{s3_folder}/{name}":
            raise DataError("stopped here")
        return do(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(objects, action, stop)
        with pytest.raises(DataError, match="stopped here"):
            push(other, s3_folder, force=True)
    push(other, s3_folder, force=True)
    shards = [shard.name for shard in Manifest.load(other).shards]
    assert objects.names(s3_folder) == sorted([MANIFEST, "tokenizer", *shards])


@pytest.mark.parametrize("force", [False, True])
def test_the_manifest_is_sent_once_under_each_name(
    dataset: Path, s3_folder: str, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    if force:
        push(without_a_shard(dataset), s3_folder)
    upload, uploaded = objects.upload, list[str]()

    def record(file: Path, url: str) -> Digest:
        uploaded.append(url.removeprefix(f"{s3_folder}/"))
        return upload(file, url)

    monkeypatch.setattr(objects, "upload", record)
    push(dataset, s3_folder, force=force)
    manifests = [name for name in uploaded if "manifest" in name]
    assert manifests == [PARTIAL_MANIFEST, MANIFEST]


def test_a_tokenizer_that_cannot_be_downloaded_again_stays(
    dataset: Path, s3_folder: str, caplog: Any
) -> None:
    push(dataset, s3_folder)
    mirror = Dataset.open(s3_folder).path
    TokenizerConfig("x", "wordpiece", 300).train(["other words"]).save(mirror / "tokenizer")
    before = {path: path.read_bytes() for path in mirror.rglob("*") if path.is_file()}
    whole = objects.read(f"{s3_folder}/tokenizer/tokenizer.json")
    objects.remove(f"{s3_folder}/tokenizer/tokenizer.json")
    with pytest.raises(DataError, match=r"has fingerprint .* Restore that tokenizer"):
        assert Dataset.open(s3_folder).tokenizer
    assert "cannot download the tokenizer of s3://" in caplog.text
    assert {path: path.read_bytes() for path in mirror.rglob("*") if path.is_file()} == before
    objects.write(f"{s3_folder}/tokenizer/tokenizer.json", whole)
    assert Dataset.open(s3_folder).tokenizer


def test_a_copy_of_another_tokenizer_in_the_cache_is_replaced(
    dataset: Path, s3_folder: str
) -> None:
    push(dataset, s3_folder)
    fingerprint = Manifest.load(dataset).tokenizer_fingerprint
    mirror = Dataset.open(s3_folder).path / "tokenizer"
    TokenizerConfig("x", "wordpiece", 300).train(["other words"]).save(mirror)
    assert Dataset.open(s3_folder).tokenizer.fingerprint == fingerprint
    (mirror / "tokenizer.json").write_text("{}")
    assert Dataset.open(s3_folder).tokenizer.fingerprint == fingerprint
    objects.write(f"{s3_folder}/tokenizer/tokenizer.json", b"{}")
    (mirror / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        assert Dataset.open(s3_folder).tokenizer


@pytest.mark.parametrize("url", ["folder", "https://example.org/dataset"])
def test_an_address_that_cannot_be_written_is_refused(dataset: Path, url: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{url} cannot be written. Name a folder of an object store"
    ):
        push(dataset, url)
