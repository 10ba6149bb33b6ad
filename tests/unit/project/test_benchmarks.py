"""The benchmarks measure what they say, each in its smallest run; their figures are not tested."""

from __future__ import annotations

import json
import re
import time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from benchmarks import (
    build,
    checkpoint,
    corpus,
    growth,
    kernels,
    loader,
    paired_studies,
    recovery,
    resume,
    scale,
    scale_checkpoints,
    scale_data,
    scale_ranks,
    scale_runs,
    stream,
)
from benchmarks.pairing import Comparison, Contender, compare
from data_pipeline.reading.dataset import Dataset


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = [topics[name] for name in sorted(topics)]
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return file


def measured(main, text: Path, tmp_path: Path, *more: str) -> list[Comparison]:
    """Runs a benchmark on little text and reads what it wrote."""
    out = tmp_path / "out.json"
    main(["--corpus", str(text), "--megabytes", "0.2", "--repeats", "1", "--json", str(out), *more])
    comparisons = [Comparison(**fields) for fields in json.loads(out.read_text())["measured"]]
    assert all(
        rate > 0
        for comparison in comparisons
        for rates in comparison.rates.values()
        for rate in rates
    )
    return comparisons


@pytest.mark.long
def test_build(text, tmp_path) -> None:
    pytest.importorskip("datasets")
    wordpiece, bpe = measured(build.main, text, tmp_path)
    assert len(wordpiece.rates) == len(bpe.rates) == 3
    memory = re.findall(r"(\d+) MB(?! of)", wordpiece.notes["samestep data build"])
    assert all(30 < int(megabytes) < 1000 for megabytes in memory)


@pytest.mark.skipif(
    find_spec("litdata") is None, reason="litdata is installed by `make bench` only"
)
def test_loader(text, tmp_path) -> None:
    compared = measured(loader.main, text, tmp_path, "--batches", "16")
    assert [len(comparison.rates) for comparison in compared] == [7, 7]


@pytest.mark.long
def test_resume_and_stream(text, tmp_path) -> None:
    (resumed,) = measured(resume.main, text, tmp_path)
    assert list(resumed.rates) == ["1%", "50%", "99%"]
    streamed, *limited = measured(
        stream.main, text, tmp_path, "--limits", "1", "--failures", "0.02"
    )
    assert list(streamed.rates) == ["S3, cold cache", "local files", "S3, warm cache"]
    assert len(limited) == 2  # without and with failures
    assert all(
        0 < rate < 1.1 for each in limited for rates in each.rates.values() for rate in rates
    )


def test_others_get_our_examples_without_masks(dataset_folder, tmp_path) -> None:
    dataset = Dataset.open(dataset_folder)
    rows = np.load(loader.save_rows(dataset, 32, tmp_path / "rows.npy"))
    vocabulary = dataset.tokenizer.vocabulary
    outside = np.isin(rows, [vocabulary.cls, vocabulary.sep, vocabulary.pad])
    assert (rows[:, 0] == vocabulary.cls).all()
    assert not (rows == vocabulary.mask).any()
    assert (~outside).sum() == sum(shard.tokens for shard in dataset.shards("train"))


def test_shuffled_sentences_are_all_used_in_each_turn() -> None:
    text = " ".join(f"Sentence {i}." for i in range(1000))
    turns = [list(islice(documents, 25)) for documents in [corpus.shuffled(text)] for _ in range(2)]
    first, second = (sorted(re.findall(r"\d+", " ".join(turn)), key=int) for turn in turns)
    assert first == second == [str(i) for i in range(1000)]
    assert turns[0] != turns[1]


def test_contenders_take_turns_and_ratios_are_of_the_same_round() -> None:
    turns: list[str] = []
    contenders = [Contender(name, lambda name=name: turns.append(name) or 1.0) for name in "ab"]
    compare("", "", contenders, repeats=2, clock="wall")
    assert "".join(turns) == "baabba"
    comparison = Comparison("", "", "CPU", {"ours": [10.0, 2.0, 9.0], "other": [5.0, 1.0, 1.0]})
    assert comparison.ratio("other") == 2
    assert comparison.rate("ours") == 9


