"""Scores of retrieval in the evaluations of a run, such as `heldout/ndcg@10`.

Each rank embeds a part of the batches of texts, the vectors are exchanged, and every rank ranks all
documents, so all have the same scores. Batches are those of `samestep evaluate --retrieval` and do
not depend on the number of ranks, so neither do vectors and scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.format.shards import Tokens
from data_pipeline.reading.concat_dataset import AnyDataset
from samestep.errors import ConfigError
from trainer.models import ModelConfig
from trainer.models.inputs import Inputs
from trainer.models.pooling import pool
from trainer.models.text_inputs import (
    BATCH_TOKENS,
    Int64,
    batches,
    padded_columns,
    prepare,
    special_tokens,
)
from trainer.strategies import Strategy
from trainer.training.experiment import Experiment
from trainer.training.observers import Observer
from trainer.training.observers.settings import Retrieval
from trainer.training.retrieval.collection import Collection
from trainer.training.retrieval.measures import depth_of
from trainer.training.retrieval.search import BLOCK, nearest


@dataclass(frozen=True)
class TokenizedCollection:
    """A collection with the tokens of its texts, special ones included.

    Attributes:
        queries, documents: in the order of the collection.
        longest: maximum number of tokens of a text.
    """

    collection: Collection
    queries: Sequence[Tokens]
    documents: Sequence[Tokens]
    longest: int


class RetrievalScores(Observer):
    """Ranks all documents of a collection for each query, in each evaluation.

    Args:
        config: its settings.
        texts: the collection.
        settings: configuration of the model.
        model: as `strategy.prepare` returns it.
    """

    def __init__(
        self,
        config: Retrieval,
        texts: TokenizedCollection,
        settings: ModelConfig,
        model: nn.Module,
        strategy: Strategy,
    ) -> None:
        self._measures, self._texts = config.measures, texts
        self._names = list(texts.collection.documents)
        self._width, self._is_prefix = settings.width, settings.prefix_lm
        self._output = f"layer.{settings.layers}"
        self._model, self._strategy = model, strategy
        self._is_static = strategy.compiles_layers or strategy.accelerator.compiles

    @torch.no_grad()
    def heldout_scores(self) -> Mapping[str, float]:
        documents, accelerator = self._texts.documents, self._strategy.accelerator
        queries = self._embed(self._texts.queries)
        if not accelerator.compiles:
            queries = queries.to(accelerator.device)
        blocks = (
            (first, self._embed(documents[first : first + BLOCK]))
            for first in range(0, len(documents), BLOCK)
        )
        depth = depth_of(self._measures)
        rankings = nearest("cosine", queries, blocks, self._names, depth)
        return self._texts.collection.scores(self._measures, rankings)

    def _embed(self, texts: Sequence[Tokens]) -> Tensor:
        """The vectors of texts, fp32 [N, D] on the host of every rank. Collective."""
        strategy, replica = self._strategy, self._strategy.replica
        groups, own, outputs = self._batches(texts), list[Int64](), list[Tensor]()
        for first in range(0, len(groups), replica.count):
            # Sharded parameters are gathered by all ranks together, so all take equally many
            # batches: of 5, rank 1 of 2 takes the batches 1, 3 and 4, the last one without need.
            own.append(groups[min(first + replica.index, len(groups) - 1)])
            with strategy.accelerator.graph("retrieval"):
                vectors = self._vectors([texts[number] for number in own[-1]])
                outputs.append(strategy.keep_rows(vectors))
        table = torch.zeros(len(texts), self._width)
        for place, (numbers, vectors) in enumerate(
            zip(own, strategy.rows_on_host(outputs), strict=True)
        ):
            if place * replica.count + replica.index < len(groups):
                table[torch.from_numpy(numbers)] = vectors.float()
        # Each row is on one rank, and 0 on the others.
        with strategy.accelerator.graph(f"vectors of {len(texts)} texts"):
            return strategy.all_reduce(table).cpu()

    def _batches(self, texts: Sequence[Tokens]) -> list[Int64]:
        """The numbers of the texts of each batch; of equal shapes where graphs are compiled."""
        if not self._is_static:
            lengths = np.array([len(tokens) for tokens in texts], dtype=np.int64)
            return list(batches(lengths, BATCH_TOKENS))
        devices = self._strategy.replica.devices
        rows = devices * max(1, BATCH_TOKENS // self._texts.longest // devices)
        # The last batch repeats the last text: 5 texts by 4 are 0 1 2 3 and 4 4 4 4.
        return [
            np.minimum(np.arange(first, first + rows), len(texts) - 1)
            for first in range(0, len(texts), rows)
        ]

    def _vectors(self, texts: Sequence[Tokens]) -> Tensor:
        """The vectors of a batch: fp32 [B, D] on the device."""
        width = self._texts.longest if self._is_static else 0
        batch = self._strategy.to_device(padded_columns(texts, width))
        real = batch["segments"] > 0
        if self._is_prefix:
            batch["prefix"] = real
        with self._strategy.autocast():
            states = self._model(Inputs.of(batch), frozenset({self._output}))[self._output]
        return F.normalize(pool(states.float(), real, "mean"))


def build_retrieval(
    experiment: Experiment, dataset: AnyDataset, model: nn.Module, strategy: Strategy
) -> RetrievalScores:
    """Builds the scores of a run; see `read`.

    Args:
        model: as `strategy.prepare` returns it.
    """
    texts, config = read(experiment, dataset), experiment.training.retrieval
    assert config is not None
    if strategy.world.rank == 0:
        texts.collection.log_gaps()
    return RetrievalScores(config, texts, experiment.model, model, strategy)


def read(experiment: Experiment, dataset: AnyDataset) -> TokenizedCollection:
    """Reads and tokenizes the collection of a run.

    Args:
        dataset: the run's.

    Raises:
        ConfigError: a measure is unknown, or the settings do not fit the model.
        DataError: the folder is damaged.
    """
    config, settings = experiment.training.retrieval, experiment.model
    assert config is not None
    depth_of(config.measures)
    with torch.device("meta"):
        model = experiment.build_model()
    if f"layer.{settings.layers}" not in model.offers:
        raise ConfigError(
            "training.retrieval is set, and this model offers no hidden states of its last layer. "
            "Set it to null."
        )
    before, after = special_tokens(settings, dataset.tokenizer.vocabulary)
    least, most = len(before) + len(after) + 1, model.max_sequence_length
    longest = most if config.max_length is None else config.max_length
    if not least <= longest <= most:
        raise ConfigError(
            f"training.retrieval.max_length is {longest}, and the model reads texts of {least} to "
            f"{most} tokens. Use one of these numbers, or null for {most}."
        )
    collection = Collection.read(Path(config.path), config.split)
    queries, documents = (
        [
            prepare(tokens, before, after, longest - len(before) - len(after))
            for tokens in dataset.tokenizer.encode_batch(list(texts.values()))
        ]
        for texts in (collection.queries, collection.documents)
    )
    return TokenizedCollection(collection, queries, documents, longest)
