"""What `training.exact: bitwise` costs: steps beside ordinary ones, on 1, 2 and 4 processes.

    python -m benchmarks.exact
    python -m benchmarks.exact --model base --processes 1 2

Each process trains the same model twice, in ordinary and in bitwise steps, which take turns. The
model is a BERT with AdamW, on the CPU with one thread for each process: under DDP, and under FSDP2
with the layers' gradients reduced after each micro-batch and once a step.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.dataset import write_dataset
from benchmarks.pairing import Comparison, arguments, in_rounds, publish
from benchmarks.step import SHAPES, bert
from samestep.config import load
from trainer.accelerators.detect import detect
from trainer.strategies.world import World
from trainer.training.compose import build_trainer, open_checkpointer
from trainer.training.experiment import Experiment

STRATEGIES = {
    "single": "single",
    "DDP": "ddp",
    "FSDP2": "fsdp",
    "FSDP2, each micro-batch": "{kind: fsdp, reduce_each_micro_batch: true}",
}
BATCH, UNIT = 16, 4


def measure(
    rank: int, size: int, port: int, file: str, strategy: str, folder: str, repeats: int
) -> dict[str, list[float]]:
    """Seconds of ordinary and bitwise steps, by name; runs in each rank."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**address, "RANK": str(rank), "WORLD_SIZE": str(size)})
    world = World.start(600)
    accelerator = detect()
    world.connect(accelerator.collective_backend, accelerator.collective_device)
    trainers = {}
    for exact in ("bitwise", "tolerance"):
        settings = [f"strategy={strategy}", f"training.exact={exact}", f"output={folder}/{exact}"]
        experiment = load(Experiment, file, settings)
        built = experiment.strategy.build(accelerator, world, experiment.training.precision)
        checkpointer = open_checkpointer(experiment, world)
        trainers[exact] = build_trainer(experiment, experiment.data.open(), built, checkpointer)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    batches = {name: iter(trainer.loader) for name, trainer in trainers.items()}
    for number, name in in_rounds(list(trainers), range(-1, repeats)):
        micro_batches = next(batches[name])
        dist.barrier()
        began = time.perf_counter()
        trainers[name].train_step(micro_batches)
        dist.barrier()
        if number >= 0:
            seconds[name].append(time.perf_counter() - began)
    for trainer in trainers.values():
        trainer.close()
    world.close()
    return seconds


def in_ranks(size: int, *settings: str | int) -> dict[str, list[float]]:
    """Runs `measure` in each rank; returns what rank 0 measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(size) as pool:
        ranks = [(rank, size, port, *settings) for rank in range(size)]
        return pool.starmap(measure, ranks, chunksize=1)[0]


def compare(
    folder: Path, model: str, processes: int, repeats: int, strategies: Sequence[str]
) -> list[Comparison]:
    """One comparison for each strategy that this number of processes can use."""
    file = folder / "experiment.yaml"
    file.write_text(f"""
accelerator: {{kind: cpu, threads: 1}}
data: {{path: {folder}, sequence_length: 128}}
model: {bert(model)}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-4}}
training: {{steps: 1000, global_batch_size: {BATCH}, micro_batch_size: {UNIT}}}
""")
    found = []
    for title in strategies:
        strategy = STRATEGIES[title]
        if (strategy == "single") != (processes == 1):
            continue
        with tempfile.TemporaryDirectory(dir=folder) as output:
            taken = in_ranks(processes, str(file), strategy, output, repeats)
        rates = {name: [1 / each for each in seconds] for name, seconds in taken.items()}
        comparison = Comparison(
            f"BERT-{model}, {title}, processes: {processes}", "steps", "wall", rates
        )
        for name, seconds in taken.items():
            comparison.notes[name] = f"{statistics.median(seconds):.3g} s each"
        found.append(comparison)
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument(
        "--model", choices=SHAPES, nargs="+", default=["mini"], help="which BERT (default: mini)"
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 4], help="(default: 1 2 4)"
    )
    parser.add_argument(
        "--strategies", choices=STRATEGIES, nargs="+", default=[*STRATEGIES], help="(default: all)"
    )
    args = parser.parse_args(given)
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder))
        for model in args.model:
            for processes in args.processes:
                found += compare(Path(folder), model, processes, args.repeats, args.strategies)
    publish(found, args.json)


if __name__ == "__main__":
    main()
