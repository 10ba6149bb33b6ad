"""Sources of pairs of texts, and the datasets that are built from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.packing.text_pairs import lengths
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources import BadRecord, PairSource
from data_pipeline.sources.kinds import jsonl_pairs, parallel_text, tsv_pairs
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError


def parsed(source: PairSource) -> list[tuple[str, int, object]]:
    """(file, line, pair or reason) of each record."""
    result = []
    for record in source.records():
        found: object
        try:
            found = source.parse_pair(record)
        except BadRecord as error:
            found = str(error)
        result.append((Path(source.files[record.file]).name, record.line, found))
    return result


def test_json_lines_have_two_fields(tmp_path):
    rows = [
        '{"t": {"en": "one", "de": "eins"}}',
        "",
        '{"t": {"en": " ", "de": "x"}}',
        '{"t": {"en": "x"}}',
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join([*rows, '{"t": {"en": "y", "de": ""}}', "{", '{"t": {"en":1,"de":2}}'])
    )
    source = jsonl_pairs.Config(
        (f"{tmp_path}/*.jsonl",), "t.en", "t.de", prefix="to German: "
    ).build()
    assert [(line, found) for _, line, found in parsed(source)] == [
        (1, ("to German: one", "eins")),
        (3, "empty source"),
        (4, "no field 't.de'"),
        (5, "empty target"),
        (6, "invalid JSON"),
        (7, "field 't.en' is not text"),
    ]
    assert (
        source.parse(next(source.records())) == "to German: one\neins"
    )  # what a tokenizer is trained on


def test_columns_of_tables_are_chosen(tmp_path):
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"7\teins\tone\tx\r\n8\tzwei\n9\t\tthree\n"))
    source = tsv_pairs.Config((f"{tmp_path}/a.tsv.gz",), source=3, target=2).build()
    expected = [(1, ("one", "eins")), (2, "fewer than 3 columns"), (3, "empty target")]
    assert [(line, found) for _, line, found in parsed(source)] == expected
    with pytest.raises(
        ConfigError,
        match=r"source is 2 and target is 2\. Use two different columns, counted from 1",
    ):
        tsv_pairs.Config(("a",), source=2, target=2)


def write_parallel(
    folder: Path, sources: str, targets: str, name: str = "a"
) -> parallel_text.Config:
    for suffix, content in (("en", sources), ("de", targets)):
        (folder / f"{name}.{suffix}").write_bytes(content.encode())
    return parallel_text.Config((f"{folder}/*.en",), (f"{folder}/*.de",))


def test_parallel_files_go_together_line_by_line(tmp_path):
    write_parallel(tmp_path, "\ufeffone\r\n\nthree\n", "\ufeffeins\nzwei\n\n")
    source = write_parallel(tmp_path, "four", "vier\n", "b").build()
    assert [Path(file).name for file in source.files] == ["a.en", "a.de", "b.en", "b.de"]
    assert parsed(source) == [
        ("a.en", 1, ("one", "eins")),
        ("a.en", 2, "empty source"),
        ("a.en", 3, "empty target"),
        ("b.en", 1, ("four", "vier")),
    ]


def test_a_link_to_a_file_of_targets_is_the_partner_of_another_file(tmp_path):
    write_parallel(tmp_path, "one", "eins", "a")
    config = write_parallel(tmp_path, "a unit", "eins", "b")
    (tmp_path / "b.de").unlink()
    (tmp_path / "b.de").symlink_to("a.de")
    assert [texts for _, _, texts in parsed(config.build())] == [
        ("one", "eins"),
        ("a unit", "eins"),
    ]


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        (
            "1\n2\n3\n4\n",
            "1\n2\n",
            ["a.en:3 has no partner in", "a.de. Correct"],
        ),
        ("1\n", "1\n2\n3\n", ["a.de:2 has no partner in", "a.en. Correct"]),
    ],
)
def test_parallel_files_of_different_length_are_refused(tmp_path, sources, targets, words):
    source = write_parallel(tmp_path, sources, targets).build()
    with pytest.raises(DataError) as error:
        list(source.records())
    assert all(word in str(error.value) for word in words), error.value


def test_damage_to_one_of_two_files_is_named_and_the_next_two_are_read(tmp_path):
    config = write_parallel(tmp_path, "one\n" * 9, "", "a")
    write_parallel(tmp_path, "two", "zwei", "b")
    assert parsed(config.build()) == [("a.de", 1, "empty file"), ("b.en", 1, ("two", "zwei"))]
    with pytest.raises(ConfigError, match="source_paths are 2 files and target_paths 1"):
        parallel_text.Config(config.source_paths, (f"{tmp_path}/a.de",)).build()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """300 pairs of parallel text, and a tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    numbers = [f"number {i} of {i * i} things" for i in range(300)]
    write_parallel(folder, "\n".join(numbers), "\n".join(f"{text[::-1]} !" for text in numbers))
    texts = [f"turn: {text} {text[::-1]} !" for text in numbers]
    TokenizerConfig("", "unigram", 120, lowercase=False).train(texts).save(folder / "tokenizer")
    return folder


