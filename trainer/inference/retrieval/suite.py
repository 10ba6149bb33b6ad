"""Scores of retrieval on one or several collections, with and without a reranker."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.table import Table
from torch import Tensor

from samestep.config import Tree
from samestep.errors import ConfigError, DataError
from samestep.progress import Progress
from samestep.terminal import Console
from trainer.inference.retrieval.rerank import CrossEncoder
from trainer.inference.retrieval.sentences import Given, SentenceEncoder
from trainer.training.retrieval.collection import Collection
from trainer.training.retrieval.measures import depth_of
from trainer.training.retrieval.search import block_of, nearest

logger = logging.getLogger(__name__)

_SIZES = ("queries", "documents")
Scores: TypeAlias = dict[str, float]
"""Means over the queries, by measure."""


@dataclass(frozen=True)
class Scored:
    """Scores of a collection, or their means over several.

    Attributes:
        size: number of queries and documents by name; empty for a mean.
        scores: of the encoder's rankings.
        reranked: of the reranker's; None without one.
    """

    scores: Scores
    reranked: Scores | None = None
    size: dict[str, int] = field(default_factory=dict)

    def tree(self) -> Tree:
        """All of it, for JSON."""
        added = {} if self.reranked is None else {"reranked": self.reranked}
        return {**self.size, **self.scores, **added}


@dataclass(frozen=True)
class Suite:
    """Scores of several collections by name.

    Attributes:
        failed: what is wrong with each collection that has none.
    """

    scored: dict[str, Scored]
    failed: dict[str, str]

    @property
    def only(self) -> Scored | None:
        """The scores of the single collection; None if there are several."""
        return (
            next(iter(self.scored.values())) if len(self.scored) + len(self.failed) == 1 else None
        )

    @property
    def mean(self) -> Scored | None:
        """The means over the collections; None if one has no scores."""
        if self.failed:
            return None
        scored = list(self.scored.values())
        after = [each.reranked for each in scored if each.reranked is not None]
        return Scored(_means([each.scores for each in scored]), _means(after) if after else None)

    def tree(self) -> Tree:
        """All of it, for JSON."""
        found: Tree = {"folders": {name: each.tree() for name, each in self.scored.items()}}
        if self.failed:
            return {**found, "failed": self.failed}
        assert self.mean is not None
        return {**found, "mean": self.mean.tree()}

    def show(self) -> None:
        """Prints a row for each collection and the mean, and a row below each for the reranker."""
        # Rich would squeeze the table into 80 columns of a file.
        console = Console() if sys.stdout.isatty() else Console(width=1000)
        # A row: cranfield  225  1,400  0.399518  0.538039
        table = Table(box=None)
        table.add_column("folder")
        rows = {**self.scored}
        if self.only is None and self.mean is not None:
            rows["mean"] = self.mean
        measures = list(next(iter(rows.values())).scores) if rows else []
        for name in (*_SIZES, *measures):
            table.add_column(name, justify="right")
        for name, scored in rows.items():
            size = [f"{scored.size[each]:,}" if scored.size else "" for each in _SIZES]
            table.add_row(name, *size, *(f"{scored.scores[each]:.6f}" for each in measures))
            if (after := scored.reranked) is not None:
                table.add_row("  reranked", "", "", *(f"{after[each]:.6f}" for each in measures))
        console.print(table)

    def check(self) -> None:
        """Reports the collections without scores.

        Raises:
            DataError: there is one.
        """
        if self.failed:
            raise DataError(
                f"{len(self.failed)} of {len(self.failed) + len(self.scored)} folders have no "
                f"scores, and there is no mean. {' '.join(self.failed.values())}"
            )


def _means(scores: Sequence[Scores]) -> Scores:
    return {name: float(np.mean([each[name] for each in scores])) for name in scores[0]}


@dataclass(frozen=True)
class Evaluator:
    """What ranks documents, and the scores of its rankings.

    Attributes:
        checkpoint: of the encoder; see `SentenceEncoder`.
        given: see `SentenceEncoder`.
        measures: see `measures.scores`.
        rerank: checkpoint of a `CrossEncoder`; None has none.
        top: number of documents of each query that the reranker sorts.
    """

    checkpoint: str
    given: Given
    measures: Sequence[str]
    rerank: str | None = None
    top: int = 100

    def __call__(self, folders: Sequence[Path], split: str) -> Suite:
        """Scores collections one by one; see `collection` for the folders.

        Documents with equal similarities are in the ascending order of their ids.

        Raises:
            ConfigError: a measure is unknown, or a folder is named twice.
            DataError: the only folder is damaged. Of several, it is left out and reported.
        """
        # Before a model is loaded: an unknown measure should not cost that time.
        depth = depth_of(self.measures)
        names = _names(folders)
        reranker = None if self.rerank is None else CrossEncoder(self.rerank, "--rerank")
        # A single folder is read first: if it is damaged, no model needs to be loaded.
        encoder = SentenceEncoder(self.checkpoint, self.given) if len(folders) > 1 else None
        suite = Suite({}, {})
        for name, folder in zip(names, folders, strict=True):
            if len(folders) > 1:
                logger.info("scoring %s", name)
            # The others are scored in spite of a damaged folder: a suite may take hours.
            try:
                collection = Collection.read(folder, split)
                collection.log_gaps()
                encoder = encoder or SentenceEncoder(self.checkpoint, self.given)
                suite.scored[name] = self._scored(collection, encoder, reranker, depth)
            except DataError as error:
                if len(folders) == 1:
                    raise
                logger.warning("%s has no scores: %s", name, error)
                suite.failed[name] = str(error)
        return suite

    def _scored(
        self,
        collection: Collection,
        encoder: SentenceEncoder,
        reranker: CrossEncoder | None,
        depth: int,
    ) -> Scored:
        # Documents are embedded block by block, as `nearest` asks for them, and not kept.
        queries = encoder(encoder.for_role("query", list(collection.queries.values())))
        queries = queries.to(encoder.placed)
        blocks = _embedded(encoder, list(collection.documents.values()))
        # A reranker sorts 100 documents even where nDCG@10 reads ten.
        deepest = depth if reranker is None else max(depth, self.top)
        names = list(collection.documents)
        rankings = nearest(encoder.pooling.similarity, queries, blocks, names, deepest)
        encoder.warn_of_truncation(len(collection.documents) + len(collection.queries))
        size = dict(zip(_SIZES, (len(rankings), len(names)), strict=True))
        scores, reranked = collection.scores(self.measures, rankings), None
        if reranker is not None:
            rankings = reranker.reranked(collection, rankings, self.top)
            reranked = collection.scores(self.measures, rankings)
        return Scored(scores, reranked, size)


def _embedded(encoder: SentenceEncoder, texts: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
    block = block_of(encoder.width)
    with Progress("embedding", len(texts)) as progress:
        for first in range(0, len(texts), block):
            some = encoder.for_role("document", texts[first : first + block])
            yield first, encoder(some)
            progress.advance(len(some))


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each folder's path; the whole path where two have the same last part."""
    paths = [folder.resolve() for folder in folders]
    if len({*paths}) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ConfigError(f"--retrieval names {twice} twice. Leave one out.")
    # beir/scifact and old/scifact would be two rows of one name.
    counts = Counter(path.name for path in paths)
    return [path.name if counts[path.name] == 1 else str(path) for path in paths]
