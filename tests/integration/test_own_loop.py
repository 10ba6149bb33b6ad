"""Loops of one's own from `open_parts`: optimizers, going back, errors, and `samestep train`."""

from __future__ import annotations

import copy
import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samestep as library
from tests.integration.commands import Samestep
from trainer.checkpoint import writer
from trainer.training.own_loop import Parts

PHASES = "phases=[{steps: 2}, {steps: 2, global_batch_size: 6}, {steps: 2, sequence_length: 16}]"


@dataclass
class Loop:
    """A loop of six steps whose learning rate changes; `run` opens its parts."""

    file: str
    folder: Path
    build: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
    overrides: tuple[str, ...] = ()
    losses: dict[int, float] = field(default_factory=dict)
    built: Any = None

    def run(self, body: Callable[[Parts], None]) -> None:
        overrides = [f"output={self.folder}", "training.steps=6", "data.threads=0"]
        overrides.append("checkpoint.keep_last=10")
        experiment = library.load_experiment(self.file, [*overrides, *self.overrides])

        def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            optimizer = self.build([parameter for _, parameter in named])
            self.built = copy.copy(optimizer.state)
            return optimizer

        with library.open_parts(experiment, build) as parts:
            body(parts)

    def train(self, parts: Parts, stop: int = 6, save: bool = True) -> None:
        """Trains to a step, and saves each."""
        while parts.batches.step < stop:
            micro_batches = next(parts.batches)
            step = parts.batches.step
            for group in parts.optimizer.param_groups:
                group["lr"] = 1e-3 * step
            metrics = library.accumulate_gradients(
                parts.model, parts.batches.objective, parts.strategy, micro_batches
            )
            parts.strategy.step(parts.optimizer, parts.strategy.clip_grad_norm(1.0))
            parts.optimizer.zero_grad()
            self.losses[step] = library.means(metrics, parts.strategy)["loss"]
            if save:
                parts.checkpoints.save()


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[-8:]) for path in folder.glob("checkpoints/*/COMMITTED"))


