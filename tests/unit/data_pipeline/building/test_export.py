"""An export is plain WebDataset, whole or visibly not, goes on where it was stopped, and overwrites
nothing.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset
from torch.utils.data import DataLoader

from data_pipeline.building import export as module
from data_pipeline.building.export import PARTIAL, RECORD, export
from data_pipeline.format.manifest import Manifest, ShardInfo
from data_pipeline.format.writing import write_shard
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds.webdataset import Config as Source
from samestep.errors import ConfigError, DataError
from samestep.storage import flock, objects
from tests.datasets import save_manifest


@pytest.fixture
def dataset(dataset_folder: Path, tmp_path: Path) -> Path:
    """Two training shards and a held-out one, of 20 documents each, with sentences."""
    return make(dataset_folder, tmp_path / "dataset")


def make(original: Path, folder: Path, settings: dict | None = None, labels: bool = False) -> Path:
    """A dataset with the tokens of another one; each document has two parts."""
    shutil.copytree(original / "tokenizer", folder / "tokenizer")
    whole = Dataset.open(original)
    shard = whole.open_shard(whole.shards("heldout")[0])
    tokens = [shard.tokens[start : start + 20] for start in shard.start[:20]]

    def write(name: str, first: int) -> ShardInfo:
        return write_shard(
            folder / f"{name}.tar",
            tokens,
            np.array([(0, first + line) for line in range(20)], np.uint32),
            np.dtype(np.uint16),
            [np.array([0, 5])] * 20,
            [np.array([float(line)], np.float32) for line in range(20)] if labels else None,
        )

    train = (write("train-000000", 1), write("train-000003", 21))
    splits = {"train": train, "heldout": (write("heldout-000002", 41),)}
    save_manifest(folder, "topics", 60, splits, settings or {"sentences": "rules"})
    return folder


def samples(paths: list[str]) -> list[dict]:
    return list(webdataset.WebDataset(paths, shardshuffle=False).decode())


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_each_document_is_a_sample_that_the_library_decodes(
    dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "data_pipeline.building.export"):
        export(f"{dataset}", f"{tmp_path}/out/")
    opened = Dataset.open(dataset)
    expected = []
    for split in ("heldout", "train"):
        for info in opened.shards(split):
            shard = opened.open_shard(info, sentences=True)
            for start, length, origin in zip(shard.start, shard.length, shard.origin, strict=True):
                expected.append((shard.tokens[start : start + length], "topics", origin[1]))
    found = samples(sorted(str(path) for path in (tmp_path / "out").glob("*.tar")))
    assert len({sample["__key__"] for sample in found}) == len(expected) == len(found)
    for sample, (tokens, source, line) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(sample["tokens.npy"], tokens)
        assert sample["tokens.npy"].dtype == np.uint16
        assert (sample["json"]["source"], sample["json"]["line"]) == (source, line)
        assert sample["json"]["sentences"] == [0, 5]
        assert sample["txt"] == opened.tokenizer.decode(tokens)
    record = json.loads((tmp_path / "out" / RECORD).read_bytes())
    assert sum(split["documents"] for split in record["splits"].values()) == len(found)
    assert "is not the original text" in record["lossy"]
    assert f"{len(found)} documents, 3 shards written, 0 were there" in caplog.text
    assert "txt is decoded from the tokens and is not the original text" in caplog.text
    assert f"{tmp_path}/out/train-{{000000..000001}}.tar" in caplog.text
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").exists()


def test_two_workers_of_a_data_loader_share_the_shards(dataset: Path, tmp_path: Path) -> None:
    export(str(dataset), f"{tmp_path}/out")
    urls = f"{tmp_path}/out/train-{{000000..000001}}.tar"
    stream = webdataset.WebDataset(urls, shardshuffle=False).decode()
    loaded = list(DataLoader(stream, batch_size=None, num_workers=2))
    expected = {sample["__key__"]: sample["tokens.npy"].tolist() for sample in stream}
    assert {each["__key__"]: each["tokens.npy"].tolist() for each in loaded} == expected
    assert len(loaded) == len(expected)


def test_a_stopped_export_has_no_half_shard_and_goes_on(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    export(str(dataset), f"{tmp_path}/whole")
    fill, calls = module._fill, []

    def stopped(shard, manifest, tokenizer, name, file):
        calls.append(name)
        if len(calls) == 2:
            file.write(bytes(5000))
            raise KeyboardInterrupt
        fill(shard, manifest, tokenizer, name, file)

    monkeypatch.setattr(module, "_fill", stopped)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export(str(dataset), str(out))
    (out / ".train-000001.tar.0123456789abcdef.tmp").write_bytes(b"as after kill -9")
    assert [path.name for path in out.glob("*.tar")] == [f"{calls[0]}.tar"]
    assert (out / PARTIAL).exists()
    assert not (out / RECORD).exists()
    with caplog.at_level(logging.INFO, "data_pipeline.building.export"):
        export(str(dataset), str(out))
    assert "2 shards written, 1 were there" in caplog.text
    assert digests(out) == digests(tmp_path / "whole")
    (out / "train-000000.tar").unlink()
    export(str(dataset), str(out))
    assert digests(out) == digests(tmp_path / "whole")
    export(str(dataset), str(out))
    assert len(calls) == 5, "a whole export is left as it is"


def test_a_bucket_gets_the_same_files(dataset: Path, tmp_path: Path, s3_folder: str) -> None:
    manifest = Manifest.load(dataset)
    replace(manifest, splits={"train": manifest.splits["train"][:1]}).save(dataset)
    export(str(dataset), f"{tmp_path}/local")
    export(str(dataset), f"{s3_folder}/out")
    assert objects.names(f"{s3_folder}/out") == sorted(
        path.name for path in (tmp_path / "local").iterdir() if path.name != ".lock"
    )
    for path in (tmp_path / "local").glob("*.tar"):
        assert objects.read(f"{s3_folder}/out/{path.name}") == path.read_bytes()
    objects.write(f"{s3_folder}/taken/a.txt", b"a")
    with pytest.raises(DataError, match=r"taken is neither empty nor an export. Empty it, or"):
        export(str(dataset), f"{s3_folder}/taken")


def test_targets_that_are_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset is neither empty nor an export. Empty it"):
        export(str(dataset), str(dataset))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file cannot be read: Not a directory"):
        export(str(dataset), f"{tmp_path}/file")
    with pytest.raises(DataError, match=r"cannot write to \S+file/out: Not a directory"):
        export(str(dataset), f"{tmp_path}/file/out")
    with pytest.raises(ConfigError, match=r"https://example.com/a cannot be written"):
        export(str(dataset), "https://example.com/a?signature=5ec7e7")
    export(str(dataset), f"{tmp_path}/out")
    manifest = Manifest.load(dataset)
    replace(manifest, splits={**manifest.splits, "heldout": ()}).save(dataset)
    with pytest.raises(DataError, match=r"out holds the export of another dataset. Empty it"):
        export(str(dataset), f"{tmp_path}/out")
    draft = tmp_path / "hidden" / ".cache" / ".draft.tmp"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"of somebody else")
    export(str(dataset), f"{tmp_path}/hidden")
    assert draft.exists()
    (tmp_path / "busy").mkdir()
    with flock.open_lock(tmp_path / "busy" / ".lock") as lock:
        flock.flock(lock, flock.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another export writes to \S+busy. Wait until"):
            export(str(dataset), f"{tmp_path}/busy")


def test_a_damaged_shard_is_not_exported(dataset: Path, tmp_path: Path) -> None:
    content = bytearray((dataset / "train-000003.tar").read_bytes())
    content[2000] ^= 1
    (dataset / "train-000003.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"train-000003.tar is truncated or damaged"):
        export(str(dataset), f"{tmp_path}/out")
    assert not (tmp_path / "out" / "train-000001.tar").exists()
    assert not (tmp_path / "out" / RECORD).exists()


def test_a_manifest_that_says_something_else_is_an_error_of_the_data(
    dataset: Path, tmp_path: Path
) -> None:
    manifest = Manifest.load(dataset)
    replace(manifest, files=()).save(dataset)
    with pytest.raises(DataError, match=r"heldout-000002.tar of .* 1 files, and .* says 20 of 0."):
        export(str(dataset), f"{tmp_path}/out")
    fewer = tuple(replace(shard, documents=19) for shard in manifest.splits["train"])
    replace(manifest, splits={"train": fewer}).save(dataset)
    with pytest.raises(DataError, match=r"has 20 documents of 1 files, and .* says 19 of 1."):
        export(str(dataset), f"{tmp_path}/other")


def test_texts_and_labels_of_rows_are_kept(dataset_folder: Path, tmp_path: Path) -> None:
    task = {"target": "regression", "labels": ["score"]}
    make(dataset_folder, tmp_path / "rows", {"task": task}, labels=True)
    make(dataset_folder, tmp_path / "pairs", {"target_file": 0})
    decode = Dataset.open(tmp_path / "rows").tokenizer.decode
    for kind in ("rows", "pairs"):
        export(f"{tmp_path}/{kind}", f"{tmp_path}/out/{kind}")
        for number, sample in enumerate(samples([f"{tmp_path}/out/{kind}/train-000000.tar"])):
            about = {"source": "topics", "line": number + 1, "texts": [0, 5]}
            assert sample["json"] == about | ({"labels": [number]} if kind == "rows" else {})
            tokens = sample["tokens.npy"]
            assert sample["txt"] == f"{decode(tokens[:5])}\n{decode(tokens[5:])}"
    record = json.loads((tmp_path / "out" / "rows" / RECORD).read_bytes())
    assert record["task"] == {"kind": "regression", "labels": ["score"]}


def test_an_export_is_a_source(dataset: Path, tmp_path: Path) -> None:
    export(str(dataset), f"{tmp_path}/out")
    source = Source((f"{tmp_path}/out/train-{{000000..000001}}.tar",)).build()
    found = [source.parse(record) for record in source.records()]
    paths = sorted(map(str, (tmp_path / "out").glob("train-*.tar")))
    assert found == [sample["txt"] for sample in samples(paths)]
