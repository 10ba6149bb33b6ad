"""The probes of a run, and the rows that they read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.concat_dataset import AnyDataset
from data_pipeline.reading.config import Config as DataConfig
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from trainer.objectives import Objective
from trainer.strategies import Replica
from trainer.strategies.world import World
from trainer.training.compatibility import check_dataset
from trainer.training.experiment import Experiment
from trainer.training.observers import probes
from trainer.training.observers.settings import Probe


def build_probes(
    experiment: Experiment,
    dataset: AnyDataset,
    replica: Replica,
    world: World | None = None,
) -> dict[str, probes.ProbeReader]:
    """Builds the probes of a run by name.

    Args:
        dataset: the run's.

    Raises:
        ConfigError: one is not compatible with the run.
        DataError: a dataset cannot be read, has other rows, or a split without rows.
    """
    if not experiment.probes:
        return {}
    with torch.device("meta"):
        model = experiment.build_model()
    found: dict[str, probes.ProbeReader] = {}
    for name, config in experiment.probes.items():
        data = _probed_data(experiment, config)
        probed = data.open()
        objective = probes.build_objective(probed)
        check_dataset(probed, objective, config.sequence_length)
        probes.check(name, config, probed, dataset, experiment.model, model)
        open_split = partial(_open_probed, experiment, data, probed, objective, replica, world)
        for split in ("train", "heldout"):
            open_split(split).close()  # an error now, rather than at the first score
        found[name] = probes.ProbeReader(config, experiment.model, open_split)
    return found


def _probed_data(experiment: Experiment, config: Probe) -> DataConfig:
    """The run's data section, changed for a probe's dataset: one text in each row."""
    return replace(
        experiment.data,
        path=config.path,
        sources=(),
        weights=(),
        sequence_length=config.sequence_length,
        packing="padded",
        group_by_length=None,
        group_by_source=None,
        exclude=(),
    )


def _open_probed(
    experiment: Experiment,
    data: DataConfig,
    dataset: AnyDataset,
    objective: Objective,
    replica: Replica,
    world: World | None,
    split: str,
) -> StreamingLoader:
    """Opens the rows of a probe, in their order, for a single pass."""
    return StreamingLoader(
        dataset,
        data,
        SplitOrder(experiment.seed, split, finite=True),
        BatchLayout(probes.batch_size(replica), probes.MICRO_BATCH, replica),
        pack_spec=objective.pack_spec(data.sequence_length),
        collate=objective.collate,
        announcements=world.announcements(data) if world else None,
    )