class WithNumber(torch.optim.Optimizer):
    """Counts steps in a plain number, which its bias correction needs; as transformers' do."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter -= group["lr"] / (1 - 0.9 ** state["step"]) * state["mean"]


KINDS: dict[str, Any] = {
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adagrad": torch.optim.Adagrad,
    "sgd": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "with_number": WithNumber,
}
STRATEGIES = {"rprop": "single"}  # torch's Rprop takes no partitioned parameters


@pytest.mark.long
def test_one_process_trains_without_a_warning(experiment_file: str, tmp_path: Path) -> None:
    settings = ["training.steps=2", "schedule.warmup_steps=1", "data.threads=0", "strategy=fsdp"]
    experiment = library.load_experiment(experiment_file, [f"output={tmp_path}", *settings])
    gc.collect()  # files that tests before this one have left open
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert library.train(experiment) == 0
    shown = [each for each in shown if not issubclass(each.category, ResourceWarning)]
    assert [str(each.message) for each in shown] == []


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_begin_and_resume_as_without_checkpoints(
    experiment_file: str, tmp_path: Path, kind: str
) -> None:
    """Whose state depends on the first gradient or the first rate; a checkpoint before it, too."""
    build, settings = partial(KINDS[kind], lr=1e-3), (f"strategy={STRATEGIES.get(kind, 'fsdp')}",)
    plain = Loop(experiment_file, tmp_path / "plain", build, settings)

    def as_built(parts: Parts) -> None:
        parts.optimizer.state = plain.built  # of an optimizer that nothing has primed
        plain.train(parts, save=False)

    plain.run(as_built)
    loop = Loop(experiment_file, tmp_path / "run", build, settings)

    def begin(parts: Parts) -> None:
        parts.checkpoints.save()
        loop.train(parts, 2)
        parts.checkpoints.restore(0)
        loop.train(parts, 3)

    loop.run(begin)
    loop.run(loop.train)
    assert loop.losses == plain.losses


@pytest.mark.parametrize("threads", [0, pytest.param(2, marks=pytest.mark.long)])
def test_going_back_across_phases(experiment_file: str, tmp_path: Path, threads: int) -> None:
    """After the last step, too; and a restart does not take what was given up."""
    settings = (PHASES, f"data.threads={threads}")
    loop = Loop(experiment_file, tmp_path / "run", adamw, settings)

    def back(parts: Parts) -> None:
        loop.train(parts)
        first = dict(loop.losses)
        for step in (5, 4, 2, 3, 1):
            parts.checkpoints.restore(step)
            assert parts.batches.step == step
            assert max(checkpoints(loop.folder)) == step
            loop.train(parts)
            parts.checkpoints.wait()
            assert loop.losses == first
        parts.checkpoints.restore(3)

    loop.run(back)
    assert max(checkpoints(loop.folder)) == 3
    found: list[int] = []
    loop.run(lambda parts: found.append(parts.batches.step))
    assert found == [3]


def test_an_error_leaves_a_complete_checkpoint(
    experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer.write_step

    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.5)
        write(*arguments, **options)

    monkeypatch.setattr(writer, "write_step", slow)
    loop = Loop(experiment_file, tmp_path / "run", adamw)

    def fail(parts: Parts) -> None:
        loop.train(parts, 1)
        raise RuntimeError("the loop has failed")

    with pytest.raises(RuntimeError, match="the loop has failed"):
        loop.run(fail)
    assert checkpoints(loop.folder) == [1]


def test_weights_that_are_not_finite_are_not_saved(experiment_file: str, tmp_path: Path) -> None:
    loop = Loop(experiment_file, tmp_path / "run", adamw)

    def diverge(parts: Parts) -> None:
        loop.train(parts, 2)
        name, parameter = next(iter(parts.strategy.parameters.items()))
        loop.train(parts, 3, save=False)
        parameter.detach().view(-1)[0] = float("nan")
        with pytest.raises(library.SamestepError, match=f"{name} is not finite after step 3"):
            parts.checkpoints.save()

    loop.run(diverge)
    assert checkpoints(loop.folder) == [1, 2]


def test_the_notes_of_a_step_are_saved_once(
    experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(experiment_file, tmp_path / "run", adamw)
    write = writer.write_step

    def fail(*_: Any, **__: Any) -> None:
        raise library.CheckpointError("the disk is full")

    def first(parts: Parts) -> None:
        loop.train(parts, 2, save=False)
        monkeypatch.setattr(writer, "write_step", fail)
        parts.checkpoints.save({"lost": True})
        with pytest.raises(library.CheckpointError, match="the disk is full"):
            parts.checkpoints.wait()
        monkeypatch.setattr(writer, "write_step", write)
        parts.checkpoints.save({"evaluated": False})
        again(parts)

    def again(parts: Parts) -> None:
        parts.checkpoints.save()
        parts.checkpoints.save({"evaluated": False})
        with pytest.raises(library.SamestepError, match=r"step 2 is saved already, .*false.*true"):
            parts.checkpoints.save({"evaluated": True})

    def resumed(parts: Parts) -> None:
        assert parts.checkpoints.notes == {"evaluated": False}
        again(parts)
        loop.train(parts, 3, save=False)
        parts.checkpoints.save({"evaluated": True})

    loop.run(first)
    loop.run(resumed)
    found: list[Any] = []
    loop.run(lambda parts: found.append(parts.checkpoints.notes))
    assert found == [{"evaluated": True}]


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_that_would_take_scaled_gradients_is_refused(
    experiment_file: str, tmp_path: Path, fused: bool
) -> None:
    build = partial(torch.optim.AdamW, lr=1e-3, fused=fused)
    loop = Loop(experiment_file, tmp_path / "run", build, ("training.precision=fp16",))
    if fused:
        loop.run(partial(loop.train, stop=2))
        assert sorted(loop.losses) == [1, 2]
    else:
        with pytest.raises(library.ConfigError, match="AdamW does not divide by the scale"):
            loop.run(loop.train)


@pytest.mark.parametrize("stop", [3, 6])
def test_a_run_does_not_continue_a_loop(
    samestep: Samestep, experiment_file: str, tmp_path: Path, stop: int
) -> None:
    loop = Loop(experiment_file, tmp_path / "run", partial(torch.optim.SGD, lr=0.1))
    loop.run(partial(loop.train, stop=stop))
    settings = (f"output={loop.folder}", "training.steps=6")
    result = samestep("train", experiment_file, *settings)
    assert result.code == 2
    assert f"holds step {stop} of a custom training loop" in result.message
    assert "open_parts" in result.message


def test_a_size_that_is_not_measured_is_a_warning(
    experiment_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from trainer.accelerators import Accelerator

    loop = Loop(experiment_file, tmp_path, adamw, ("training.micro_batch_size=auto",))
    with caplog.at_level(logging.WARNING):
        loop.run(lambda parts: None)
        assert "micro_batch_size" not in caplog.text  # a run on a CPU takes the same
        monkeypatch.setattr(Accelerator, "memory", lambda self: 2**30)
        loop.run(lambda parts: None)
    assert "micro_batch_size is auto, which open_parts does not measure" in caplog.text


def test_layers_are_unfrozen_by_runs_only(experiment_file: str, tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'run'}", "optimizer.unfreeze_every=2", "strategy=single"]
    experiment = library.load_experiment(experiment_file, settings)
    message = "unfreeze_every is set, and your own loop takes the steps"
    with pytest.raises(library.ConfigError, match=message), library.open_parts(experiment):
        pass
