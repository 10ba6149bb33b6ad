"""Linear probes of hidden states during training.

A probe reads rows of a small task with the current weights, in eval mode, and fits a ridge
classifier to their features. Dropout, masks and the data order are functions of counters, so a run
with probes takes the same steps as one without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from data_pipeline.reading.concat_dataset import AnyDataset
from samestep.errors import ConfigError, MissingExtra, SamestepError
from trainer.models import Model, ModelConfig
from trainer.models.inputs import Inputs
from trainer.objectives import Objective
from trainer.objectives.kinds.classification import Config as Classification
from trainer.strategies import Replica, Strategy
from trainer.training.observers import Observer
from trainer.training.observers.settings import Probe
from trainer.training.passes import Loader, on_device

_BATCH = 256
MICRO_BATCH = 32
"""Rows of a forward pass, for one device."""


@dataclass(frozen=True)
class Split:
    """Rows of a split of a probe's dataset, in order.

    Attributes:
        features: float32 [N, D].
        labels: int64 [N].
    """

    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


class ProbeReader:
    """Reads the features of a task's rows, and scores a classifier on them.

    Args:
        config: its settings.
        model: configuration of the model.
        open_split: opens the rows of "train" or "heldout" for a single pass.
    """

    def __init__(
        self,
        config: Probe,
        model: ModelConfig,
        open_split: Callable[[str], Loader],
    ) -> None:
        self.config = config
        self._open = open_split
        self._width, self._is_prefix = model.width, model.prefix_lm
        self._output = f"layer.{layer_of(config, model)}"

    @torch.no_grad()
    def read(self, model: nn.Module, strategy: Strategy, split: str, work: str) -> Split:
        """Computes the features of a split with the current weights. Collective.

        The host waits for the device once, after the last batch.

        Args:
            model: as `strategy.prepare` returns it; left in eval mode.
            split: "train" or "heldout".
            work: name for `Accelerator.graph`.

        Raises:
            SamestepError: a feature is not finite; on all ranks.
        """
        model.eval()
        loader = self._open(split)
        rows = min(self.config.rows, loader.examples)
        outputs: list[Tensor] = []
        columns: list[tuple[Tensor, ...]] = []
        # All replicas take equally many batches, so their collectives correspond.
        for micro_batches in itertools.islice(loader, -(-rows // batch_size(strategy.replica))):
            with strategy.accelerator.graph(work):
                for batch in micro_batches:
                    with strategy.autocast():
                        features = self._features(model, on_device(strategy, batch))
                    outputs.append(strategy.keep_rows(features))
                    columns.append((batch["number"], batch["digest"], batch["labels"]))
        loader.close()
        number, digest, labels = (torch.cat(parts) for parts in zip(*columns, strict=True))
        # Without rows that only pad a batch.
        # Padding rows have number -1 and rows of skipped shards digest 0; the limit cuts the rest.
        own = (number >= 0) & (number < rows) & (digest != 0)
        found = torch.cat(strategy.rows_on_host(outputs)).float()
        # Each row is on one replica, which fills it in, and the sum over replicas is complete. The
        # last two columns are the label and 1: of a skipped corrupt shard, rows stay 0.
        table = torch.zeros(rows, self._width + 2)
        table[number[own]] = torch.cat(
            (found[own], labels[own, None].float(), torch.ones(int(own.sum()), 1)), 1
        )
        with strategy.accelerator.graph(f"rows of {work}"):
            whole = strategy.all_reduce(table).cpu().numpy()
        return rows_of(whole)

    def _features(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The features of a micro-batch: float32 [B, D]."""
        tokens = batch["tokens"]
        real = batch["segments"] > 0 if "segments" in batch else torch.ones_like(tokens).bool()
        # All positions of a row see each other, as in the prefix of pre-training.
        if self._is_prefix:
            batch = {**batch, "prefix": real}
        # The row's label tells which positions a head reads, and there is no head.
        batch = {name: column for name, column in batch.items() if name != "predicted"}
        states: Tensor = model(Inputs.of(batch), frozenset({self._output}))[self._output].float()
        if self.config.pool == "first":
            return states[:, 0]
        # Padding has states too, and must not count.
        weights = real[..., None].float()
        return (states * weights).sum(1) / weights.sum(1)


