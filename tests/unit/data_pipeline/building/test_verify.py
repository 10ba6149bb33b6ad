"""`samestep data verify` sees every flipped bit, and lists the files that it cannot compare."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.push import push
from data_pipeline.building.verify import unsealed, verify
from data_pipeline.cli import _verify
from data_pipeline.dedup.kinds import exact
from data_pipeline.format.manifest import MANIFEST, Manifest
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds import classification, jsonl
from data_pipeline.tokenizers.settings import SAVED_FILES
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import DataError
from samestep.storage import objects
from trainer.inspect.fetch import _dataset

TEXTS = [f"document {i} has the words w{i % 7} and w{i % 5}. And w{i % 3}." for i in range(40)]
# Tokenizer, and settings of the build.
DATASETS = {
    "wordpiece": ({"algorithm": "wordpiece", "vocab_size": 60}, {"sentences": "rules"}),
    "bpe": ({"algorithm": "bpe", "vocab_size": 270}, {"dedup": exact.Config()}),
    "sentencepiece": ({"algorithm": "unigram", "vocab_size": 34}, {}),
    "task": ({"algorithm": "words", "vocab_size": 40}, {}),
}


@pytest.fixture(scope="module", params=DATASETS)
def built(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer, settings = DATASETS[request.param]
    config = TokenizerConfig(str(folder / "tokenizer"), **tokenizer)
    config.train(TEXTS).save(folder / "tokenizer")
    lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(TEXTS)]
    lines += [lines[3], "no JSON"] if request.param != "task" else []
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    paths = (str(folder / "texts.jsonl"),)
    source = jsonl.Config(paths)
    if request.param == "task":
        source = classification.Config(paths, texts=("text",), labels=("a", "b"))
    settings = {"on_error": "skip", "heldout_fraction": 0.2, **settings}
    build(Config(source, config, str(folder / "built"), workers=1, **settings))
    return folder / "built"


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def damaged(content: bytes) -> Iterator[bytes]:
    """Yields contents with one flipped bit, and of another size."""
    draw = np.random.default_rng(0)
    for at in {0, len(content) - 1, *draw.integers(0, len(content), 5).tolist()}:
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(draw.integers(8))
        yield bytes(flipped)
    yield from (b"", content[:-1], content + b"\n")


def problems_of(folder: Path) -> list[str]:
    try:
        return verify(folder)
    except DataError as error:  # without a manifest there is nothing to compare with
        return [str(error)] if MANIFEST in str(error) else []


def test_every_flipped_bit_is_seen(built, tmp_path):
    assert verify(built) == unsealed(str(built)) == []
    folder = Path(shutil.copytree(built, tmp_path / "copy"))
    names = files_of(folder)
    assert {MANIFEST, *(f"tokenizer/{name}" for name in SAVED_FILES[1:3])} < set(names)
    if built.parent.name.startswith("bpe"):
        assert {"rejected.jsonl", "duplicates.jsonl"} < set(names)
    cached = [name for name in names if name.startswith(".cache")]
    for name in set(names).difference(cached[1:]):
        content = (folder / name).read_bytes()
        for other in damaged(content):
            (folder / name).write_bytes(other)
            assert any(name in problem for problem in problems_of(folder)), name
        (folder / name).unlink()
        if name not in cached:  # which may be deleted
            assert any(name in problem for problem in problems_of(folder))
        (folder / name).write_bytes(content)
    assert verify(folder) == []


def test_a_changed_tokenizer_is_refused_when_a_run_begins(built, tmp_path):
    for name in files_of(built / "tokenizer"):
        folder = Path(shutil.copytree(built, tmp_path / name))
        file = folder / "tokenizer" / name
        content = file.read_bytes()
        for other in damaged(content):
            file.write_bytes(other)
            with pytest.raises(DataError, match=f"{name} has changed since the build"):
                Dataset.open(folder).tokenizer  # noqa: B018
        file.unlink()
        with pytest.raises(DataError, match=f"cannot read .*{name}"):
            Dataset.open(folder).tokenizer  # noqa: B018
        file.write_bytes(content)
        assert Dataset.open(folder).tokenizer


def test_files_without_a_hash_are_listed(built, tmp_path, capsys):
    folder = Path(shutil.copytree(built, tmp_path / "copy"))
    for name in ("notes.txt", "train-000099.tar", "tokenizer/vocab.txt"):
        (folder / name).write_text("another")
    args = argparse.Namespace(folder=str(folder))
    assert _verify(args) == 0
    lines = capsys.readouterr().out.splitlines()
    others = ["notes.txt", "tokenizer/vocab.txt", "train-000099.tar"]
    assert lines[:-1] == [f"{name}: the manifest does not name it" for name in others]
    assert "is whole" in lines[-1]


def test_a_manifest_of_an_earlier_version_stays_readable(built, tmp_path):
    folder = Path(shutil.copytree(built, tmp_path / "copy"))
    now = Manifest.load(folder)
    dataclasses.replace(now, small_files=None).save(folder)
    stored = json.loads((folder / MANIFEST).read_text())
    assert not stored.keys() & {"small_files", "scored"}
    old = Manifest.load(folder)
    assert old.digest == now.digest
    assert Dataset.open(folder).tokenizer.fingerprint == now.tokenizer_fingerprint
    assert verify(folder) == []
    reason = "its bytes are not compared, since an earlier version has built the dataset"
    assert unsealed(str(folder)) == [f"{name}: {reason}" for name in sorted(now.small_files)]


@pytest.mark.parametrize(
    ("name", "info", "message"),
    [
        ("../../passwd", {"bytes": 1, "sha256": "0" * 64}, "small_files has"),
        ("tokenizer/../x", {"bytes": 1, "sha256": "0" * 64}, "small_files has"),
        ("rejected.jsonl", {"bytes": 1, "sha256": "x"}, r"rejected\.jsonl'\]\.sha256 is 'x'"),
        ("rejected.jsonl", {"bytes": -1, "sha256": "0" * 64}, r"rejected\.jsonl'\]\.bytes is -1"),
        ("rejected.jsonl", {"bytes": 1}, "is damaged"),
    ],
)
def test_names_and_hashes_of_a_stranger_are_checked(name, info, message, built):
    tree = json.loads((built / MANIFEST).read_text()) | {"small_files": {name: info}}
    del tree["checksum"]
    with pytest.raises(DataError, match=message):
        Manifest.parse(json.dumps(tree).encode(), MANIFEST)


@pytest.mark.long
def test_a_copy_in_a_store_is_sealed_as_well(built, s3_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(built, tmp_path / "copy"))
    file = folder / "tokenizer" / "special_tokens_map.json"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"}", b" }"))
    with pytest.raises(DataError, match=r"special_tokens_map.json have changed"):
        push(folder, s3_folder)
    file.write_bytes(content)
    push(folder, s3_folder)
    assert verify(s3_folder) == unsealed(s3_folder) == []
    fetched = _dataset(s3_folder, tmp_path / "fetched")
    assert verify(fetched) == unsealed(str(fetched)) == []
    cached = [name for name in files_of(folder) if name.startswith(".cache")]
    for name in ("tokenizer/tokenizer_config.json", *cached[:1]):
        stored = objects.read(f"{s3_folder}/{name}")
        objects.write(f"{s3_folder}/{name}", stored[:-1] + b"!")
        assert any(name in problem for problem in verify(s3_folder)), name
        objects.write(f"{s3_folder}/{name}", stored)
    objects.write(f"{s3_folder}/more", b"")
    assert unsealed(s3_folder) == ["more: the manifest does not name it"]
