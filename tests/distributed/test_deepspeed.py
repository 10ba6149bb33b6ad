"""ZeRO takes the steps of a single process, in any stage, with any optimizer, and goes on from any
strategy's state.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from samestep.config import dump, load
from tests.conformance.matrix import RELATIVE
from tests.conformance.worker import Losses, make_trainer
from tests.integration.commands import Samestep
from trainer.accelerators.kinds import cpu
from trainer.inspect.audit.batches import Run
from trainer.inspect.audit.verify import verify
from trainer.partition import SegmentParameter, whole_shape
from trainer.strategies.kinds import deepspeed
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.recorder import Destinations
from trainer.training.weights.loading import load_weights

ADAMW = [
    "optimizer={kind: adamw, lr: 1e-3}",
    "training.evaluate_every=6",
    "training.evaluate_batches=2",
]
LAMB = ["optimizer={kind: lamb, lr: 1e-2}", "training.verify_state_every=2"]
# Without the last line, ZeRO-3 would keep all parameters of so small a model gathered.
JSON = {
    "train_batch_size": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": "auto",
        "overlap_comm": False,
        "stage3_param_persistence_threshold": 100,
    },
}
SHARED = (
    "model={kind: t5, vocab_size: 700, layers: 2, width: 32, heads: 2, head_width: 16, ffn_width: "
    "64, dropout: 0.1,"
    " attention_dropout: 0.0, architecture: shared_encoder_decoder}"
)
SETTINGS = {  # each is compared with the run of one process that differs in the strategy alone
    "adamw": ADAMW,
    "lamb": LAMB,
    "bf16": ["training.precision=bf16"],
    "fp16": ["training.precision=fp16"],
    "shared layers": [SHARED, "training.activation_checkpointing=true", "training.steps=4"],
    "skipped step": ["training.faults={action: skip}", "training.steps=8"],
}
TOLERANCE = {"bf16": 1e-3, "fp16": 1e-3}
RUNS = [  # settings, processes, strategy
    *((name, 1, "single") for name in SETTINGS),
    *(("adamw", 2, f"{{kind: deepspeed, stage: {stage}, config: CONFIG}}") for stage in (1, 2, 3)),
    *(("lamb", 2, f"{{kind: deepspeed, stage: {stage}}}") for stage in (1, 2, 3)),
    ("lamb", 2, "{kind: deepspeed, stage: 2, offload_optimizer: true}"),
    *(
        (name, 2, "{kind: deepspeed, stage: 3}")
        for name in ("bf16", "fp16", "shared layers", "skipped step")
    ),
    *((name, 2, "{kind: deepspeed, stage: 1}") for name in ("bf16", "skipped step")),
    ("lamb", 3, "{kind: deepspeed, stage: 1}"),
    ("adamw", 3, "{kind: deepspeed, stage: 3, offload_optimizer: true, offload_parameters: true}"),
]
CHAIN = [
    (2, "{kind: deepspeed, stage: 3}"),
    (4, "fsdp"),
    (3, "ddp"),
    (2, "{kind: deepspeed, stage: 1}"),
    (1, "single"),
]
EACH = 5  # steps of each link


def train(
    file: str, overrides: list[str], world: World, sick: bool = False, ledger: Path | None = None
) -> Losses:
    """The losses of a run, from its newest checkpoint on.

    With `sick`, step 3 has a gradient that is not finite.
    """
    experiment = load(Experiment, file, overrides)
    trainer = make_trainer(experiment, world)
    backward = trainer.strategy.backward

    def injected(loss: Tensor) -> None:
        first_try = (
            sick
            and trainer.state.step == 2
            and world.rank == 0
            and trainer.loader.consumed[0][0] == 20
        )
        backward(loss * math.inf if first_try else loss)

    trainer.strategy.backward = injected  # type: ignore[method-assign]
    if (step := trainer.checkpoints.durable.latest()) is not None:
        trainer.restore(step)
    tracker = Losses("train/loss", "heldout/loss")
    trainer.fit(Destinations([tracker], ledger if world.rank == 0 else None))
    trainer.close()
    if ledger is not None and world.rank == 0:
        Path(experiment.output, "config.yaml").write_text(dump(experiment), encoding="utf-8")
    return tracker


def steps(folder: Path, size: int) -> None:
    """Makes the runs of so many processes, and writes what their losses were."""
    world = World.start(60)
    world.connect("gloo")
    for number, (name, processes, strategy) in enumerate(RUNS):
        if processes == size:
            strategy = strategy.replace("CONFIG", str(folder / "ds.json"))
            file = "t5.yaml" if name == "shared layers" else "bert.yaml"
            overrides = ["training.steps=6", f"strategy={strategy}", f"output={folder}/{number}"]
            tracker = train(
                str(folder / file),
                [*overrides, *SETTINGS[name]],
                world,
                sick=name == "skipped step",
            )
            if world.rank == 0:
                (folder / f"{number}.json").write_text(json.dumps(tracker.values))
    world.close()


def link(folder: Path, size: int, number: str) -> None:
    """One part of a run that changes its back-end, or ("whole") the same run in one piece."""
    world = World.start(60)
    world.connect("gloo")
    _, strategy = (0, "single") if number == "whole" else CHAIN[int(number)]
    part = EACH * (len(CHAIN) if number == "whole" else int(number) + 1)
    output = folder / ("whole" if number == "whole" else "chain")
    output.mkdir(exist_ok=True)
    overrides = [
        f"output={output}",
        f"training.steps={part}",
        f"strategy={strategy}",
        "schedule.decay=constant",
    ]
    tracker = train(str(folder / "bert.yaml"), overrides, world, ledger=output / "ledger.jsonl")
    if world.rank == 0:
        (folder / f"link-{number}.json").write_text(json.dumps(tracker.values))
    world.close()


VARIANTS: dict[
    str, tuple[int, dict[str, Any]]
] = {  # stages, each with what changes how partitions are laid or filled
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "1, round robin": (1, {"round_robin_gradients": True}),
    "2, round robin": (2, {"round_robin_gradients": True}),
    "1, without buckets": (1, {"contiguous_gradients": False}),
    "2, all-reduced": (2, {"reduce_scatter": False, "overlap_comm": True}),
    "2, rank by rank": (2, {"use_multi_rank_bucket_allreduce": False}),
    "3, in groups": (3, {"sub_group_size": 8, "stage3_param_persistence_threshold": 0}),
    "3, all-reduced": (
        3,
        {"stage3_use_all_reduce_for_fetch_params": True, "memory_efficient_linear": False},
    ),
}
INPUT, SCORES = torch.tensor([[1.0, 2, 3], [4, 5, 7]]), torch.arange(5) + 1.0


class Partial(nn.Module):
    """A model whose last parameter no pass reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 5), nn.Linear(7, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def partitions(folder: Path, size: int) -> None:
    """What a process holds of parameters and of gradients that differ in each element, process and
    micro-batch.
    """
    world = World.start(60)
    world.connect("gloo")
    found: dict[str, Any] = {}
    for name, (stage, zero) in VARIANTS.items():
        file = folder / f"{name}-{world.rank}.json"
        file.write_text(json.dumps({"zero_optimization": zero}))
        strategy = deepspeed.Config(stage, config=str(file)).build(
            cpu.Config().build(), world, "fp32"
        )  # type: ignore[arg-type]
        with torch.device("meta"):
            model: nn.Module = Partial()
        model, optimizer = strategy.prepare(
            model,
            lambda named: torch.optim.SGD([p for _, p in named], lr=1.0),
            lambda _, a, b: torch.arange(a, b) + 1.0,
        )
        segments = {
            name: each
            for name, each in strategy.parameters.items()
            if isinstance(each, SegmentParameter)
        }
        assert segments.keys() == strategy.parameters.keys()
        for _ in range(2):
            for micro_batch in (1, 2):
                with strategy.accumulate(last=micro_batch == 2):
                    rows = model(INPUT * micro_batch * (world.rank + 1))
                    strategy.backward((rows @ SCORES).sum() / 4)
        found[name] = {
            "shapes": {name: list(whole_shape(each)) for name, each in segments.items()},
            "ranges": {name: (each.segment.start, each.numel()) for name, each in segments.items()},
            "gradients": {
                name: None if each.grad is None else each.grad.tolist()
                for name, each in segments.items()
            },
            "norm": float(strategy.clip_grad_norm(None)),
        }
        strategy.step(optimizer, torch.tensor(0.0))
        with torch.no_grad():
            found[name]["output"] = model(torch.tensor([1.0, 0, 0])).tolist()
    (folder / f"partitions-{world.rank}.json").write_text(json.dumps(found))
    world.close()


def as_rank(
    rank: int, size: int, port: int, scenario: Callable[..., None], *arguments: Any
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    scenario(*arguments)
    os._exit(0)  # without waiting for peers' sockets and threads


def host(pipe: Connection) -> None:
    """Keeps a store until it is killed. The process that forks ranks must not: its threads may hold
    locks of the C library at a fork, for which a rank would wait forever.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def main(folder: Path, jobs: list[tuple[int, Callable[..., None], list[str]]]) -> int:
    """Runs scenarios in worlds of processes that are forked from this one, which has imported all
    that they need.
    """
    assert "deepspeed" not in sys.modules, (
        "it takes seconds to import, so runs with other strategies must not"
    )
    for module in ("torch._dynamo", "trainer.strategies.deepspeed.zero"):
        importlib.import_module(module)
    (folder / "ds.json").write_text(json.dumps(JSON))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    fork = multiprocessing.get_context("fork")
    for size, scenario, arguments in jobs:
        receiver, sender = fork.Pipe(duplex=False)
        store = fork.Process(target=host, args=(sender,), daemon=True)
        store.start()
        port = receiver.recv()
        ranks = [
            fork.Process(
                target=as_rank, args=(rank, size, port, scenario, folder, size, *arguments)
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        store.kill()
        store.join()
        if any(process.exitcode for process in ranks):
            return 1
    return 0


def run(folder: Path, *jobs: str) -> None:
    """Runs scenarios, "size:name:arguments", one after the other, and shows what the ranks that
    fail have to say.
    """
    script = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(folder), *jobs],
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert script.returncode == 0, script.stdout


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # all runs together: 60 s of work


@pytest.fixture(scope="module")
def folder(
    experiment_file: str, t5_experiment: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What all the runs have written."""
    folder = tmp_path_factory.mktemp("zero")
    for name, file in (("bert.yaml", experiment_file), ("t5.yaml", t5_experiment)):
        (folder / name).symlink_to(file)
    chain = [f"{size}:link:{number}" for number, (size, _) in enumerate(CHAIN)]
    run(folder, *(f"{size}:steps" for size in (1, 2, 3)), "1:link:whole", *chain, "2:partitions")
    return folder


@pytest.mark.parametrize("number", [i for i, run in enumerate(RUNS) if run[1] > 1])
def test_zero_takes_the_steps_of_one_process(folder: Path, number: int) -> None:
    name = RUNS[number][0]
    reference = next(i for i, run in enumerate(RUNS) if run[:2] == (name, 1))
    mine, theirs = (json.loads((folder / f"{i}.json").read_text()) for i in (number, reference))
    assert len(mine) == len(theirs) >= 4
    np.testing.assert_allclose(mine, theirs, rtol=TOLERANCE.get(name, RELATIVE))


def test_one_run_changes_its_back_end_again_and_again(folder: Path) -> None:
    links = [
        json.loads((folder / f"link-{number}.json").read_text()) for number in range(len(CHAIN))
    ]
    assert all(len(each) == EACH for each in links), "each link goes on from the one before"
    whole = json.loads((folder / "link-whole.json").read_text())
    np.testing.assert_allclose(np.concatenate(links), whole, rtol=RELATIVE)
    uninterrupted, weights = (load_weights(folder / name).tensors for name in ("whole", "chain"))
    for name in uninterrupted:
        torch.testing.assert_close(weights[name], uninterrupted[name], rtol=0, atol=1e-5)
    verdict = verify(Run.open(str(folder / "chain"), []))
    assert (verdict.problems, verdict.steps) == ([], EACH * len(CHAIN))


@pytest.fixture(scope="module", params=VARIANTS)
def ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return [
        json.loads((folder / f"partitions-{rank}.json").read_text())[request.param]
        for rank in range(2)
    ]


def test_partitions_cover_each_parameter_once(ranks: list[dict[str, Any]]) -> None:
    shapes = {"used.weight": [5, 3], "used.bias": [5], "unused.weight": [1, 7]}
    assert all(rank["shapes"] == shapes for rank in ranks)
    for name, shape in shapes.items():
        covered = [
            place
            for rank in ranks
            for place in range(rank["ranges"][name][0], sum(rank["ranges"][name]))
        ]
        assert sorted(covered) == list(range(math.prod(shape)))
    sizes = [sum(length for _, length in rank["ranges"].values()) for rank in ranks]
    assert max(sizes) - min(sizes) <= 3, "the last parts are padded"


def test_gradients_are_summed_once_and_forgotten(ranks: list[dict[str, Any]]) -> None:
    """2 replicas of 2 micro-batches of 2 rows, each loss divided by 4, although the step came
    twice.
    """
    weight = SCORES[:, None] * INPUT.sum(0) * (1 + 2) * (1 + 2) / 4
    expected = {"used.weight": weight, "used.bias": SCORES * 2}
    for found in ranks:
        assert found["gradients"]["unused.weight"] is None, "no pass has reached it"
        for name, gradient in expected.items():
            start, length = found["ranges"][name]
            assert found["gradients"][name] == pytest.approx(
                gradient.flatten()[start : start + length].tolist()
            )
        assert found["norm"] == pytest.approx(
            float(sum(each.square().sum() for each in expected.values())) ** 0.5
        )
        updated = [1 + 3 * i + i + 1 - float(weight[i, 0]) - 2 * (i + 1) for i in range(5)]
        assert found["output"] == pytest.approx(updated), "passes see the update"


def test_a_clash_is_refused_before_the_start(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 32}')
    strategy = f"strategy={{kind: deepspeed, config: {tmp_path / 'ds.json'}}}"
    result = samestep("train", experiment_file, f"output={tmp_path / 'run'}", strategy)
    assert result.code == 2
    assert "train_batch_size is 32 and by training.global_batch_size it is 10" in result.message


if __name__ == "__main__":
    commands = [argument.split(":") for argument in sys.argv[2:]]
    sys.exit(
        main(
            Path(sys.argv[1]),
            [(int(size), globals()[name], rest) for size, name, *rest in commands],
        )
    )
