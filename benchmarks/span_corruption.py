"""T5's span corruption, 512 positions of sources and 114 of targets.

Ours and the collator of Hugging Face's run_t5_mlm.

    python -m benchmarks.span_corruption

Both get the same rows of 568 tokens from memory, and give sources, targets and the decoder's
inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from samestep.examples import Batch, Examples, Vocabulary
from samestep.hashing import mix
from trainer.objectives.kinds import span_corruption

Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]

BATCH_SIZE = 64
SENTINELS = tuple(range(32_099, 31_999, -1))
VOCABULARY = Vocabulary(
    size=32_128,
    pad=0,
    cls=None,
    sep=None,
    mask=None,
    special=(0, 1, 2, *SENTINELS),
    eos=1,
    sentinels=SENTINELS,
)


class PublishedCollator:
    """The collator of run_t5_mlm_flax.py, in numpy.

    Written from the algorithm of `FlaxDataCollatorForT5MLM` in huggingface/transformers,
    examples/flax/language-modeling/run_t5_mlm_flax.py (Apache License 2.0), whose mask is
    `random_spans_noise_mask` of google-research/text-to-text-transfer-transformer (Apache License
    2.0): a mask for each row in turn, from shuffled indicators of where segments begin; then
    sentinels and filtering for all rows at once.

    Args:
        seed: of its random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, rows: Array) -> Batch:
        """Makes a batch of rows [B, N] of equal length."""
        is_noise = np.asarray([self.noise_mask(rows.shape[1]) for _ in range(len(rows))])
        labels = self._replace(rows, ~is_noise)
        shifted = np.zeros_like(labels)
        shifted[:, 1:] = labels[:, :-1]
        return {"tokens": self._replace(rows, is_noise), "labels": labels, "target_tokens": shifted}

    def noise_mask(self, length: int) -> Bools:
        """Which of `length` tokens are corrupted."""
        noise = min(max(int(np.round(length * 0.15)), 1), length - 1)
        spans = max(int(np.round(noise / 3.0)), 1)
        lengths = np.stack(
            [self._segments(length - noise, spans), self._segments(noise, spans)], axis=1
        )
        starts = np.cumsum(lengths.reshape(-1))[:-1]
        is_start = np.zeros((length,), dtype=np.int8)
        is_start[starts] = True
        return np.equal(np.cumsum(is_start) % 2, 1)

    def _segments(self, items: int, segments: int) -> Array:
        begins = np.arange(items - 1) < segments - 1
        self._random.shuffle(begins)
        return np.unique(np.cumsum(np.pad(begins, [[1, 0]])), return_counts=True)[1]

    @staticmethod
    def _replace(rows: Array, replaced: Bools) -> Array:
        """Each run of replaced tokens becomes one sentinel, and each row gets an end."""
        mask = replaced.astype(np.int8)
        first = mask - np.roll(mask, 1, axis=-1) * mask
        first[:, 0] = mask[:, 0]
        sentinels = np.where(first != 0, np.cumsum(first, axis=-1), first)
        sentinels = np.where(sentinels != 0, SENTINELS[0] + 1 - sentinels, 0)
        sentinels -= mask - first
        tokens = np.where(sentinels != 0, sentinels, rows)
        kept = tokens[tokens >= 0].reshape((len(rows), -1))
        return np.concatenate(
            [kept, np.full((len(rows), 1), VOCABULARY.eos, dtype=np.int32)], axis=-1
        )


def rows_of_text(length: int, count: int) -> Array:
    """Rows of random tokens: int32 [count, length]."""
    return np.random.default_rng(0).integers(3, 32_000, (count, length), dtype=np.int32)


def measure(batches: int, repeats: int) -> Comparison:
    """Measures both on the same rows."""
    objective = span_corruption.SpanCorruption(span_corruption.Config(), VOCABULARY)
    length = objective.pack_spec(512).sequence_length
    rows = rows_of_text(length, BATCH_SIZE)
    row = np.arange(BATCH_SIZE)
    published = PublishedCollator()

    def ours() -> float:
        for step in range(batches):
            key, weight = mix(row + BATCH_SIZE * step), np.ones(BATCH_SIZE, dtype=np.float32)
            objective.collate(
                Examples(
                    rows.reshape(-1),
                    row,
                    np.zeros_like(row),
                    np.full_like(row, length),
                    key,
                    weight,
                    False,
                ),
                length,
            )
        return batches * BATCH_SIZE

    def theirs() -> float:
        for _ in range(batches):
            published(rows)
        return batches * BATCH_SIZE

    contenders = [Contender("samestep", ours), Contender("run_t5_mlm_flax.py", theirs)]
    return compare(
        f"Span corruption, 512 and 114 positions, batches of {BATCH_SIZE}",
        "examples",
        contenders,
        repeats,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, default=50, help="batches a round (default: 50)")
    args = parser.parse_args(argv)
    publish([measure(args.batches, args.repeats)], args.json)


if __name__ == "__main__":
    main()
