"""Whole sentences until an example is full, as RoBERTa was trained."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.packing.documents import count_examples as count_concat
from data_pipeline.packing.full_sentences import count_examples, plan
from data_pipeline.packing.policy import packing_digest
from data_pipeline.reading.dataset import Dataset
from samestep.errors import ConfigError, DataError
from samestep.examples import PackSpec
from tests.integration.commands import Samestep
from tests.unit.data_pipeline.packing.test_documents import assert_valid

SPECS = [PackSpec(6, 1, 1), PackSpec(3, 1, 1), PackSpec(9, 0, 0), PackSpec(40, 2, 3)]


def rows_of(lengths: list[int], sentences: list[int], spec: PackSpec) -> list[str]:
    """Examples as text: letters are documents, "[" and "]" special tokens, "." padding."""
    packed = plan(np.array(lengths), np.array(sentences), spec)
    rows = []
    for first, stop in itertools.pairwise(packed.example_start):
        row = ["."] * spec.sequence_length
        row[: spec.prefix] = "[" * spec.prefix
        for chunk in range(first, stop):
            column, length = int(packed.column[chunk]), int(packed.length[chunk])
            row[column : column + length] = "ABCDEF"[packed.document[chunk]] * length
            row[column + length : column + length + spec.suffix] = "]" * spec.suffix
        rows.append("".join(row))
    return rows


def test_the_example_of_the_module() -> None:
    assert rows_of([5, 1, 4], [0, 2, 5, 6, 8], PackSpec(6, 1, 1)) == [
        "[AA]..",
        "[AAA].",
        "[B]CC]",
        "[CC]..",
    ]


def greedy(lengths: np.ndarray, sentences: np.ndarray, spec: PackSpec) -> list[list[int]]:
    """The token numbers of each example, token by token and sentence by sentence."""
    room = spec.sequence_length - spec.prefix - spec.suffix
    edges = [*sentences.tolist(), int(lengths.sum())]
    ends = set(np.cumsum(lengths).tolist())
    examples: list[list[int]] = [[]]
    used = 0
    for begin, end in itertools.pairwise(edges):
        for first in range(begin, end, room):
            piece = list(range(first, min(first + room, end)))
            # A separator is between this sentence and one of another document.
            gap = spec.suffix if examples[-1] and begin == first and begin in ends else 0
            if examples[-1] and used + gap + len(piece) > room:
                examples.append([])
                used = gap = 0
            examples[-1] += piece
            used += gap + len(piece)
    return examples if examples[-1] else []


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_is_the_greedy_algorithm(spec: PackSpec) -> None:
    random = np.random.default_rng(spec.sequence_length)
    for documents in (0, 1, 2, 9, 200):
        lengths = np.maximum(0, random.lognormal(2, 1.5, documents)).astype(np.int64)
        first = np.cumsum(lengths) - lengths
        inside = random.choice(max(1, lengths.sum()), lengths.sum() // 5, replace=False)
        sentences = np.unique(np.concatenate([first[lengths > 0], inside])).astype(np.int64)
        packed = plan(lengths, sentences, spec)
        if documents:
            assert_valid(packed, lengths, spec, "concat")
        token = np.cumsum(lengths) - lengths
        found = [
            [
                int(token[packed.document[chunk]] + packed.begin[chunk] + i)
                for chunk in range(a, b)
                for i in range(packed.length[chunk])
            ]
            for a, b in itertools.pairwise(packed.example_start)
        ]
        assert found == greedy(lengths, sentences, spec)
        assert count_examples(lengths, sentences, spec) == packed.examples == len(found)


def test_sentences_of_one_token_pack_as_concat_does() -> None:
    lengths = np.array([50, 1, 0, 7, 300])
    spec = PackSpec(20, 1, 0)
    found = count_examples(lengths, np.arange(358), spec)
    assert found == count_concat(lengths, spec, "concat")


def test_it_has_a_digest_of_its_own_and_needs_room() -> None:
    spec = PackSpec(16, 1, 1)
    policies = ("concat", "full_sentences", "best_fit")
    assert len({packing_digest(spec, policy) for policy in policies}) == 3
    with pytest.raises(ConfigError, match="leaves no position for text"):
        plan(np.array([3]), np.array([0]), PackSpec(2, 1, 1))


def test_a_run_reads_whole_sentences(
    dataset_folder: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """The command, on a dataset with sentences, and its refusal of one without."""
    from dataclasses import replace

    from data_pipeline.packing.policy import check_policy

    shown = samestep(
        "data", "show", dataset_folder, "--objective", experiment_file,
        "data.packing=full_sentences", "--count", "2",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    command = (
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        "data.packing=full_sentences",
    )
    assert samestep(*command, "training.steps=4").code == 0
    assert samestep("ledger", "verify", tmp_path / "run").code == 0
    inspected = samestep("data", "inspect", dataset_folder)
    assert "full_sentences" in inspected.out
    manifest = Dataset.open(dataset_folder).manifest
    without = replace(manifest, settings={})
    with pytest.raises(
        DataError, match=r"data\.packing full_sentences needs sentences, and data was"
    ):
        check_policy(without, "data", PackSpec(16, 1, 1), "full_sentences")