def test_the_stall_of_a_save_and_the_step_beside_it_are_told_apart() -> None:
    """Steps of 2 s; after steps 4 and 8 a save stalls for 1 s, and the step beside it takes 3 s."""
    time, rows = 0.0, []
    for step in range(1, 10):
        beside = step in (5, 9)
        time += 4.0 if beside else 2.0
        rows.append({"step": step, "time": time, "time/checkpoint": 0.25 if beside else 0.0})
    run = checkpoint.Run.of(rows, saves=2)
    assert run == checkpoint.Run(stalls=[1.0, 1.0], beside=[3.0, 3.0], alone=[2.0, 2.0])
    first, further, steps = checkpoint.compare({"in the background": run, "in place": run})
    assert first.rates == further.rates == {"in the background": [1.0], "in place": [1.0]}
    assert steps.ratio("alone") == pytest.approx(2 / 3)


def test_stalls_after_a_recovery_leave_out_the_first() -> None:
    """Steps of 2 s, of which those after a save spend a part on it."""
    shares = {7: 0.5, 9: 0.25, 11: 0.125}
    rows = [
        {"step": step, "time": 2.0 * step, "time/checkpoint": shares.get(step, 0.0)}
        for step in range(1, 12)
    ]
    assert recovery.stalls(rows[5:], every=2) == [0.5, 0.25]


def test_paired_studies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"arm": arm, "measure": "loss", "mean": {"deviation": own}, "difference": difference}
        for arm, own, difference in (
            ("a", 3.0, None),
            ("b", 4.0, {"deviation": 1.0}),
            ("c", 4.0, {"deviation": 5.0}),
            ("one seed", None, {"deviation": None}),
        )
    ]
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({"study": "rates", "baseline": "a", "rows": rows}))
    paired_studies.main([str(file)])
    assert "| rates | loss | 2 | 0.52 | 0.04 | 1.00 |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
def test_kernels_say_that_they_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert "torch finds none here" in capsys.readouterr().out


def test_growth_is_fitted_to_the_last_three_sizes_and_continued() -> None:
    def work(size: int) -> growth.Figures:
        return {"square, s": max(size, 10) ** 2 / 100, "constant, s": 5.0}

    square, constant = growth.measure("things", [1, 10, 100, 1000], work, seconds=60)
    assert square.exponent == pytest.approx(2)
    assert constant.exponent == pytest.approx(0)
    for each in (square, constant):
        each.extrapolate([1000, 10_000])
    assert square.extrapolated == {10_000: pytest.approx(1e6)}
    lines = growth.table([square, constant]).splitlines()
    assert lines[0] == "| by things | 1 | 10 | 100 | 1,000 | 10,000 | exponent |"
    assert lines[2] == "| square, s | 1 | 1 | 100 | 10,000 | ~1,000,000 | 2.00 |"


def test_sizes_that_would_take_too_long_are_not_measured() -> None:
    sizes: list[int] = []

    def work(size: int) -> growth.Figures:
        sizes.append(size)
        time.sleep(size / 1000)
        return {"cost, s": float(size)}

    (found,) = growth.measure("things", [10, 100, 10_000], work, seconds=2)
    assert sizes == [10, 100]
    assert found.extrapolated == {10_000: pytest.approx(10_000)}


@pytest.mark.long
def test_costs_of_scale_are_measured_and_drawn(tmp_path, monkeypatch, capsys) -> None:
    """The smallest sizes, in this process."""
    for module in (scale_data, scale_checkpoints, scale_runs):
        monkeypatch.setattr(module, "in_fresh_process", lambda work, *args: work(*args))
    sizes = scale.Sizes((40, 80), (60,), (2, 3), (2,), (10,), (2,), (1,), (), (), 60.0)
    monkeypatch.setattr(scale, "QUICK", sizes)
    monkeypatch.setattr(scale, "_C4", (60, 4))
    monkeypatch.setattr(scale_data, "DOCUMENTS", 4)
    monkeypatch.setattr(scale_checkpoints, "TENSORS", 3)
    out = tmp_path / "out.json"
    parts = ["--only", "data", "checkpoints", "runs"]
    scale.main([*parts, "--plots", str(tmp_path / "plots"), "--json", str(out)])
    measured = json.loads(out.read_text())["measured"]
    assert len(measured) == len(list((tmp_path / "plots").glob("*.png"))) == 7
    costs = [cost for costs in measured.values() for cost in costs]
    assert all(value > 0 for cost in costs for value in cost["measured"].values())
    assert capsys.readouterr().out.count("| exponent |") == 7


@pytest.mark.long
def test_collectives_of_a_step_do_not_depend_on_the_number_of_ranks() -> None:
    few, many = scale_ranks.steps_of(8), scale_ranks.steps_of(256)
    assert few == many
    assert few["FSDP2: process groups of a rank"] == 1
