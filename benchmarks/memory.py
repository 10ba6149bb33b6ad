"""What strategies take of memory, beside what `samestep plan` says, and what a save and a restore
cost under each.

    python -m benchmarks.memory

Four processes train a BERT of 110 million parameters for some steps, save, and restore what they
have saved. Of each process the resident memory is read from /proc every few milliseconds. glibc
keeps what is freed, which would hide that partitions are smaller than the whole;
MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ make it give memory back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.dataset import VOCAB_SIZE, write_dataset
from benchmarks.step import SHAPES
from samestep.config import load
from trainer.inspect.plan.plan import divide
from trainer.inspect.plan.trace import Activations, Step
from trainer.partition import local_parts
from trainer.strategies import Strategy
from trainer.training.experiment import Experiment
from trainer.training.passes import accumulate_gradients

STRATEGIES = {
    "single": "single",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": "{kind: fsdp, replicas: 2}",
    "zero1": "{kind: deepspeed, stage: 1}",
    "zero2": "{kind: deepspeed, stage: 2}",
    "zero3": "{kind: deepspeed, stage: 3}",
}
_STEPS = 3
_SAMPLE_SECONDS = 0.005
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


@dataclass(frozen=True)
class Held:
    """Bytes of this process's tensors: their own parts of storages, each counted once.

    Attributes:
        parameters: that the optimizer updates, and the copies that passes work with.
        gradients: of those.
        optimizer: its state.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def held(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Looks at the tensors of a process; gradients must be there, as after a backward pass."""
    parameters = list(strategy.parameters.values())
    # Under ZeRO the model's own tensors are others than those that are updated; in stage 3,
    # partitions and few whole.
    copies = list(model.parameters())
    copies += [each.ds_tensor for each in copies if hasattr(each, "ds_tensor")]
    state = [
        value for each in optimizer.state.values() for key, value in each.items() if key != "step"
    ]
    return Held(
        _bytes([*parameters, *copies]),
        _bytes(each.grad for each in parameters if each.grad is not None),
        _bytes(state),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    places = {(part.data_ptr(), part.nbytes) for part in local_parts(tensors) if part.numel()}
    return sum(nbytes for _, nbytes in places)


class Resident:
    """This process's resident memory, sampled by a thread."""

    def __init__(self) -> None:
        self._peak = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, self.now())
            time.sleep(_SAMPLE_SECONDS)

    @staticmethod
    def now() -> int:
        """Bytes."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @contextmanager
    def watch(self, figures: dict[str, float], name: str) -> Iterator[None]:
        """Notes how long something took and how far memory went above what it was before."""
        before = self._peak = self.now()
        began = time.perf_counter()
        yield
        figures[f"{name}_seconds"] = time.perf_counter() - began
        figures[f"{name}_bytes"] = max(self._peak, self.now()) - before


def work(file: str, overrides: list[str]) -> dict[str, float]:
    """One process's part: trains, saves, restores; returns its figures."""
    from trainer.training.compose import build_trainer, open_checkpointer, open_strategy

    resident, figures = Resident(), dict[str, float]()
    experiment = load(Experiment, file, overrides)
    with open_strategy(experiment) as strategy:
        base = resident.now()
        checkpointer = open_checkpointer(experiment, strategy.world)
        trainer = build_trainer(experiment, experiment.data.open(), strategy, checkpointer)
        trainer.model.train()
        built, batches = resident.now(), iter(trainer.loader)
        trainer.record_order()
        with resident.watch(figures, "steps"):
            for _ in range(_STEPS - 1):
                trainer.train_step(next(batches))
        figures["steady_bytes"] = resident.now() - base
        figures["peak_bytes"] = figures["steps_bytes"] + built - base
        with resident.watch(figures, "save"):
            began = time.perf_counter()
            trainer.save([checkpointer])
            figures["stall_seconds"] = time.perf_counter() - began
            checkpointer.wait()
        with resident.watch(figures, "restore"):
            trainer.restore(None)
        accumulate_gradients(trainer.model, trainer.objectives[0], strategy, next(batches))
        tensors = held(strategy, trainer.model, trainer.optimizer)
        figures |= {f"tensor_{name}": value for name, value in vars(tensors).items()}
        trainer.close()
    return figures