class Probes(Observer):
    """Scores the probes of a run, each after its own number of steps.

    Args:
        readers: by name.
        model: as `strategy.prepare` returns it.
    """

    def __init__(
        self, readers: Mapping[str, ProbeReader], model: nn.Module, strategy: Strategy
    ) -> None:
        self._readers, self._model, self._strategy = readers, model, strategy

    def scores(self, step: int, last: bool) -> Iterator[Mapping[str, float]]:
        """Yields a row for each probe that is due, on the rank that fits its classifier."""
        for name, reader in self._readers.items():
            if step % reader.config.every and not last:
                continue
            train, heldout = (
                reader.read(self._model, self._strategy, split, f"{name} {split}")
                for split in ("train", "heldout")
            )
            self._model.train()
            # All ranks have the features. One fits the classifier, and writes the row.
            is_first = self._strategy.replica.index == 0
            yield {f"probe/{name}/accuracy": accuracy(train, heldout)} if is_first else {}


def batch_size(replica: Replica) -> int:
    """The global batch size of a probe: at least one row for each device."""
    return max(_BATCH, replica.count * replica.devices)


def rows_of(table: npt.NDArray[np.float32]) -> Split:
    """Takes rows apart: features, then the label, then 1, or 0 for a row that was skipped.

    Raises:
        SamestepError: a feature is not finite.
    """
    if not np.isfinite(table).all():
        raise SamestepError(
            "a probe has read hidden states that are not finite, so the weights are useless. "
            "Lower optimizer.lr, and start from an earlier checkpoint."
        )
    table = table[table[:, -1] > 0]
    return Split(table[:, :-2], table[:, -2].astype(np.int64))


def accuracy(train: Split, heldout: Split) -> float:
    """Fits a ridge classifier to the rows of `train`; returns its accuracy on `heldout`.

    The strength of the penalty is chosen by leaving out each training row in turn, in closed form.
    """
    from sklearn.linear_model import RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(train.labels)) == 1:  # nothing to tell apart
        return float((heldout.labels == train.labels[0]).mean())
    classifier = make_pipeline(StandardScaler(), RidgeClassifierCV(np.logspace(0, 4, 9)))
    classifier.fit(train.features.astype(np.float64), train.labels)
    return float(classifier.score(heldout.features.astype(np.float64), heldout.labels))


def layer_of(config: Probe, model: ModelConfig) -> int:
    """Resolves a negative layer number: -1 is the last layer."""
    return config.layer + model.layers + 1 if config.layer < 0 else config.layer


def build_objective(dataset: AnyDataset) -> Objective:
    """The objective that lays out the rows of a probe's dataset."""
    return Classification().build(dataset.tokenizer.vocabulary)


def check(
    name: str,
    config: Probe,
    probed: AnyDataset,
    dataset: AnyDataset,
    settings: ModelConfig,
    model: Model,
) -> None:
    """Rejects a probe that does not fit the run.

    Args:
        name: of the probe.
        probed: its dataset, which has rows for the objective.
        dataset: the run's.
        settings: configuration of the model.
        model: the run's.

    Raises:
        ConfigError: names the setting.
        MissingExtra: scikit-learn is not installed.
    """
    setting = f"probes.{name}"
    if find_spec("sklearn") is None:
        raise MissingExtra("scikit-learn", "tasks", setting)
    if probed.tokenizer.fingerprint != dataset.tokenizer.fingerprint:
        raise ConfigError(
            f"{setting}.path is {config.path}, which was built with another tokenizer than "
            f"{dataset.name}. Build it with that tokenizer."
        )
    layer = layer_of(config, settings)
    if f"layer.{layer}" not in model.offers or layer < 0:
        raise ConfigError(
            f"{setting}.layer is {config.layer}, and the model has the layers 0 to "
            f"{settings.layers}. Use one of these, or -1 for the last."
        )
    if config.sequence_length > model.max_sequence_length:
        raise ConfigError(
            f"{setting}.sequence_length is {config.sequence_length}, and the model has "
            f"{model.max_sequence_length} positions. Use at most these."
        )
    if config.pool == "first" and settings.causal and not settings.prefix_lm:
        raise ConfigError(
            f"{setting}.pool is first, and the first position of this model sees nothing but "
            "itself. Use mean."
        )
