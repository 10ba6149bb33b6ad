"""Text is read from web servers and the Hub as from the disk.

Same records, and never a shorter dataset in silence.
"""

from __future__ import annotations

import gzip
import io
import json

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from data_pipeline.building import build, decontamination
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.building.tokenizer_training import train_tokenizer
from data_pipeline.sources.kinds import huggingface, jsonl, parquet, text
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError
from samestep.storage import attempts, objects
from tests.hub import COMMIT, running_hub
from tests.unit.data_pipeline.sources.test_parquet import parsed

TEXTS = [f"document {i} " + "of some words " * (i % 50) for i in range(3000)]
JSON_LINES = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()


def parquet_bytes(texts) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file, row_group_size=500)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "_DELAYS", (0.01,) * 5)
    with running_hub(tmp_path / "repositories", tmp_path / "cache") as hub:
        hub.write("datasets/owner/corpus/data/a.jsonl", JSON_LINES)
        hub.write("datasets/owner/corpus/data/b.jsonl.gz", gzip.compress(JSON_LINES))
        hub.write("datasets/owner/corpus/rows/a.parquet", parquet_bytes(TEXTS[:2000]))
        hub.write("datasets/owner/corpus/rows/b.parquet", parquet_bytes(TEXTS[2000:]))
        yield hub


def texts_of(source):
    return [document for _, _, document in parsed(source)]


def test_patterns_on_the_hub_are_listed_and_read_in_order(hub):
    source = jsonl.Config((f"hf://datasets/owner/corpus@{COMMIT}/data/*.jsonl*",)).build()
    root = f"hf://datasets/owner/corpus@{COMMIT}/data"
    assert source.files == (f"{root}/a.jsonl", f"{root}/b.jsonl.gz")
    assert texts_of(source) == TEXTS * 2
    assert list(source.records())[-1].read == 1


def test_the_signature_of_an_address_does_not_get_into_the_dataset(hub, tmp_path):
    def signed(signature):
        query = f"name=a(1).jsonl&X-Amz-Signature={signature}"
        address = f"{hub.endpoint}/datasets/owner/corpus/resolve/main/data/b.jsonl.gz?{query}"
        return BuildConfig(
            source=jsonl.Config((address,)),
            tokenizer=TokenizerConfig(path=str(tmp_path / "tokenizer"), vocab_size=100),
            output=str(tmp_path / "dataset"),
            limit="20kB",
            workers=1,
        )

    train_tokenizer(signed("5ec7e7"))
    built = build.build(signed("5ec7e7"))
    assert [file.rpartition("/")[2] for file in built.files] == ["b.jsonl.gz"]
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"5ec7e7" not in file.read_bytes(), file
    assert build.build(signed("another")) == built


def test_the_signature_of_a_test_does_not_get_into_an_error(hub):
    hub.write("datasets/owner/corpus/test.jsonl", b'{"text": ""}')
    address = f"{hub.endpoint}/datasets/owner/corpus/resolve/main/test.jsonl"
    test = decontamination.Config(jsonl.Config((f"{address}?X-Amz-Signature=5ec7e7",)))
    with pytest.raises(ConfigError) as caught:
        test.build()
    assert f"decontaminate.source: {address}:1: empty document. " in str(caught.value)


def test_a_pattern_matches_files_not_folders(hub):
    hub.write("datasets/owner/corpus/about.txt", b"about")
    assert text.Config(("hf://datasets/owner/corpus/*",)).build().files == (
        "hf://datasets/owner/corpus/about.txt",
    )


@pytest.mark.parametrize(
    "root", ["hf://datasets/owner/corpus", "{}/datasets/owner/corpus/resolve/main"]
)
def test_a_name_that_exists_is_no_pattern(hub, root):
    hub.write("datasets/owner/corpus/odd/a[1].txt", b"right")
    hub.write("datasets/owner/corpus/odd/a1.txt", b"wrong")
    assert texts_of(text.Config((f"{root.format(hub.endpoint)}/odd/a[1].txt",)).build()) == [
        "right"
    ]


def test_a_folder_of_the_hub_is_told_from_a_pattern_without_a_match(hub):
    with pytest.raises(ConfigError, match=r"corpus/data' matches a folder, and no file\."):
        text.Config(("hf://datasets/owner/corpus/data",)).build()


def test_an_object_store_is_listed_and_read(s3_folder):
    for name in ("b", "a"):
        objects.write(f"{s3_folder}/deep/{name}.jsonl.gz", gzip.compress(JSON_LINES))
    objects.write(f"{s3_folder}/rows.parquet", parquet_bytes(TEXTS))
    source = jsonl.Config((f"{s3_folder}/**/*.jsonl.gz",)).build()
    assert source.files == (f"{s3_folder}/deep/a.jsonl.gz", f"{s3_folder}/deep/b.jsonl.gz")
    assert texts_of(source) == TEXTS * 2
    assert texts_of(parquet.Config((f"{s3_folder}/rows.parquet",)).build()) == TEXTS


def test_parquet_is_read_by_ranges(hub):
    assert texts_of(parquet.Config(("hf://datasets/owner/corpus/rows/*.parquet",)).build()) == TEXTS


@pytest.mark.parametrize("name", ["data/a.jsonl", "data/b.jsonl.gz"])
def test_a_file_of_a_web_server_is_read_by_its_address(hub, name):
    address = f"{hub.endpoint}/datasets/owner/corpus/resolve/main/{name}"
    assert texts_of(jsonl.Config((address,)).build()) == TEXTS


