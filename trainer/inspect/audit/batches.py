"""Recomputes the batches of a run in one process, from its ledger, its settings and its dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from data_pipeline.reading.concat_dataset import AnyDataset, named_sources
from data_pipeline.reading.loader import StreamingLoader
from samestep.config import Kinds, Tree, decode
from samestep.errors import ConfigError, DataError
from samestep.examples import LoaderState
from samestep.stored_json import Between, Count, JsonError, checked
from samestep.untrusted import read_stored
from trainer.objectives import ObjectiveConfig
from trainer.strategies import Replica
from trainer.training.compose import open_loader
from trainer.training.experiment import Experiment
from trainer.training.ledger import Row, corrupt_shards, intact_rows

_OBJECTIVE = Annotated[ObjectiveConfig, Kinds("trainer.objectives.kinds")]

_BATCH_POSITIONS = 2**18  # as many as the loader packs at a time

Columns = dict[str, npt.NDArray[np.int64]]


class Place(TypedDict):
    """Where a document was read from."""

    file: str
    line: int


def places(documents: Iterable[tuple[str, int]]) -> list[Place]:
    """Returns the places of an example's documents; of one with several chunks in it, once."""
    return [{"file": file, "line": line} for file, line in dict.fromkeys(documents)]


_Size = Annotated[int, Between(1, 2**31)]


class _Data(TypedDict):
    lanes: _Size
    mixture: list[tuple[Count, dict[str, float]]]
    group_by_length: NotRequired[Count | None]
    group_by_source: NotRequired[Count]


class _Order(TypedDict):
    """The settings of a data order, in the row that begins it."""

    objective: dict[str, object]
    sequence_length: _Size
    data: _Data


@dataclass(frozen=True)
class Run:
    """A run's ledger and settings, from which its batches are recomputed.

    Attributes:
        folder: of the run.
        settings: the run's configuration.
        rows: of the ledger, up to the first that breaks the hash chain.
        lines: number of lines in the ledger.
    """

    folder: Path
    settings: Tree
    rows: tuple[Row, ...]
    lines: int

    @classmethod
    def open(cls, folder: str, overrides: list[str]) -> Run:
        """Reads the ledger and the settings of a run.

        Raises:
            ConfigError: the folder is not of a run, or has no ledger.
            DataError: a row of the ledger lacks a setting of its data order.
        """
        path = Path(folder)
        ledger = path / "ledger.jsonl"
        for file in (path / "config.yaml", ledger):
            if not file.is_file():
                raise ConfigError(
                    f"{folder} has no {file.name}. Name the output folder of a run that has taken "
                    "a step"
                )
        lines = len(ledger.read_bytes().splitlines())
        settings = {**read_stored(path / "config.yaml", overrides), "output": folder}
        rows = tuple(row for row, _ in intact_rows(ledger))
        for number, row in enumerate(rows, start=1):
            if row["kind"] == "order":
                try:
                    checked(row, _Order)
                except JsonError as error:
                    raise DataError(
                        f"{ledger}, line {number} does not say how its data order is computed: "
                        f"{error}. Restore the file."
                    ) from error
        return cls(path, settings, rows, lines)

    @cached_property
    def experiment(self) -> Experiment:
        """The run's configuration."""
        experiment: Experiment = decode(Experiment, self.settings)
        return experiment

    @cached_property
    def dataset(self) -> AnyDataset:
        """The dataset that is now where the run's dataset was.

        Raises:
            DataError: there is none, or a shard is missing.
        """
        return self.experiment.data.open()

    @contextmanager
    def loader(self, order: Row, first: int, end: int) -> Iterator[StreamingLoader]:
        """Opens a loader, in large batches, of the examples of a data order from `first` on.

        Args:
            order: the ledger's row that begins the order.
            first: a global example number; excluded examples count.
            end: the datasets of the examples before this number must be present.

        Raises:
            DataError: a dataset is missing, damaged, or not the run's.
            ConfigError: the run's configuration no longer has this order.
        """
        experiment = self.experiment
        orders = {phase.order: phase for phase in reversed(experiment.resolved_phases())}
        if order["order"] not in orders:
            raise ConfigError(
                f"{self.folder}/config.yaml has no phase of data order {order['order']}. "
                "Restore the run's own settings"
            )
        self._check_datasets(order, end)
        # Examples are numbered without regard to batches, so the batch size is free to choose. The
        # excluded examples are recomputed, too: they count in the passes over the data.
        length = order["sequence_length"]
        size = max(1, _BATCH_POSITIONS // length)
        phase = replace(
            orders[order["order"]],
            sequence_length=length,
            global_batch_size=size,
            micro_batch_size=size,
            # The recorded one, in case the configuration has another now.
            objective=decode(_OBJECTIVE, order["objective"], "objective"),
        )
        threads = os.cpu_count() or 1
        data = replace(experiment.data, exclude=(), threads=threads, on_corrupt="stop")
        experiment = replace(experiment, data=data)
        with open_loader(experiment, self.dataset, Replica(0, 1), phase) as loader:
            corrupt = corrupt_shards(self.rows, order["order"])
            begin: LoaderState = order["data"]
            state: LoaderState = {**begin, "example": first, "excluded": [], "corrupt": corrupt}
            loader.load_state_dict(state, as_recorded=True)
            yield loader

    def _check_datasets(self, order: Row, end: int) -> None:
        """Checks that the datasets which the order's examples before `end` are from are present."""
        present = {dataset.manifest.digest for dataset in named_sources(self.dataset).values()}
        # The mixture is a list of [first example from which on it applies, weights by digest].
        mixture = order["data"]["mixture"]
        needed = {digest for first, weights in mixture if first < end for digest in weights}
        for digest in sorted(needed - present):
            raise DataError(
                f"the run consumed a dataset of digest {digest[:12]}..., and {self.dataset.name} "
                "is another one: name the right one by data.path=DIR, or among data.sources (with "
                "a weight of 0, if no longer used)"
            )


def columns(loader: StreamingLoader, names: tuple[str, ...], end: int) -> Iterator[Columns]:
    """Yields columns of the examples before `end`, sorted by "number". For a single replica."""
    for (batch,) in loader:
        arrays: Columns = {name: batch[name].numpy() for name in ("number", *names)}
        by_number = np.argsort(arrays["number"])
        # The loader is endless, so the last batch has examples from `end` on.
        kept = by_number[: np.searchsorted(arrays["number"][by_number], end)]
        if len(kept):
            yield {name: array[kept] for name, array in arrays.items()}
        if len(kept) < len(by_number):
            return
