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
from samestep.config import to_tree
from samestep.errors import ConfigError
from trainer.models import ModelConfig
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.models.inputs import Inputs
from trainer.models.pooling import output_of, pool, positions_at_a_time
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
from trainer.training.retrieval.collection import Collection
from trainer.training.retrieval.measures import depth_of
from trainer.training.retrieval.search import block_of, nearest
from trainer.training.weights.pooling import of_run


@dataclass(frozen=True)
class TokenizedCollection:
    """The tokens of a collection's texts, with prompts and special tokens.

    Attributes:
        pooling: how they are embedded.
        queries, documents: in the order of the collection.
        longest: maximum number of tokens of a text.
    """

    pooling: Pooling
    queries: Sequence[Tokens]
    documents: Sequence[Tokens]
    longest: int


class RetrievalScores(Observer):
    """Ranks all documents of a collection for each query, in each evaluation.

    Args:
        measures: see `measures.scores`.
        texts: of the collection, as the objective of each phase embeds them.
        settings: configuration of the model.
        model: as `strategy.prepare` returns it.
    """

    def __init__(
        self,
        measures: Sequence[str],
        collection: Collection,
        texts: Sequence[TokenizedCollection],
        settings: ModelConfig,
        model: nn.Module,
        strategy: Strategy,
    ) -> None:
        self._measures, self._collection, self._texts = measures, collection, texts
        self._names = list(collection.documents)
        self._settings = settings
        self._model, self._strategy = model, strategy
        self._is_static = strategy.compiles_layers or strategy.accelerator.compiles

    @torch.no_grad()
    def heldout_scores(self, phase: int) -> Mapping[str, float]:
        of_phase, accelerator = self._texts[phase], self._strategy.accelerator
        queries, documents = self._embed(of_phase, of_phase.queries), of_phase.documents
        # A device that compiles would compile for each width of a block; the host ranks instead.
        if not accelerator.compiles:
            queries = queries.to(accelerator.device)
        block = block_of(self._width(of_phase))
        blocks = (
            (first, self._embed(of_phase, documents[first : first + block]))
            for first in range(0, len(documents), block)
        )
        depth = depth_of(self._measures)
        rankings = nearest(of_phase.pooling.similarity, queries, blocks, self._names, depth)
        return self._collection.scores(self._measures, rankings)

    def _embed(self, of_phase: TokenizedCollection, texts: Sequence[Tokens]) -> Tensor:
        """The vectors of texts, fp32 [N, D] on the host of every rank. Collective."""
        strategy, replica = self._strategy, self._strategy.replica
        groups, own, outputs = self._batches(of_phase, texts), list[Int64](), list[Tensor]()
        for first in range(0, len(groups), replica.count):
            # Sharded parameters are gathered by all ranks together, so all take equally many
            # batches: of 5, rank 1 of 2 takes the batches 1, 3 and 4, the last one without need.
            own.append(groups[min(first + replica.index, len(groups) - 1)])
            with strategy.accelerator.graph(f"retrieval of {of_phase.pooling}"):
                vectors = self._vectors(of_phase, [texts[number] for number in own[-1]])
                outputs.append(strategy.keep_rows(vectors))
        table = torch.zeros(len(texts), self._width(of_phase))
        for place, (numbers, vectors) in enumerate(
            zip(own, strategy.rows_on_host(outputs), strict=True)
        ):
            if place * replica.count + replica.index < len(groups):
                table[torch.from_numpy(numbers)] = vectors.float()
        # Each row is on one rank, and 0 on the others.
        with strategy.accelerator.graph(f"vectors of {len(texts)} texts"):
            return strategy.all_reduce(table).cpu()

    def _width(self, of_phase: TokenizedCollection) -> int:
        is_sparse = of_phase.pooling.pool == "splade"
        return self._settings.vocab_size if is_sparse else self._settings.width

    def _batches(self, of_phase: TokenizedCollection, texts: Sequence[Tokens]) -> list[Int64]:
        """The numbers of the texts of each batch; of equal shapes where graphs are compiled."""
        how, vocab_size = of_phase.pooling.pool, self._settings.vocab_size
        batch_tokens = positions_at_a_time(how, vocab_size, BATCH_TOKENS)
        if not self._is_static:
            lengths = np.array([len(tokens) for tokens in texts], dtype=np.int64)
            return list(batches(lengths, batch_tokens))
        devices = self._strategy.replica.devices
        rows = devices * max(1, batch_tokens // of_phase.longest // devices)
        # The last batch repeats the last text: 5 texts by 4 are 0 1 2 3 and 4 4 4 4.
        return [
            np.minimum(np.arange(first, first + rows), len(texts) - 1)
            for first in range(0, len(texts), rows)
        ]

    def _vectors(self, of_phase: TokenizedCollection, texts: Sequence[Tokens]) -> Tensor:
        """The vectors of a batch: fp32 [B, D] on the device."""
        width = of_phase.longest if self._is_static else 0
        batch = self._strategy.to_device(padded_columns(texts, width))
        # Segments stay, unlike in training, where full rows leave them out: with them, attention
        # adds in the order in which the command adds.
        real = batch["segments"] > 0
        if self._settings.prefix_lm:
            batch["prefix"] = real
        how = of_phase.pooling.pool
        output = output_of(how, self._settings.layers)
        with self._strategy.autocast():
            states = self._model(Inputs.of(batch), frozenset({output}))[output]
        vectors = pool(states, real, how)
        return F.normalize(vectors) if of_phase.pooling.normalize else vectors


def build_retrieval(
    experiment: Experiment, dataset: AnyDataset, model: nn.Module, strategy: Strategy
) -> RetrievalScores:
    """Builds the scores of a run; see `read`.

    Args:
        model: as `strategy.prepare` returns it.
    """
    collection, texts = read(experiment, dataset)
    config = experiment.training.retrieval
    assert config is not None
    if strategy.world.rank == 0:
        collection.log_gaps()
    return RetrievalScores(config.measures, collection, texts, experiment.model, model, strategy)


def read(
    experiment: Experiment, dataset: AnyDataset
) -> tuple[Collection, list[TokenizedCollection]]:
    """Reads the collection of a run, and tokenizes it for each phase.

    Args:
        dataset: the run's.

    Raises:
        ConfigError: a measure is unknown, or the settings do not fit the model.
        DataError: the folder is damaged.
    """
    config, settings = experiment.training.retrieval, experiment.model
    assert config is not None
    depth_of(config.measures)
    if experiment.model.head not in ("language_model", "embedding"):
        raise ConfigError(
            "training.retrieval compares embeddings, and this model has a head for "
            f"{experiment.model.head}. Set it to null; samestep evaluate --rerank scores rerankers."
        )
    with torch.device("meta"):
        model = experiment.build_model()
    if f"layer.{settings.layers}" not in model.offers:
        raise ConfigError(
            "training.retrieval is set, and this model offers no hidden states of its last layer. "
            "Set it to null."
        )
    before, after = special_tokens(settings, dataset.tokenizer.vocabulary)
    special, most = len(before) + len(after), model.max_sequence_length
    if config.max_length is not None and not special < config.max_length <= most:
        raise ConfigError(
            f"training.retrieval.max_length is {config.max_length}, and the model reads texts of "
            f"{special + 1} to {most} tokens. Use one of these numbers, or leave it out."
        )
    collection = Collection.read(Path(config.path), config.split)
    known: dict[Pooling, TokenizedCollection] = {}
    found = []
    for phase in experiment.resolved_phases():
        pooling = of_run(to_tree(phase.objective)) or Pooling()
        if pooling not in known:  # phases with one pooling share the tokens
            longest = min(most, config.max_length or pooling.longest or most)
            queries, documents = (
                [
                    prepare(tokens, before, after, longest - special)
                    for tokens in dataset.tokenizer.encode_batch(
                        [prompt + text for text in texts.values()]
                    )
                ]
                for prompt, texts in (
                    (pooling.query, collection.queries),
                    (pooling.document, collection.documents),
                )
            )
            known[pooling] = TokenizedCollection(pooling, queries, documents, longest)
        found.append(known[pooling])
    return collection, found
