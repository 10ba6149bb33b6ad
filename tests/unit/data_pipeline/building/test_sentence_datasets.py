"""Datasets that know where sentences begin.

How they are built, and the pairs that are made of them.
"""

import dataclasses
import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.verify import verify
from data_pipeline.inspection.report import inspect, report
from data_pipeline.inspection.show import show
from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.config import Config as DataConfig
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.sentences import split
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError
from samestep.examples import PackSpec
from samestep.terminal import Console
from trainer.objectives.kinds import mlm, mlm_nsp
from trainer.strategies import Replica

DOCUMENTS = 240


def make_text(index: int) -> str:
    """Sentences that name their document and place: "D7 s0 w31 w5.".

    Of one document nothing is left.
    """
    if index == 5:
        return "\x00"
    draw = np.random.default_rng(index)
    return " ".join(
        f"D{index} s{i} {' '.join(f'w{word}' for word in draw.integers(0, 50, draw.integers(1, 8)))}."  # noqa: E501
        for i in range(draw.integers(1, 12))
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": make_text(i)}) + "\n" for i in range(DOCUMENTS)]
    (folder / "a.jsonl").write_text("".join(lines))
    tokenizer = TokenizerConfig(str(folder / "tokenizer"), vocab_size=300)
    tokenizer.train(make_text(i) for i in range(DOCUMENTS)).save(tokenizer.path)
    source = jsonl.Config((f"{folder}/a.jsonl",))
    return Config(
        source,
        tokenizer,
        str(folder / "built"),
        shard_bytes=9000,
        heldout_fraction=0.2,
        workers=1,
        sentences="rules",
        on_error="skip",
    )


@pytest.fixture(scope="module")
def built(config) -> Path:
    build(config)
    return Path(config.output)


@pytest.fixture(scope="module")
def plain(config) -> Path:
    """Built without sentences, and by more processes."""
    folder = f"{config.output}_plain"
    build(dataclasses.replace(config, output=folder, sentences=None, workers=2))
    return Path(folder)


def files_of(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*.*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_shards_of_one_document_have_no_sentence_pairs(config, tmp_path) -> None:
    folder = tmp_path / "built"
    build(dataclasses.replace(config, output=str(folder), shard_bytes=1, limit="1kB"))
    console = Console(file=io.StringIO(), width=120)
    inspection = inspect(Dataset.open(folder))
    report(inspection, console)
    (pairs, _) = (each for each in inspection.forecasts if each.policy == "pairs")
    assert (pairs.examples, pairs.real_share) == (0, 0)
    assert isinstance(console.file, io.StringIO)
    assert "0.0%" in console.file.getvalue()


def test_shards_say_where_the_sentences_of_every_document_begin(built) -> None:
    dataset = Dataset.open(built)
    assert dataset.manifest.has_sentences
    assert dataset.manifest.settings["sentences"] == "rules 1"
    assert dataset.manifest.documents_rejected == {"no tokens": 1}
    seen = 0
    for info in dataset.manifest.shards:
        shard = dataset.open_shard(info, sentences=True)
        first = np.cumsum(shard.length) - shard.length
        for (_, line), start, length, begin in zip(
            shard.origin, shard.start, shard.length, first, strict=True
        ):
            parts = dataset.tokenizer.encode_batch(split(make_text(line - 1), "rules"))
            inside = shard.sentences[
                (shard.sentences >= begin) & (shard.sentences < begin + length)
            ]
            assert np.diff([*inside, begin + length]).tolist() == [len(part) for part in parts]
            assert shard.tokens[start : start + length].tolist() == np.concatenate(parts).tolist()
            seen += 1
        assert len(dataset.open_shard(info).sentences) == 0  # not read unless asked for
    assert seen == DOCUMENTS - 1
    assert verify(built) == []


def test_boundaries_change_neither_tokens_nor_a_build_without_them(built, plain) -> None:
    one, other = Dataset.open(plain), Dataset.open(built)
    assert one.manifest.settings.keys() == {"heldout_fraction", "shard_bytes"}
    assert other.manifest.digest != one.manifest.digest
    for info, with_sentences in zip(one.manifest.shards, other.manifest.shards, strict=True):
        assert info.tokens == with_sentences.tokens
        shards = one.open_shard(info), other.open_shard(with_sentences)
        texts = [
            [s.tokens[a : a + n].tolist() for a, n in zip(s.start, s.length, strict=True)]
            for s in shards
        ]
        assert texts[0] == texts[1]
        with tarfile.open(one.path / info.name) as tar:
            assert {name.split(".")[1] for name in tar.getnames()} == {
                "tokens",
                "offsets",
                "origin",
            }


def test_the_bytes_do_not_depend_on_the_workers(config, built, tmp_path) -> None:
    build(dataclasses.replace(config, output=str(tmp_path / "other"), workers=2))
    assert files_of(tmp_path / "other") == files_of(built)


def test_other_boundaries_are_another_dataset(config, built) -> None:
    with pytest.raises(DataError, match="built from another source, tokenizer or settings"):
        build(dataclasses.replace(config, sentences="lines"))


def test_damaged_boundaries_are_refused(built, tmp_path) -> None:
    dataset = Dataset.open(built)
    info = dataset.shards("train")[0]
    content = (built / info.name).read_bytes()
    with tarfile.open(built / info.name) as tar:
        member = next(m for m in tar if m.name.endswith("sentences.npy"))
        names = [m.name for m in tar]
    assert names[3] == "000000.sentences.npy"
    broken = bytearray(content)
    broken[member.offset_data + member.size - 8 : member.offset_data + member.size] = b"\x01" * 8
    (tmp_path / info.name).write_bytes(bytes(broken))
    with pytest.raises(DataError, match="the sentences of chunk 000000 do not fit its documents"):
        dataclasses.replace(dataset, path=tmp_path).open_shard(info, sentences=True)
    dataclasses.replace(dataset, path=tmp_path).open_shard(info)


def make_loader(
    folder: Path, index: int = 0, count: int = 1, nsp: bool = True, **settings
) -> StreamingLoader:
    dataset = Dataset.open(folder)
    objective = (mlm_nsp if nsp else mlm).Config().build(dataset.tokenizer.vocabulary)
    config = DataConfig(
        str(folder),
        sequence_length=64,
        packing="pairs",
        lanes=8,
        threads=settings.pop("threads", 0),
    )
    sizes = {"global_batch_size": 24, "micro_batch_size": 5, **settings}
    order, layout = SplitOrder(seed=3), BatchLayout(**sizes, replica=Replica(index, count))
    return StreamingLoader(
        dataset, config, order, layout, pack_spec=objective.pack_spec(64), collate=objective.collate
    )


def rows_of(loader: StreamingLoader, steps: int) -> list[dict[str, torch.Tensor]]:
    """The rows of each step that do not only pad."""
    taken = []
    for _ in range(steps):
        step = next(loader)
        rows = {name: torch.cat([micro_batch[name] for micro_batch in step]) for name in step[0]}
        taken.append({name: value[rows["example"] >= 0] for name, value in rows.items()})
    return taken


def test_pairs_are_what_they_say(built) -> None:
    """By the names in the text: B follows A in the same document, or is from another one."""
    tokenizer = Dataset.open(built).tokenizer
    vocabulary = tokenizer.vocabulary
    labels = []
    for rows in rows_of(make_loader(built), 20):
        original = rows["tokens"].long().scatter(1, rows["predicted"], rows["labels"])
        original[:, 0] = vocabulary.cls  # where unused entries point to
        for tokens, types, label in zip(
            original, rows["token_types"], rows["next_labels"], strict=True
        ):
            real = tokens != vocabulary.pad
            a, b = (tokenizer.decode(tokens[real & (types == t)].tolist()) for t in (0, 1))
            assert a.startswith("[CLS]")
            assert a.endswith("[SEP]")
            assert b.endswith("[SEP]")
            assert a.count("[SEP]") == b.count("[SEP]") == 1
            names = [
                [word for word in text.split() if word[0] in "Ds" and word[1:].isdigit()]
                for text in (a, b)
            ]
            if all(names) and all("D" in name[0] for name in names):
                assert (names[0][0] != names[1][0]) == bool(label)
                labels.append(int(label))
    assert len(labels) > 200
    assert 0.4 < np.mean(labels) < 0.75


@pytest.mark.parametrize(
    ("count", "threads", "micro_batch_size"), [(2, 0, 3), (3, 2, 24), (7, 1, 1)]
)
def test_global_batches_are_the_same_at_any_world_size(
    built, count, threads, micro_batch_size
) -> None:
    alone = rows_of(make_loader(built), 12)  # across epochs
    settings = {"threads": threads, "micro_batch_size": micro_batch_size}
    shares = [rows_of(make_loader(built, i, count, **settings), 12) for i in range(count)]
    for whole, *parts in zip(alone, *shares, strict=True):
        for name, value in whole.items():
            assert torch.equal(value, torch.cat([part[name] for part in parts])), name


def test_an_epoch_has_new_random_seconds_and_the_same_firsts(built) -> None:
    loader = make_loader(built, global_batch_size=8)
    seen: dict[int, dict[int, dict[str, torch.Tensor]]] = {0: {}, 1: {}}
    while sum(map(len, seen.values())) < 2 * loader.examples:
        (rows,) = rows_of(loader, 1)
        original = rows["tokens"].long().scatter(1, rows["predicted"], rows["labels"])
        for i, (epoch, example) in enumerate(
            zip(rows["epoch"].tolist(), rows["example"].tolist(), strict=True)
        ):
            if epoch < 2:
                second = original[i][rows["token_types"][i] == 1].tolist()
                seen[epoch][example] = {"random": bool(rows["next_labels"][i]), "second": second}
    changed = {True: [], False: []}
    for example, one in seen[0].items():
        other = seen[1][example]
        assert one["random"] == other["random"]
        changed[one["random"]].append(one["second"] != other["second"])
    assert not any(changed[False])
    assert np.mean(changed[True]) > 0.9


def test_going_on_gives_the_batches_that_would_have_come(built) -> None:
    whole = rows_of(make_loader(built), 9)
    loader = make_loader(built)
    rows_of(loader, 4)
    other = make_loader(built, threads=1)
    other.load_state_dict(loader.state_dict())
    for expected, found in zip(whole[4:], rows_of(other, 5), strict=True):
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_another_seed_has_other_chunks_and_counts_of_its_own(built) -> None:
    spec, dataset = PackSpec(64, 1, 1), Dataset.open(built)
    counts = [
        PackedSplit(dataset, "train", spec, "pairs", seed).counts.tolist() for seed in (0, 1, 0)
    ]
    assert counts[0] == counts[2] != counts[1]


def test_masked_language_modeling_takes_pairs_too(built) -> None:
    with_nsp, without = (
        rows_of(make_loader(built), 1)[0],
        rows_of(make_loader(built, nsp=False), 1)[0],
    )
    assert with_nsp.keys() - without.keys() == {"next_labels", "next_weights"}
    assert all(torch.equal(value, with_nsp[name]) for name, value in without.items())


def test_what_does_not_fit_is_refused(built, plain) -> None:
    dataset = Dataset.open(built)
    with pytest.raises(
        ConfigError,
        match=r"data.packing is concat, and the objective needs pairs .*; use data.packing=pairs",
    ):
        PackedSplit(dataset, "train", PackSpec(64, 1, 1, pairs=True), "concat", 0)
    with pytest.raises(DataError, match=r"needs sentences, .*build it again with sentences=rules"):
        make_loader(plain)


def test_shards_of_a_single_document_are_left_out_and_said(config, tmp_path, caplog) -> None:
    texts = [make_text(1)] * 5 + ["One text that is as long as a shard. " * 40]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = jsonl.Config((str(tmp_path / "a.jsonl"),))
    small = dataclasses.replace(
        config, source=source, output=str(tmp_path / "small"), heldout_fraction=0
    )
    build(dataclasses.replace(small, shard_bytes=sum(len(text) for text in texts[:5])))
    dataset, spec = Dataset.open(small.output), PackSpec(32, 1, 1)
    counts = PackedSplit(dataset, "train", spec, "pairs", 0).counts
    assert counts[0] > 0
    assert counts[-1] == 0
    assert "excluding 1 of 2 train shards" in caplog.text

    alone = dataclasses.replace(dataset.manifest, splits={"train": dataset.shards("train")[1:]})
    with pytest.raises(DataError, match=r"one document per shard.*Raise shard_bytes"):
        PackedSplit(dataclasses.replace(dataset, manifest=alone), "train", spec, "pairs", 0)


def test_pairs_are_shown_as_pairs(built, tmp_path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "objective: mlm_nsp\ndata: {path: elsewhere, sequence_length: 64, lanes: 4, packing: "
        "pairs}\n"
    )
    console = Console(file=io.StringIO(), width=100)
    show(str(built), str(file), [], 0, 30, console)
    assert isinstance(console.file, io.StringIO)
    examples = console.file.getvalue().split("\nexample ")[1:]
    assert len(examples) == 30
    for example in examples:
        header, *lines = example.strip().splitlines()
        assert [line[:3] for line in lines] == ["A  ", "B  "]
        same = lines[0].split()[1] == lines[1].split()[1]
        assert ("IsNext" if same else "NotNext: B is from elsewhere") in header


def test_the_forecast_has_pairs_where_there_are_sentences(built) -> None:
    forecasts = {(f.policy, f.sequence_length): f for f in inspect(Dataset.open(built)).forecasts}
    policies = {"concat", "full_sentences", "best_fit", "padded", "pairs"}
    assert {policy for policy, _ in forecasts} == policies
    assert forecasts["pairs", 128].chunks == 2 * forecasts["pairs", 128].examples
