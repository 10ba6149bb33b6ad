"""Runs with `training.exact: bitwise`, and the SHA-256 of all that they have computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from samestep.config import load
from tests.conformance.worker import (
    FAMILIES,
    STRATEGIES,
    TASKS,
    Losses,
    make_trainer,
    recorded,
)
from tests.processes import run_ranks
from trainer.accelerators.detect import detect
from trainer.partition import flat_start, local_parts
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.observers.digests import Row, digests_of
from trainer.training.recorder import Destinations
from trainer.training.state import state_tensors

Pieces = list[tuple[str, int, bytes]]
"""Name of a tensor, first element and bytes of a part of it."""

BITWISE = (
    "training.exact=bitwise",
    "training.micro_batch_size=2",
    "training.digest_every=4",
    "accelerator={kind: cpu, threads: 1}",
)
DROPOUT = "model.attention_dropout=0.1"
WITHOUT_ATTENTION = ("lstm", "bilm", "elmo")


def train(file: str, overrides: list[str], resume: bool) -> tuple[Pieces, list[float], Row]:
    """The state after a run, as this rank holds it, the losses and the last row of digests."""
    world = World.start(60)
    accelerator = detect()
    world.connect(accelerator.collective_backend, accelerator.collective_device)
    trainer = make_trainer(load(Experiment, file, overrides), world)
    if resume:
        trainer.restore(None)
    losses = Losses()
    with recorded():
        trainer.fit(Destinations([losses]))
    trainer.loader.close()
    pieces = []
    for name, tensor in state_tensors(trainer.strategy.parameters, trainer.optimizer).items():
        (part,) = local_parts([tensor])
        pieces.append((name, flat_start(tensor), part.detach().contiguous().numpy().tobytes()))
    world.close()
    return pieces, losses.values, digests_of(trainer.observers).row


def digest(ranks: Sequence[Pieces]) -> str:
    """SHA-256 of the whole state; copies of a part are equal."""
    parts: dict[tuple[str, int], bytes] = {}
    for pieces in ranks:
        for name, start, data in pieces:
            assert parts.setdefault((name, start), data) == data or not data, name
    whole: dict[str, bytes] = {}
    for (name, _), data in sorted(parts.items()):
        whole[name] = whole.get(name, b"") + data
    return hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()


def run(
    file: str, output: Path, size: int, strategy: str, *overrides: str, resume: bool = False
) -> tuple[str, list[float], Row]:
    """The digest of the state at the end, the losses, and the last row of digests."""
    strategy = STRATEGIES.get(strategy, strategy)
    settings = [f"output={output}", *BITWISE, f"strategy={strategy}", *overrides]
    ranks = run_ranks(size, train, file, settings, resume, timeout=1200)
    _, losses, row = ranks[0]
    return digest([pieces for pieces, *_ in ranks]), losses, row


def task(name: str, precision: str) -> list[str]:
    packing = FAMILIES.get(name, "best_fit")
    dropout = [] if name in WITHOUT_ATTENTION else [DROPOUT]
    return [*TASKS[name], *dropout, f"data.packing={packing}", f"training.precision={precision}"]
