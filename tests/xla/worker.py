"""What runs under torch-xla: a run as an experiment describes it, and afterwards what XLA says of
it, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import torch_xla
from torch import Tensor
from torch_xla.debug import metrics as xla_metrics

from samestep.config import load
from tests.conformance.worker import Losses, make_trainer
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.recorder import Destinations

_READING = "aten::_local_scalar_dense"  # float(tensor), as for logging


class Transfers(Losses):
    """Keeps, besides the losses, how many transfers from the devices there had been at each row of
    metrics, and rows
    of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[int] = []
        self.scores: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        self.transfers.append(_count("TransferFromDeviceTime"))
        if "heldout/loss" in metrics:
            self.scores.append(dict(metrics))


def main() -> None:
    file, resume, *overrides = sys.argv[1:]
    experiment = load(Experiment, file, overrides)
    world = World.start(60)
    world.connect("gloo")
    trainer = make_trainer(experiment, world)
    if resume != "start":
        trainer.restore(int(resume))
    tracker = Transfers()
    trainer.fit(Destinations([tracker]))
    trainer.loader.close()
    report = {
        "losses": tracker.values,
        "scores": tracker.scores,
        "compilations": trainer.strategy.accelerator.compilations,
        "compiled": _count("CompileTime"),
        "transfers": tracker.transfers,
        "fallbacks": [
            name
            for name in xla_metrics.counter_names()
            if name.startswith("aten::") and name != _READING
        ],
        "splits": {
            name: torch_xla._XLAC._get_xla_sharding_spec(each)
            for name, each in trainer.tensors().items()
        },
        "shards": {name: _shards(each) for name, each in trainer.tensors().items()},
    }
    sys.stdout.write(json.dumps(report))


def _shards(tensor: Tensor) -> list[list[int]]:
    torch_xla.core.xla_model.wait_device_ops()
    return [list(shard.shape) for shard, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]


def _count(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return 0 if data is None else data[0]


if __name__ == "__main__":
    main()
