"""The batches of a run, made again in one process from its ledger, its settings and its dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.reading.loader import StreamingLoader
from data_pipeline.reading.mixed_dataset import AnyDataset, named_sources
from trainer.config import Tree, decode
from trainer.config.renamed import read_stored
from trainer.errors import ConfigError, DataError
from trainer.examples import LoaderState
from trainer.strategies import Replica
from trainer.training.experiment import Experiment
from trainer.training.ledger import Row, corrupt_shards, intact_rows
from trainer.training.run import open_loader

_BATCH_CELLS = 2**18  # as many as the loader makes together

Columns = dict[str, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Run:
    """A run's ledger, and what it takes to make its batches again.

    Attributes:
        folder: the run's.
        settings: its resolved configuration.
        rows: those of the ledger, up to the first that does not follow from those before it.
        lines: how many the ledger has.
    """

    folder: Path
    settings: Tree
    rows: tuple[Row, ...]
    lines: int

    @classmethod
    def open(cls, folder: str, overrides: list[str]) -> Run:
        """Reads the ledger and the settings of a run.

        Raises:
            ConfigError: the folder is none of a run, or has no ledger.
        """
        path = Path(folder)
        for name in ("config.yaml", "ledger.jsonl"):
            if not (path / name).is_file():
                raise ConfigError(
                    f"{folder} has no {name}; name the output folder of a run that has made a step"
                )
        with (path / "ledger.jsonl").open("rb") as file:
            lines = sum(1 for _ in file)
        rows = tuple(row for row, _ in intact_rows(path / "ledger.jsonl"))
        return cls(
            path, {**read_stored(path / "config.yaml", overrides), "output": folder}, rows, lines
        )

    @cached_property
    def experiment(self) -> Experiment:
        """The run's configuration."""
        experiment: Experiment = decode(Experiment, self.settings)
        return experiment

    @cached_property
    def dataset(self) -> AnyDataset:
        """The run's dataset or datasets, or what lies in their place now.

        Raises:
            DataError: there is none, or a shard is missing.
        """
        return self.experiment.data.open()

    @contextmanager
    def loader(self, order: Row, first: int, end: int) -> Iterator[StreamingLoader]:
        """A loader, in large batches, of the examples of a data order from `first` to before `end`,
        and those after.

        Args:
            order: the row of the ledger with which the order begins.
            first: a global example number, counted with those that were excluded.
            end: another one.

        Raises:
            DataError: a dataset is missing, another one or damaged.
            ConfigError: the configuration has been changed so that there is no such order.
        """
        experiment: Experiment = decode(
            Experiment, {**self.settings, "objective": order["objective"]}
        )
        phase = next(
            (phase for phase in experiment.resolved_phases() if phase.order == order["order"]), None
        )
        if phase is None:
            raise ConfigError(
                f"{self.folder}/config.yaml has no phase of data order {order['order']}; put it "
                "back"
            )
        self._check_datasets(order, end)
        length = order["sequence_length"]
        rows = max(1, _BATCH_CELLS // length)
        loader = open_loader(
            replace(
                experiment,
                data=replace(
                    experiment.data, exclude=(), threads=os.cpu_count() or 1, on_corrupt="stop"
                ),
            ),
            self.dataset,
            experiment.objective.build(self.dataset.tokenizer.vocabulary),
            Replica(0, 1),
            replace(phase, sequence_length=length, global_batch_size=rows, micro_batch_size=rows),
        )
        with loader:
            corrupt = corrupt_shards(self.rows, order["order"])
            begin: LoaderState = order["data"]
            state: LoaderState = {**begin, "example": first, "excluded": [], "corrupt": corrupt}
            loader.load_state_dict(state, as_recorded=True)
            yield loader

    def _check_datasets(self, order: Row, end: int) -> None:
        """Looks whether the datasets that the examples of an order come from are there."""
        present = {dataset.manifest.digest for dataset in named_sources(self.dataset).values()}
        needed = {
            key for first, shares in order["data"]["mixture"] if first < end for key in shares
        }
        for digest in sorted(needed - present):
            raise DataError(
                f"the run was fed from a dataset of digest {digest[:12]}..., and "
                f"{self.dataset.name} is another one: "
                "name the right one by data.path=DIR, or among data.sources (with a weight of 0, "
                "if no longer used)"
            )


def columns(loader: StreamingLoader, names: tuple[str, ...], end: int) -> Iterator[Columns]:
    """Yields columns of the examples before `end`, sorted by "number".

    Those of a loader of a single replica.
    """
    for (batch,) in loader:
        arrays: Columns = {name: batch[name].numpy() for name in ("number", *names)}
        by_number = np.argsort(arrays["number"])
        kept = by_number[: np.searchsorted(arrays["number"][by_number], end)]
        if len(kept):
            yield {name: array[kept] for name, array in arrays.items()}
        if len(kept) < len(by_number):
            return
