"""Candidates of a retriever, scored again by a model that reads query and document together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_pipeline.building.task_rows import Encoded, join
from samestep.errors import ConfigError, DataError, SamestepError
from samestep.progress import Progress
from trainer.inference.label import Labeler
from trainer.training.retrieval.collection import Collection
from trainer.training.retrieval.search import Float32

logger = logging.getLogger(__name__)

_QUERIES = 32  # tokenized at a time, with their candidates


class Reranker:
    """A cross-encoder: a classification model with one label, on the best device available.

    Args:
        checkpoint: see `trainer.training.weights.loading.load_weights`.
        batch_tokens: positions computed at a time, padding included.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: its model has another head, or several labels.
    """

    def __init__(self, checkpoint: str, batch_tokens: int = 16384) -> None:
        self._model = Labeler(checkpoint)
        self._batch_tokens = batch_tokens
        if self._model.is_classifier:
            labels = self._model.labels
            raise ConfigError(
                f"{checkpoint} has {len(labels)} labels ({', '.join(labels[:3])}, ...), and a "
                "reranker has one, its score. Name a run of objective regression, or a published "
                "model with num_labels 1."
            )

    def __call__(
        self, collection: Collection, rankings: Sequence[Sequence[str]], top: int
    ) -> list[list[str]]:
        """Sorts the first `top` documents of each ranking by the model's score.

        Documents of equal score stay in their order. Documents without text, which the model cannot
        read, come after all others.

        Raises:
            DataError: a query has no tokens.
            SamestepError: a score is not finite.
        """
        queries = list(collection.queries)
        found: list[list[str]] = []
        with Progress("reranking", len(queries)) as progress:
            for first in range(0, len(queries), _QUERIES):
                group = rankings[first : first + _QUERIES]
                candidates = [ranking[:top] for ranking in group]
                scores = self.scores(collection, queries[first : first + _QUERIES], candidates)
                for ranking, values in zip(group, scores, strict=True):
                    order = np.argsort(-values, kind="stable")
                    found.append([*(ranking[place] for place in order), *ranking[top:]])
                progress.advance(len(group))
        return found

    def scores(
        self, collection: Collection, queries: Sequence[str], candidates: Sequence[Sequence[str]]
    ) -> list[Float32]:
        """The logits of the candidates of each query, float32 [K]; -inf for one without text.

        Args:
            queries, candidates: ids.

        Raises:
            DataError, SamestepError: see `__call__`.
        """
        # A document is a candidate of several queries, and is tokenized once.
        documents = list(dict.fromkeys(name for each in candidates for name in each))
        texts = [collection.queries[name] for name in queries]
        texts += [collection.documents[name] for name in documents]
        tokens = self._model.tokenizer.encode_batch(texts)
        of_document = dict(zip(documents, tokens[len(queries) :], strict=True))
        found = [np.full(len(each), -np.inf, np.float32) for each in candidates]
        pairs: list[tuple[int, int]] = []
        rows: list[Encoded] = []
        for number, query in enumerate(queries):
            if not len(tokens[number]):
                raise DataError(f"the query {query!r} has no tokens. Remove it, and its judgments.")
            for place, name in enumerate(candidates[number]):
                if len(of_document[name]):
                    pairs.append((number, place))
                    row = join([tokens[number], of_document[name]])
                    rows.append(replace(row, labels=np.zeros(1, np.float32)))  # stands for none
        outputs = self._model(rows, self._batch_tokens)[:, 0]
        if not np.isfinite(outputs).all():
            raise SamestepError(
                "a score of the reranker is not finite, so its weights are useless. Name another "
                "checkpoint with --rerank."
            )
        for (number, place), score in zip(pairs, outputs, strict=True):
            found[number][place] = score
        return found
