"""Trains the problem under each strategy that can be bitwise, and compares all digests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TypeAlias

import torch

from samestep.findings import Finding
from trainer import strategies
from trainer.accelerators import Accelerator, Precision
from trainer.inspect.certify import problem
from trainer.inspect.replay.difference import Row, first_difference
from trainer.optim import Structure, groups
from trainer.optim.kinds import adamw
from trainer.strategies.kinds import ddp, fsdp, single
from trainer.strategies.world import World
from trainer.training.compute.fused_attention import fuse_attention
from trainer.training.ledger import Ledger
from trainer.training.observers.digests import Digests
from trainer.training.passes import Gradients, accumulate_gradients
from trainer.training.state import state_tensors

_TOLERANCES: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 2e-2}
"""Of losses, relative to losses of a CPU in fp32."""

Rows: TypeAlias = dict[int, Row]


@dataclass
class Layouts:
    """The check of layouts.

    Attributes:
        rows: of digests, by precision and layout; filled by `check`.
    """

    accelerator: Accelerator
    world: World
    rows: dict[str, dict[str, Rows]]

    def check(self, precision: Precision) -> Iterator[Finding]:
        """Trains under each layout. Collective."""
        found = self.rows[precision] = {}
        for name, config in self._configs().items():
            found[name] = train(config, self.accelerator, self.world, precision)
        first, *others = found
        subject = f"{precision} layouts"
        for other in others:
            difference = first_difference(found[first], found[other])
            if difference is not None:
                text = f"{first} and {other} part in {difference}"
                yield Finding(subject, "failed", text, "see the checks above for the cause")
                break
        else:
            text = f"{', '.join(found)}: the same bits in {problem.STEPS} steps"
            yield Finding(subject, "ok", text)
        yield compare_losses(precision, [row["loss"] for row in found[first].values()])

    def _configs(self) -> dict[str, strategies.Config]:
        size = self.world.size
        if size == 1:
            return {"single": single.Config(), "fsdp": fsdp.Config()}
        found: dict[str, strategies.Config] = {"ddp": ddp.Config(), "fsdp": fsdp.Config()}
        if size % 2 == 0 and size > 2:
            found["hsdp"] = fsdp.Config(replicas=size // 2)
        return found


def train(
    config: strategies.Config, accelerator: Accelerator, world: World, precision: Precision
) -> Rows:
    """Trains the problem from its start; the row of digests of each step. Collective."""
    strategy = config.build(accelerator, world, precision)
    strategy.exact = True
    with torch.device("meta"):
        model = problem.model_config().build()
    fuse_attention(model, accelerator, precision, world.size)
    initial_values = partial(copy.deepcopy(model).initial_values, seed=problem.SEED)
    build = partial(adamw.Config(lr=3e-3).build, structure=Structure.of(model, exact=True))
    wrapped, optimizer = strategy.prepare(model, build, initial_values)
    groups.prime(optimizer)
    state = partial(state_tensors, strategy.parameters, optimizer)
    objective, computed = problem.objective(), Digests(strategy, 1, Ledger(), state)
    rows: Rows = {}
    for step in range(1, problem.STEPS + 1):
        units = problem.units(step, strategy.replica)
        metrics = accumulate_gradients(wrapped, objective, strategy, units)
        computed.before_clipping(step)
        norm = strategy.clip_grad_norm(1.0)
        strategy.step(optimizer, norm)
        optimizer.zero_grad(set_to_none=True)
        computed.after_update(step, units, Gradients(metrics, norm))
        rows[step] = computed.row
    return rows


def reference() -> list[float]:
    """Losses of the problem in fp32 on a CPU, which come with the package."""
    file = resources.files("trainer.inspect.certify") / "losses.json"
    losses: list[float] = json.loads(file.read_text(encoding="utf-8"))
    return losses


def compare_losses(precision: Precision, losses: list[float]) -> Finding:
    """Compares the losses of all steps with a CPU's."""
    expected = torch.tensor(reference(), dtype=torch.float64)
    # Unlike Python's max, torch's is NaN as soon as one of the errors is.
    error = (torch.tensor(losses, dtype=torch.float64) / expected - 1).abs().max().item()
    subject, limit = f"{precision} losses", _TOLERANCES[precision]
    if error <= limit:
        return Finding(subject, "ok", f"within {error:.1e} of a CPU's")
    fix = "all devices compute alike, and wrongly: look at driver, torch and its settings"
    return Finding(subject, "failed", f"{error:.1e} from a CPU's, above {limit:.0e}", fix)
