"""Packed documents, and batches read back, for tests of text-to-text objectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.packing import PackPlan
from data_pipeline.packing.documents import plan
from samestep.examples import Batch, Examples, PackSpec, Policy, Vocabulary
from samestep.hashing import mix

PAD, EOS = 0, 1
SENTINELS = tuple(range(1099, 999, -1))
VOCABULARY = Vocabulary(
    1100, PAD, None, None, None, (PAD, EOS, 2, *SENTINELS), eos=EOS, sentinels=SENTINELS
)


def pack(
    lengths: Sequence[int], spec: PackSpec, policy: Policy, seed: int = 0
) -> tuple[Examples, list[list[int]]]:
    """Packs documents of random tokens; also returns the text of each chunk, or joined row."""
    lengths = np.asarray(lengths)
    line = np.random.default_rng(seed).integers(3, 1000, lengths.sum()).astype(np.int32)
    start = np.cumsum(lengths) - lengths
    packed = plan(lengths, spec, policy)
    first = start[packed.document] + packed.begin
    tokens = np.concatenate([line[at : at + n] for at, n in zip(first, packed.length, strict=True)])
    examples = as_examples(packed, tokens, policy != "concat")
    ends = (
        np.cumsum(packed.length)
        if examples.isolated
        else np.cumsum(np.bincount(examples.row, packed.length))
    )
    return examples, [text.tolist() for text in np.split(tokens, ends.astype(int)[:-1])]


def as_examples(packed: PackPlan, tokens: np.ndarray, isolated: bool) -> Examples:
    number = np.arange(packed.examples)
    return Examples(
        tokens=tokens.astype(np.int32),
        row=np.repeat(number, np.diff(packed.example_start)),
        column=packed.column,
        length=packed.length,
        key=mix(number),
        weight=np.ones(number.size, dtype=np.float32),
        isolated=isolated,
    )


def only(examples: Examples, rows: Sequence[int]) -> Examples:
    """Some of the examples, in another order."""
    pieces = [np.flatnonzero(examples.row == row) for row in rows]
    start = np.cumsum(examples.length) - examples.length
    chosen = np.concatenate(pieces)
    tokens = [examples.tokens[start[i] : start[i] + examples.length[i]] for i in chosen]
    return Examples(
        tokens=np.concatenate(tokens),
        row=np.repeat(np.arange(len(rows)), [len(some) for some in pieces]),
        column=examples.column[chosen],
        length=examples.length[chosen],
        key=examples.key[list(rows)],
        weight=examples.weight[list(rows)],
        isolated=examples.isolated,
    )


def pairs_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """The sources and targets of a batch, in order, after checking what a model sees of them."""
    return [
        pair
        for row in range(len(batch["tokens"]))
        for pair in _pairs_of_row({k: v[row] for k, v in batch.items()})
    ]


def _pairs_of_row(row: dict[str, np.ndarray]) -> list[tuple[list[int], list[int]]]:
    segments = row["segments"]
    assert (row["tokens"][segments == 0] == PAD).all()
    pairs = []
    for segment in range(1, segments.max() + 1):
        (positions,) = np.nonzero(segments == segment)
        assert np.array_equal(row["positions"][positions], np.arange(len(positions)))
        tokens = row["tokens"][positions].tolist()
        if "target_tokens" in row:
            (read,) = np.nonzero(row["target_segments"] == segment)
            assert np.array_equal(row["target_positions"][read], np.arange(len(read)))
            assert row["weights"][read].all()
            labels = row["labels"][read].tolist()
            assert row["target_tokens"][read].tolist() == [
                PAD,
                *labels[:-1],
            ]  # the decoder sees what is before only
            pairs.append((tokens, labels))
        else:
            mine = np.isin(row["predicted"], positions) & (row["weights"] > 0)
            labels, predicted = row["labels"][mine].tolist(), row["predicted"][mine]
            source = len(tokens) - len(labels) + 1
            assert predicted.tolist() == positions[source - 1 :].tolist()
            assert tokens[source:] == labels[:-1]
            if "prefix" in row:
                assert np.array_equal(
                    np.flatnonzero(row["prefix"] & (segments == segment)), positions[:source]
                )
            pairs.append((tokens[:source], labels))
    return pairs
