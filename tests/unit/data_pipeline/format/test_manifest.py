import dataclasses
import json

import numpy as np
import pytest

from data_pipeline.format.manifest import Manifest, ShardInfo, token_dtype
from samestep.errors import DataError

SHARD = ShardInfo("train-000000.tar", documents=2, tokens=30, bytes=2048, sha256="ab" * 32)
MANIFEST = Manifest(
    format=1,
    tokenizer_fingerprint="cd" * 32,
    vocab_size=100,
    dtype="uint16",
    source={"kind": "jsonl", "paths": ["a.jsonl"], "field": "text"},
    files=("a.jsonl",),
    documents_in=3,
    documents_rejected={"empty document": 1},
    splits={"train": (SHARD,), "heldout": ()},
    settings={"shard_bytes": 1000},
)


def test_a_manifest_is_read_back_as_it_was_and_its_bytes_never_change(tmp_path):
    MANIFEST.save(tmp_path)
    first = (tmp_path / "manifest.json").read_bytes()
    assert Manifest.load(tmp_path) == MANIFEST
    Manifest.load(tmp_path).save(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_the_digest_is_of_the_content(tmp_path):
    def digest(**changes):
        return dataclasses.replace(MANIFEST, **changes).digest

    assert digest(files=("elsewhere/a.jsonl",), source={}) == MANIFEST.digest
    other = dataclasses.replace(SHARD, sha256="00" * 32)
    changes = [
        {"tokenizer_fingerprint": "x"},
        {"dtype": "uint32"},
        {"splits": {"train": (other,), "heldout": ()}},
    ]
    changes += [{"splits": {"train": (SHARD, other)}}, {"splits": {"train": (other, SHARD)}}]
    digests = {MANIFEST.digest, *(digest(**change) for change in changes)}
    assert len(digests) == len(changes) + 1


def test_the_digest_is_computed_once():
    # Each of the shards asks for it, so with thousands of them opening would be quadratic.
    assert MANIFEST.digest is MANIFEST.digest


def test_a_folder_without_manifest_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match=r"holds no finished dataset.*samestep data build"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\xff", '{"format": 1}', '{"format": 1, "splits": 3}']
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"manifest\.json"):
        Manifest.load(tmp_path)


def test_a_manifest_of_another_version_or_with_unknown_keys_is_refused(tmp_path):
    for change in ({"format": 99}, {"surprise": 1}):
        tree = {**dataclasses.asdict(MANIFEST), **change}
        (tmp_path / "manifest.json").write_text(json.dumps(tree))
        with pytest.raises(DataError, match=r"format 99|surprise"):
            Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "../../.ssh/authorized_keys"}, r"splits\.train\[0\]\.name is '\.\./\.\./"),
        ({"name": "/etc/passwd"}, "not the plain name of a file"),
        ({"name": ".."}, "not the plain name of a file"),
        ({"name": "train?.tar"}, "not the plain name of a file"),
        ({"name": 7}, r"splits\.train\[0\]\.name is 7, not a text"),
        ({"sha256": "../evil"}, r"splits\.train\[0\]\.sha256 is '\.\./evil', not a text like"),
        ({"sha256": "AB" * 32}, "not a text like"),
        ({"bytes": -1}, r"splits\.train\[0\]\.bytes is -1, not an integer from 0"),
        ({"tokens": 1.5}, r"splits\.train\[0\]\.tokens is 1\.5, not an integer"),
        ({"documents": True}, r"splits\.train\[0\]\.documents is True, not an integer"),
        ({"bytes": 2**63}, "not an integer from 0"),
    ],
)
def test_a_shard_that_no_build_writes_is_refused_by_name(change, words):
    tree = dataclasses.asdict(MANIFEST)
    tree["splits"]["train"] = [{**tree["splits"]["train"][0], **change}]
    with pytest.raises(DataError, match=f"there is damaged .*{words}"):
        Manifest.parse(json.dumps(tree).encode(), "there")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"splits": {"../train": []}}, "the split '../train' is unknown"),
        ({"dtype": "object"}, "dtype is 'object', not a text like"),
        ({"vocab_size": "100"}, "vocab_size is '100', not an integer"),
        ({"documents_rejected": {"empty": -3}}, r"documents_rejected\.empty is -3"),
    ],
)
def test_other_entries_that_no_build_writes_are_refused(change, words):
    with pytest.raises(DataError, match=words):
        Manifest.parse(json.dumps({**dataclasses.asdict(MANIFEST), **change}).encode(), "there")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"a.jsonl"', '"b.jsonl"'),
        ('"documents": 2', '"documents": 3'),
        ('"vocab_size": 100', '"vocab_size": 108'),
        ('"checksum": "', '"checksum": "0'),
        ('"checksum"', '"checksun"'),
    ],
)
def test_a_flipped_letter_is_noticed(tmp_path, old, new):
    MANIFEST.save(tmp_path)
    file = tmp_path / "manifest.json"
    content = file.read_text()
    assert old in content
    file.write_text(content.replace(old, new, 1))
    with pytest.raises(DataError, match=r"manifest\.json (was changed after the build|is damaged)"):
        Manifest.load(tmp_path)


def test_a_manifest_of_an_older_build_has_no_checksum():
    content = json.dumps(dataclasses.asdict(MANIFEST)).encode()
    assert Manifest.parse(content, "there") == MANIFEST


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32)]
)
def test_tokens_take_the_narrowest_type(size, dtype):
    assert token_dtype(size) == dtype
    assert np.iinfo(dtype).max >= size - 1
