"""A model that reads query and document together: to rerank, and to score hard negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_pipeline.building.task_rows import Encoded, join
from samestep.errors import ConfigError, DataError, SamestepError
from samestep.progress import Progress
from trainer.inference.label import Labeler
from trainer.training.retrieval.collection import Collection
from trainer.training.retrieval.search import Float32

_QUERIES = 32  # tokenized at a time, with their candidates


class CrossEncoder:
    """A fine-tuned model that gives a score to a query and a document that it reads together.

    Attributes:
        identity: changes with the weights.

    Args:
        checkpoint: see `trainer.training.weights.loading.load_weights`.
        option: that names it, for messages.
        batch_tokens: positions computed at a time, padding included.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: its model has another head, or several labels.
    """

    def __init__(self, checkpoint: str, option: str, batch_tokens: int = 16384) -> None:
        self._model = Labeler(checkpoint)
        self._option, self._batch_tokens = option, batch_tokens
        self.identity = self._model.identity
        if self._model.is_classifier:
            labels = self._model.labels
            raise ConfigError(
                f"{option} {checkpoint} has {len(labels)} labels ({', '.join(labels[:3])}, ...), "
                "and one is needed, the score of a query and a document. Name a run of objective "
                "regression or ranking, or a published model with num_labels 1."
            )

    def reranked(
        self, collection: Collection, rankings: Sequence[Sequence[str]], top: int
    ) -> list[list[str]]:
        """Sorts the first `top` documents of each ranking by score.

        Documents of equal score stay in their order. Documents without text, which the model cannot
        read, come after all others.

        Raises:
            DataError: a query has no tokens.
            SamestepError: a score is not finite.
        """
        queries = list(collection.queries.values())
        found: list[list[str]] = []
        with Progress("reranking", len(queries)) as progress:
            for first in range(0, len(queries), _QUERIES):
                group = rankings[first : first + _QUERIES]
                texts = [[collection.documents[name] for name in each[:top]] for each in group]
                scores = self.scores(queries[first : first + _QUERIES], texts)
                for ranking, values in zip(group, scores, strict=True):
                    order = np.argsort(-values, kind="stable")
                    found.append([*(ranking[place] for place in order), *ranking[top:]])
                progress.advance(len(group))
        return found

    def scores(self, queries: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[Float32]:
        """The logits of the candidates of each query, float32 [K]; -inf for one without tokens.

        Raises:
            DataError, SamestepError: see `reranked`.
        """
        # A document is a candidate of several queries, and is tokenized once.
        distinct = list(dict.fromkeys(text for each in candidates for text in each))
        tokens = self._model.tokenizer.encode_batch([*queries, *distinct])
        of_document = dict(zip(distinct, tokens[len(queries) :], strict=True))
        found = [np.full(len(each), -np.inf, np.float32) for each in candidates]
        pairs: list[tuple[int, int]] = []
        rows: list[Encoded] = []
        for number, query in enumerate(queries):
            if not len(tokens[number]):
                raise DataError(f"the query {query[:80]!r} has no tokens. Remove it.")
            for place, text in enumerate(candidates[number]):
                if len(of_document[text]):
                    pairs.append((number, place))
                    row = join([tokens[number], of_document[text]])
                    rows.append(replace(row, labels=np.zeros(1, np.float32)))  # stands for none
        outputs = self._model(rows, self._batch_tokens)[:, 0]
        if not np.isfinite(outputs).all():
            raise SamestepError(
                f"a score of {self._option} is not finite, so its weights are useless. Name "
                "another checkpoint."
            )
        for (number, place), score in zip(pairs, outputs, strict=True):
            found[number][place] = score
        return found
