"""`training.exact: bitwise`: the same bits of weights and optimizer state at any world size."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.worker import (
    FAMILIES,
    STRATEGIES,
    TASKS,
    TEXT_TASKS,
    Losses,
    make_trainer,
    recorded,
)
from tests.processes import run_ranks
from trainer.accelerators.detect import detect
from trainer.checkpoint import integrity
from trainer.config import load
from trainer.partition import flat_start, local_parts
from trainer.strategies.world import World
from trainer.training.digests import Row
from trainer.training.experiment import Experiment
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
WITHOUT_ATTENTION = ("lstm", "bilm")


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
        trainer.fit([losses])
    trainer.loader.close()
    pieces = []
    for name, tensor in state_tensors(trainer.strategy.parameters, trainer.optimizer).items():
        (part,) = local_parts([tensor])
        pieces.append((name, flat_start(tensor), part.detach().contiguous().numpy().tobytes()))
    world.close()
    return pieces, losses.values, trainer.digests.row


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
    ranks = run_ranks(size, train, file, settings, resume)
    _, losses, row = ranks[0]
    return digest([pieces for pieces, *_ in ranks]), losses, row


def assert_same_bits(
    file: str, folder: Path, layouts: Sequence[tuple[int, str]], *overrides: str
) -> None:
    expected = run(file, folder / "one", 1, "single", *overrides)
    for number, (size, strategy) in enumerate(layouts):
        found = run(file, folder / f"{number}", size, strategy, *overrides)
        assert found == expected, f"{size} {strategy}"


def task(name: str, precision: str) -> list[str]:
    packing = FAMILIES.get(name, "best_fit")
    dropout = [] if name in WITHOUT_ATTENTION else [DROPOUT]
    return [*TASKS[name], *dropout, f"data.packing={packing}", f"training.precision={precision}"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bert(experiment_file: str, tmp_path: Path, precision: str) -> None:
    layouts = [(2, "ddp"), (3, "fsdp")]
    assert_same_bits(experiment_file, tmp_path, layouts, *task("mlm", precision))


def test_t5_with_adafactor(t5_experiment: str, tmp_path: Path) -> None:
    layouts = [(4, "hsdp"), (1, "fsdp")]
    assert_same_bits(t5_experiment, tmp_path, layouts, *task("span_corruption", "bf16"))


def test_scattered_after_each_unit(experiment_file: str, tmp_path: Path) -> None:
    scattering = "{kind: fsdp, reduce_each_micro_batch: true}"
    assert_same_bits(experiment_file, tmp_path, [(2, scattering)], *task("mlm_lamb", "fp32"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlm_lamb", *{**FAMILIES, **dict.fromkeys(TEXT_TASKS)}])
def test_every_family_and_optimizer(
    experiment_file: str, t5_experiment: str, tmp_path: Path, name: str
) -> None:
    file = t5_experiment if name in TEXT_TASKS else experiment_file
    assert_same_bits(file, tmp_path, [(3, "fsdp"), (7, "ddp")], *task(name, "bf16"))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_the_same_through_resumes_at_other_world_sizes(
    experiment_file: str, tmp_path: Path, precision: str
) -> None:
    changed = [*task("mlm", precision), "checkpoint.every=3", "checkpoint.keep_last=9"]
    expected, *_ = run(experiment_file, tmp_path / "whole", 1, "single", *changed)
    output = tmp_path / "resumed"
    run(experiment_file, output, 5, "fsdp", *changed)
    # Each world loses what it did after a checkpoint, as after a kill.
    for step, size, strategy in ((3, 3, "ddp"), (6, 4, "hsdp"), (9, 1, "single")):
        for later in range(step + 3, 13, 3):
            shutil.rmtree(integrity.step_folder(output / "checkpoints", later))
        found, *_ = run(experiment_file, output, size, strategy, *changed, resume=True)
        assert found == expected, f"{size} {strategy}"


def test_what_must_differ(experiment_file: str, tmp_path: Path) -> None:
    """Ordinary sums at another world size, units of another size, and an example left out."""
    exact, *_ = run(experiment_file, tmp_path / "exact", 1, "single")
    ordinary = "training.exact=tolerance"
    one, *_ = run(experiment_file, tmp_path / "one", 1, "single", ordinary)
    three, *_ = run(experiment_file, tmp_path / "three", 3, "ddp", ordinary)
    larger, *_ = run(
        experiment_file, tmp_path / "larger", 1, "single", "training.micro_batch_size=4"
    )
    skipped, *_ = run(experiment_file, tmp_path / "skipped", 1, "single", "data.exclude=[[17, 18]]")
    assert len({exact, one, three, larger, skipped}) == 5
