"""The record of a run's start, which every checkpoint stores."""

from __future__ import annotations

import hashlib
import json

from data_pipeline.reading.concat_dataset import AnyDataset, named_sources
from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location
from trainer.config import Tree, to_tree
from trainer.training.experiment import Experiment


def start_of(
    experiment: Experiment,
    dataset: AnyDataset,
    weights: dict[str, str] | None,
    checkpoints: Location | None,
    embeddings: dict[str, str] | None,
) -> Tree | None:
    """Returns the record of a run's start.

    Args:
        weights: path and identity of the weights of init_from.
        checkpoints: of a run that is resumed, whose own record is kept: init_from may hold other
            weights by now, and settings may have changed. None for a new run.
        embeddings: path and identity of the word vectors of init_embeddings.

    Returns:
        `run`, a digest that tells the run from others, `weights` and `embeddings`. None if the run
        began before checkpoints had it.
    """
    # Without a durable checkpoint, a resumed run continues from a snapshot and gets a new record.
    if checkpoints is not None and (stored := integrity.newest_meta(checkpoints)):
        start: Tree | None = stored.get("start")
        return start
    digests = [source.manifest.digest for source in named_sources(dataset).values()]
    facts = json.dumps([to_tree(experiment), digests, weights, embeddings], sort_keys=True)
    run = hashlib.sha256(facts.encode()).hexdigest()
    return {"run": run, "weights": weights, "embeddings": embeddings}
