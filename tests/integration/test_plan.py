"""`samestep plan` beside what real processes hold and exchange, and the command itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.collectives import Kind, count_fake, count_step
from benchmarks.memory import STRATEGIES, held
from samestep.config import load
from tests.processes import run_ranks
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.plan import divide
from trainer.inspect.plan.strategies import Collective
from trainer.inspect.plan.trace import Activations, Step
from trainer.optim import Structure, groups
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

_NONE = Activations(0, 0, 0, 0)


@dataclass(frozen=True)
class Measured:
    """What a process holds in parameters, gradients and optimizer state, and exchanges, in bytes.

    Attributes:
        held: by the name of a strategy.
        exchanged: in a step of one and of two micro-batches, by strategy.
    """

    held: dict[str, tuple[int, int, int]]
    exchanged: list[dict[str, dict[Kind, int]]]


def _measure(file: str, strategies: dict[str, str], counted: list[str]) -> Measured:
    world = World.start(600)
    world.connect("gloo")
    experiments = {
        name: load(Experiment, file, [f"strategy={each}"]) for name, each in strategies.items()
    }
    return Measured(
        {name: _hold(experiment, world) for name, experiment in experiments.items()},
        [
            {name: _exchange(experiments[name], world, count) for name in counted}
            for count in (1, 2)
        ],
    )


def _hold(experiment: Experiment, world: World) -> tuple[int, int, int]:
    """Takes two steps: in the first, ZeRO's stage 3 does not know yet in which order parameters are
    needed.
    """
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    strategy = experiment.strategy.build(CpuAccelerator(), world, "fp32")
    with torch.device("meta"):
        model = experiment.model.build()
    build_optimizer = partial(experiment.optimizer.build, structure=Structure.of(model))
    wrapped, optimizer = strategy.prepare(model, build_optimizer, _zeros)
    groups.prime(optimizer)
    wrapped.train()
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    batch = {key: torch.from_numpy(column) for key, column in columns.items()}
    for _ in range(2):
        with strategy.accumulate(last=True):
            loss = objective.loss(
                wrapped, batch, {key: torch.ones(()) for key in objective.weights(columns)}
            )
            strategy.backward(loss.total)
        measured = held(strategy, model, optimizer)
        strategy.step(optimizer, strategy.clip_grad_norm(1.0))
    return measured.parameters, measured.gradients, measured.optimizer


def _zeros(_name: str, start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start)


def _exchange(experiment: Experiment, world: World, micro_batches: int) -> dict[Kind, int]:
    strategy = experiment.strategy.build(CpuAccelerator(), world, "fp32")
    return count_step(experiment, experiment.resolved_phases()[0], strategy, 1, micro_batches)


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of two processes; the last is stage 3 where no parameter is small enough to stay gathered."""
    none_small = tmp_path_factory.mktemp("zero") / "none_small.json"
    keys = (
        "stage3_param_persistence_threshold",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
    )
    none_small.write_text(json.dumps({"zero_optimization": {"stage": 3, **dict.fromkeys(keys, 0)}}))
    made = {name: strategy for name, strategy in STRATEGIES.items() if name != "single"}
    return {**made, "zero3 of all": f"{{kind: deepspeed, stage: 3, config: {none_small}}}"}


@pytest.fixture(scope="module")
def bert(experiment_file: str, strategies: dict[str, str]) -> list[Measured]:
    counted = [
        name for name in strategies if "fsdp" not in strategies[name]
    ]  # fake processes can do the others
    return run_ranks(2, _measure, experiment_file, strategies, counted, timeout=900)


def _of_two_strategies(file: str, strategies: dict[str, str]) -> list[Measured]:
    chosen = {name: strategies[name] for name in ("fsdp", "zero3")}
    return run_ranks(2, _measure, file, chosen, [], timeout=900)


@pytest.fixture(scope="module")
def t5(t5_experiment: str, strategies: dict[str, str]) -> list[Measured]:
    return _of_two_strategies(t5_experiment, strategies)


@pytest.fixture(scope="module")
def bart_experiment(t5_experiment: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("bart") / "experiment.yaml"
    file.write_text(f"""
base: {t5_experiment}
objective: {{kind: prefix_lm}}
model: {{kind: bart, vocab_size: 700, layers: 2, width: 32, heads: 2, ffn_width: 64, max_positions: 64,
  start_token: 1}}
""")  # noqa: E501
    return str(file)


@pytest.fixture(scope="module")
def bart(bart_experiment: str, strategies: dict[str, str]) -> list[Measured]:
    return _of_two_strategies(bart_experiment, strategies)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "measured"),
    [
        ("experiment_file", "bert"),
        ("t5_experiment", "t5"),
        ("bart_experiment", "bart"),
    ],
)
def test_what_processes_hold_is_what_was_planned(
    recipe: str, measured: str, strategies: dict[str, str], request: pytest.FixtureRequest
) -> None:
    file, processes = request.getfixturevalue(recipe), request.getfixturevalue(measured)
    step = Step(load(Experiment, file), on_cpu=True)
    for name in processes[0].held:
        experiment = load(Experiment, file, [f"strategy={strategies[name]}"])
        planned = divide(name[:5], experiment, step, 2).held(_NONE, accumulates=False)
        gradients = planned.gradients
        if name == "zero1":  # whole until they are reduced, and then as under the other stages
            gradients -= 4 * sum(each.elements for each in step.parameters.values())
        most = [max(each.held[name][kind] for each in processes) for kind in range(3)]
        assert sum(most) == pytest.approx(
            planned.parameters + gradients + planned.optimizer, rel=0.02
        ), (name, most)


@pytest.mark.long
def test_what_processes_exchange_is_what_was_planned(
    experiment_file: str, bert: list[Measured], strategies: dict[str, str]
) -> None:
    step = Step(load(Experiment, experiment_file), on_cpu=True)
    for micro_batches, exchanged in enumerate(bert[0].exchanged, start=1):
        for name, counted in exchanged.items():
            experiment = load(Experiment, experiment_file, [f"strategy={strategies[name]}"])
            planned = _by_kind(divide(name[:5], experiment, step, 2).exchanged(micro_batches))
            assert counted == pytest.approx(planned, rel=0.03), (name, micro_batches)


def _by_kind(collectives: list[Collective]) -> dict[str, int]:
    return {each.kind: each.nbytes for each in collectives}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "replicas", "settings"),
    [
        ("fsdp", 1, ""),
        ("hsdp", 64, ", reshard_after_forward: false"),
        ("hsdp", 64, ", reduce_each_micro_batch: true"),
    ],
)
def test_512_ranks_that_are_not_there_exchange_what_was_planned(
    experiment_file: str, name: str, replicas: int, settings: str
) -> None:
    strategy = f"strategy={{kind: fsdp, replicas: {replicas}{settings}}}"
    experiment = load(Experiment, experiment_file, [strategy])
    counted = count_fake(
        experiment, experiment.resolved_phases()[0], experiment.strategy, 512, micro_batches=2
    )
    planned = divide(name, experiment, Step(experiment, on_cpu=True), 512).exchanged(2)
    assert dict(counted) == _by_kind(planned)
