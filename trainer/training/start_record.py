"""The record of a run's start, which every checkpoint stores.

A resumed run keeps the record of its checkpoint: init_from may hold other weights by now, and
settings may have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from data_pipeline.reading.concat_dataset import AnyDataset, named_sources
from samestep.config import Tree, to_tree
from trainer.training.experiment import Experiment

INITIAL = ("initialization", "initializer_range")
"""Settings of a model that have no effect after step 0, so a resumed run may have others."""


def alters_model(setting: str) -> bool:
    """Whether a trained model computes something else with another value of a setting."""
    return "dropout" not in setting and not setting.endswith((*INITIAL, "published_as"))


def start_of(
    experiment: Experiment,
    dataset: AnyDataset,
    weights: dict[str, str] | None,
    embeddings: dict[str, str] | None,
    terms: Mapping[str, object] | None = None,
) -> Tree:
    """Returns the record of a new run's start.

    Args:
        weights: path and identity of the weights of init_from.
        embeddings: path and identity of the word vectors of init_embeddings.
        terms: license, languages and base models of the weights, for model cards.

    Returns:
        `run`, a digest that tells the run from others, `weights`, `embeddings`, the `initial`
        settings of the model, and `terms` if there are any.
    """
    tree = to_tree(experiment)
    digests = [source.manifest.digest for source in named_sources(dataset).values()]
    facts = json.dumps([tree, digests, weights, embeddings], sort_keys=True)
    run = hashlib.sha256(facts.encode()).hexdigest()
    initial = {name: tree["model"][name] for name in INITIAL if name in tree["model"]}
    start = {"run": run, "weights": weights, "embeddings": embeddings, "initial": initial}
    return {**start, "terms": dict(terms)} if terms else start
