"""Hard negatives: passages that a model takes for near to a query, and that are not positives.

An encoder's vectors are rounded to a grid on which sums of products are exact in fp64. So ranks
depend neither on the order of a sum nor on the numbers of queries and passages computed at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ConfigError, DataError
from samestep.hashing import combine, name_key
from trainer.inference.retrieval.pairs import Pairs, Row
from trainer.inference.retrieval.rerank import CrossEncoder
from trainer.inference.retrieval.sentences import SentenceEncoder
from trainer.inference.retrieval.vectors import Vectors
from trainer.training.retrieval import search

BATCH_TOKENS = 8192
"""Of the encoder. No option: the last digits of vectors depend on it."""

_COSINE_GRID, _DOT_GRID = 2**24, 2**18
"""Numbers of a vector become multiples of 1 / this.

A product of two cosine vectors is a multiple of 2^-48 below 2, which fp64 holds with its 53 bits;
a dot product is a multiple of 2^-36, exact below 2^17.
"""


@dataclass(frozen=True)
class Choice:
    """Which passages become negatives.

    Attributes:
        negatives: their number.
        skipped: number of the highest passages, without positives, that are no candidates.
        last: rank of the last candidate.
        margin: a candidate scores at least this much less than the lowest positive.
        relative_margin: the same, as a share of the positive's score.
        how: the highest candidates, or random ones.
        seed: of the random ones.
    """

    negatives: int
    skipped: int
    last: int
    margin: float | None = None
    relative_margin: float | None = None
    how: Literal["highest", "random"] = "highest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.negatives < 1:
            raise ConfigError(f"--negatives must be at least 1, not {self.negatives}")
        if self.last - self.skipped < self.negatives:
            raise ConfigError(
                f"--range {self.skipped}-{self.last} has {max(0, self.last - self.skipped)} "
                f"passages, and --negatives is {self.negatives}. Widen the range."
            )
        if self.margin is not None and not 0 <= self.margin < np.inf:
            raise ConfigError(f"--margin must be at least 0, not {self.margin}")
        if self.relative_margin is not None and not 0 <= self.relative_margin < 1:
            raise ConfigError(
                f"--relative-margin must be from 0 to below 1, not {self.relative_margin}"
            )

    def __call__(
        self, query: str, scores: npt.NDArray[np.float64], positive: float
    ) -> npt.NDArray[np.int64]:
        """Chooses passages; ascending places.

        Args:
            query: its id.
            scores: of all passages but the positives, in descending order.
            positive: the lowest score of a positive.
        """
        limits = [np.inf]
        if self.margin is not None:
            limits.append(positive - self.margin)
        if self.relative_margin is not None:
            # Of the magnitude: 5 % below a similarity of -0.2 is -0.21.
            limits.append(positive - abs(positive) * self.relative_margin)
        # A range of 10-100 are the places 10 to 99: the ten nearest may be right answers.
        places = np.arange(self.skipped, min(self.last, len(scores)))
        places = places[scores[places] <= min(limits)]
        if self.how == "random":
            # A hash of the query and the place: the same at any number of processes.
            keys = combine(self.seed, name_key("negatives"), name_key(query), places)
            places = places[np.argsort(keys, kind="stable")]
        return np.sort(places[: self.negatives])


class Chosen(NamedTuple):
    """Negatives of a row, as numbers of passages, and scores of its positives, then of these."""

    row: Row
    negatives: list[int]
    scores: list[float]


class Miner:
    """Chooses negatives of queries.

    Args:
        vectors: of the passages.
        encoder: makes the vectors of queries.
        teacher: makes the scores; None: they are similarities.
    """

    def __init__(
        self,
        pairs: Pairs,
        vectors: Vectors,
        encoder: SentenceEncoder,
        teacher: CrossEncoder | None,
        choice: Choice,
    ) -> None:
        self._pairs, self._vectors, self._encoder = pairs, vectors, encoder
        self._teacher, self._choice = teacher, choice
        self._positives = pairs.positives()
        # Other accelerators have no fp64.
        self._device = encoder.placed if encoder.placed.type == "cuda" else torch.device("cpu")

    def __call__(self, rows: Sequence[Row]) -> list[Chosen]:
        """Reads all vectors once; `rows` decide how much is computed at a time."""
        texts = self._encoder.for_role("query", [row.query for row in rows])
        queries = self._on_grid(self._encoder(texts, BATCH_TOKENS))
        positives = [sorted(self._positives[row.query]) for row in rows]
        # The vectors of all positives are kept as the blocks pass by.
        wanted = np.unique(np.concatenate(positives))
        held: dict[int, Tensor] = {}

        def blocks() -> Iterator[tuple[int, Tensor]]:
            for first, vectors in self._vectors.blocks():
                block = self._on_grid(vectors)
                # A block of the passages 1,000 to 1,999 has the wanted ones in that range.
                low, high = np.searchsorted(wanted, (first, first + len(block)))
                held.update((number, block[number - first].clone()) for number in wanted[low:high])
                yield first, block

        # Positives are among the highest, so that many more are needed. A passage that equals the
        # query is no negative either.
        depth = self._choice.last + max(map(len, positives)) + 1
        products, numbers = search.top(queries, blocks(), depth)
        chosen = []
        for row, known, query, scores, ranked in zip(
            rows, positives, queries, products.astype(np.float64), numbers, strict=True
        ):
            similar = torch.stack([held[number] for number in known]) @ query
            of_positives = dict(zip(known, similar.tolist(), strict=True))
            same = self._pairs.number(row.query)
            is_candidate = ~np.isin(ranked, known if same is None else [*known, same])
            ranked, scores = ranked[is_candidate], scores[is_candidate]
            places = self._choice(row.name, scores, min(of_positives.values()))
            own = [of_positives[number] for number in row.positives]
            chosen.append(Chosen(row, ranked[places].tolist(), own + scores[places].tolist()))
        return chosen if self._teacher is None else _rescored(self._teacher, self._pairs, chosen)

    def _on_grid(self, vectors: Tensor) -> Tensor:
        """Rounds vectors, fp64, which have length 1 if they are compared by cosine."""
        exact, grid = vectors.to(self._device).double(), _DOT_GRID
        if self._vectors.similarity == "cosine":
            exact, grid = F.normalize(exact), _COSINE_GRID
        return (exact * grid).round() / grid


def _rescored(teacher: CrossEncoder, pairs: Pairs, chosen: Sequence[Chosen]) -> list[Chosen]:
    """Replaces scores by a teacher's.

    Raises:
        DataError: the teacher's tokenizer makes no tokens of a text.
    """
    texts = [
        [pairs.texts[number] for number in (*each.row.positives, *each.negatives)]
        for each in chosen
    ]
    scores = teacher.scores([each.row.query for each in chosen], texts)
    for passages, values in zip(texts, scores, strict=True):
        if np.isneginf(values).any():
            raise DataError(
                f"the teacher's tokenizer makes no tokens of the passage "
                f"{passages[int(values.argmin())][:80]!r}. Remove it."
            )
    return [
        each._replace(scores=values.tolist()) for each, values in zip(chosen, scores, strict=True)
    ]