@pytest.mark.parametrize(
    ("root", "cuts"),
    [("hf://datasets/owner/corpus", 1), ("{}/datasets/owner/corpus/resolve/main", 3)],
)
def test_a_transfer_that_is_cut_is_taken_up_again(hub, root, cuts):
    source = jsonl.Config((f"{root.format(hub.endpoint)}/data/a.jsonl",)).build()
    hub.cut = cuts
    assert texts_of(source) == TEXTS
    assert hub.cut == 0


def test_a_transfer_that_never_ends_whole_is_an_error_not_a_short_corpus(hub):
    source = jsonl.Config(
        (f"{hub.endpoint}/datasets/owner/corpus/resolve/main/data/a.jsonl",)
    ).build()
    hub.cut = 1000
    with pytest.raises(DataError, match=r"cannot read http.*/data/a.jsonl: .*check the network"):
        texts_of(source)


@pytest.mark.parametrize(
    "path",
    [
        "hf://datasets/owner/corpus/data/?.txt",
        "hf://datasets/owner/corpus/data/*.txt",
        "hf://datasets/owner/absent/data/a.txt",
        "ftp://server/a.txt",
    ],
)
def test_what_is_not_there_is_named(hub, path):
    with pytest.raises((ConfigError, DataError)) as caught:
        text.Config((path,)).build()
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dataset_of_the_hub_is_streamed_by_its_name(hub):
    hub.write(
        "datasets/owner/rows/data/train-00000-of-00002.parquet",
        parquet_bytes([*TEXTS[:2000], None]),
    )
    hub.write("datasets/owner/rows/data/train-00001-of-00002.parquet", parquet_bytes(TEXTS[2000:]))
    source = huggingface.Config("owner/rows", revision=COMMIT).build()
    assert source.files == (f"owner/rows@{COMMIT} train",)
    found = parsed(source)
    assert [line for _, line, _ in found] == list(range(1, 3002))
    assert [document for _, _, document in found] == [
        *TEXTS[:2000],
        "! field 'text' is not text",
        *TEXTS[2000:],
    ]


def test_a_split_that_is_shorter_than_its_card_says_is_noticed(hub):
    hub.write("datasets/owner/rows/data/train.parquet", parquet_bytes(TEXTS[:10]))
    splits = "splits: [{name: train, num_bytes: 1, num_examples: 11}]"
    features = "features: [{name: id, dtype: int64}, {name: text, dtype: string}]"
    hub.write(
        "datasets/owner/rows/README.md",
        f"---\ndataset_info: {{{features}, {splits}}}\n---\n".encode(),
    )
    assert texts_of(huggingface.Config("owner/rows").build()) == [
        *TEXTS[:10],
        "! the split ends before row 11",
    ]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"path": "owner/absent"}, "cannot open the dataset 'owner/absent'"),
        ({"path": "owner/rows", "split": "trian"}, "cannot open the dataset 'owner/rows'"),
        ({"path": "owner/rows", "name": "nothing"}, "cannot open the dataset 'owner/rows'"),
        (
            {"path": "owner/rows", "field": "body"},
            "no column 'body'. Set source.field to one of: id, text",
        ),
    ],
)
def test_what_the_dataset_does_not_have_is_named(hub, settings, reason):
    hub.write("datasets/owner/rows/train.parquet", parquet_bytes(TEXTS[:10]))
    with pytest.raises(DataError, match=reason) as caught:
        list(huggingface.Config(**settings).build().records())
    assert "\n" not in str(caught.value)


def test_a_dataset_saved_to_the_disk_is_read(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"meta": [{"body": t} for t in [*TEXTS[:5], None]]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(
        tmp_path / "splits"
    )
    config = huggingface.Config(str(tmp_path / "rows"), field="meta.body")
    assert texts_of(config.build()) == [*TEXTS[:5], "! field 'meta.body' is not text"]
    config = huggingface.Config(str(tmp_path / "splits"), field="meta.body", split="test")
    assert texts_of(config.build()) == TEXTS[:1]


def test_names_with_dots_and_texts_in_bytes_are_read_from_a_dataset(tmp_path):
    import datasets

    def texts(**columns):
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "rows")
        return texts_of(huggingface.Config(str(tmp_path / "rows"), field="meta.body").build())

    assert texts(**{"meta.body": ["flat"], "meta": ["other"]}) == ["flat"]
    assert texts(meta=[{"body": b"deep"}, {"body": b"\xff"}]) == ["deep", "! invalid UTF-8"]
    assert texts(**{"meta.body": ["flat"], "meta": [{"body": "deep"}]}) == [
        "! 'meta.body' is both a name with dots and a path to a nested value. Rename one"
    ]


def test_a_folder_that_is_a_pattern_to_datasets_is_refused(tmp_path):
    """For the folder "rows[1]", `datasets` would read the files of "rows1"."""
    for name, content in (("rows[1]", "right"), ("rows1", "wrong")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"text": content}))
    with pytest.raises(
        DataError, match=r"rows\[1\]' is a pattern to `datasets`.* Rename the folder"
    ):
        texts_of(huggingface.Config(f"{tmp_path}/rows[1]").build())


def test_a_dataset_in_the_cache_needs_no_network(hub, monkeypatch):
    import datasets

    hub.write("datasets/owner/rows/train.parquet", parquet_bytes(TEXTS))
    config = huggingface.Config("owner/rows")
    config.open(streaming=False)
    hub.close()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert texts_of(config.build()) == TEXTS