def tokenizer_of(corpus: Path) -> TokenizerConfig:
    return TokenizerConfig(str(corpus / "tokenizer"), "unigram")


def build_at(corpus: Path, output: Path, workers: int) -> Path:
    source = parallel_text.Config((f"{corpus}/a.en",), (f"{corpus}/a.de",), prefix="turn: ")
    build(
        BuildConfig(
            source,
            tokenizer_of(corpus),
            str(output),
            heldout_fraction=0.1,
            shard_bytes=4000,
            workers=workers,
        )
    )
    return output


def test_a_dataset_gives_back_every_pair_and_is_the_same_from_any_number_of_workers(
    corpus, tmp_path
):
    dataset = Dataset.open(build_at(corpus, tmp_path / "one", 1))
    assert dataset.manifest.target_file == 1
    found = {}
    for info in dataset.manifest.shards:
        shard = dataset.open_shard(info, sentences=True)
        for start, (source, target), (file, line) in zip(
            shard.start, lengths(shard), shard.origin, strict=True
        ):
            assert file == 0
            both = shard.tokens[start : start + source + target]
            found[int(line)] = (
                dataset.tokenizer.decode(both[:source]),
                dataset.tokenizer.decode(both[source:]),
            )
    assert [found[i + 1][0] for i in range(300)] == [
        f"turn: number {i} of {i * i} things" for i in range(300)
    ]
    assert all(
        target[::-1].replace(" ", "")[1:] in source.replace(" ", "")
        for source, target in found.values()
    )
    build_at(corpus, tmp_path / "three", 3)
    for file in sorted((tmp_path / "one").glob("*.*")):
        assert file.read_bytes() == (tmp_path / "three" / file.name).read_bytes()
    config = BuildConfig(
        jsonl_pairs.Config((f"{corpus}/a.en",)), tokenizer_of(corpus), "x", sentences="rules"
    )
    with pytest.raises(
        ConfigError, match="sentences is rules, but pairs and rows of a task have none"
    ):
        build(config)


def test_all_targets_of_a_source_are_in_one_split(corpus, tmp_path):
    rows = [{"source": f"number {i % 20}", "target": f"{i} things"} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = jsonl_pairs.Config((f"{tmp_path}/a.jsonl",))
    config = BuildConfig(source, tokenizer_of(corpus), str(tmp_path / "data"), 0.3, workers=1)
    manifest = build(config)
    dataset = Dataset.open(tmp_path / "data")
    lines = [
        dataset.open_shard(manifest.splits[split][0]).origin[:, 1] - 1
        for split in ("train", "heldout")
    ]
    assert len(lines[1]) > 0
    assert set(lines[0] % 20).isdisjoint(lines[1] % 20)