def measure(folder: Path, file: Path, strategy: str, processes: int) -> list[dict[str, float]]:
    """Runs the processes of one strategy; returns the figures of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = 1 if strategy == "single" else processes
    shared = {
        **os.environ,
        **_MALLOC,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "DS_ACCELERATOR": "cpu",
    }
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    overrides = [f"output={folder / strategy}", f"strategy={STRATEGIES[strategy]}"]
    results = [folder / f"{strategy}-{rank}.json" for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.memory",
                *overrides,
                "--work",
                str(file),
                str(result),
            ],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, result in enumerate(results)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"a process of {strategy} failed")
    return [json.loads(result.read_text()) for result in results]


def table(found: dict[str, list[dict[str, float]]], file: str) -> str:
    """What was measured, beside the plan, as Markdown; of the process that has most of each."""
    step, nothing = Step(load(Experiment, file), on_cpu=True), Activations(0, 0, 0, 0)
    lines = [
        "| strategy | parameters | gradients | optimizer | planned | off by | steady RSS | peak "
        "RSS | stall | save "
        "| save, RSS | restore | restore, RSS |",
        f"|---{12 * '|---:'}|",
    ]
    for name, ranks in found.items():
        most = {key: max(each[key] for each in ranks) for key in ranks[0]}
        own = load(Experiment, file, [f"strategy={STRATEGIES[name]}"])
        plan = divide(name, own, step, len(ranks)).held(nothing, accumulates=False)
        # ZeRO-1 has let go of the whole gradients by then.
        partition = plan.gradients - (
            4 * sum(each.elements for each in step.parameters.values()) if name == "zero1" else 0
        )
        state = plan.state + partition
        real = most["tensor_parameters"] + most["tensor_gradients"] + most["tensor_optimizer"]
        sizes = [most[f"tensor_{kind}"] for kind in ("parameters", "gradients", "optimizer")] + [
            state
        ]
        cells = [
            name,
            *map(_mb, sizes),
            f"{state / real - 1:+.1%}",
            _mb(most["steady_bytes"]),
            _mb(most["peak_bytes"]),
        ]
        cells += [
            f"{most['stall_seconds']:.2f} s",
            f"{most['save_seconds']:.2f} s",
            _mb(most["save_bytes"]),
        ]
        cells += [f"{most['restore_seconds']:.2f} s", _mb(most["restore_bytes"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=SHAPES, default="base", help="which BERT (default: base)"
    )
    parser.add_argument(
        "--processes", type=int, default=4, metavar="N", help="of each strategy (default: 4)"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--work", nargs=2, metavar=("FILE", "RESULT"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.work:
        Path(args.work[1]).write_text(json.dumps(work(args.work[0], args.overrides)))
        return
    layers, width = SHAPES[args.model]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_dataset(folder)
        file = folder / "experiment.yaml"
        file.write_text(f"""
output: {folder}/run
accelerator: cpu
data: {{path: {folder}, sequence_length: 128, packing: concat}}
model: {{kind: bert, vocab_size: {VOCAB_SIZE}, layers: {layers}, width: {width}, heads: {width // 64},
  ffn_width: {4 * width}, attention_dropout: 0.0}}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-4}}
training: {{steps: {_STEPS}, global_batch_size: {args.processes}, micro_batch_size: 1, verify_state_every: null}}
checkpoint: {{every: 1000000}}
""")  # noqa: E501
        found = {name: measure(folder, file, name, args.processes) for name in args.strategies}
        print(
            f"{date.today()}, {args.processes} processes on {os.cpu_count()} cores, "
            f"{platform.machine()}; MB, seconds\n"
        )
        print(table(found, str(file)))


if __name__ == "__main__":
    main()
