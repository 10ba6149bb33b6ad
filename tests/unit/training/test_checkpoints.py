"""When a run saves and waits, and settings that may differ from those of a checkpoint."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from samestep.config import Tree, to_tree
from samestep.errors import ConfigError
from trainer.checkpoint import writer
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.training.checkpoints import Checkpoints, changes_since
from trainer.training.finished import reason_to_end
from trainer.training.starting import load_experiment

ROBERTA = "model={kind: roberta, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64}"


def description(file: str, *overrides: str) -> Tree:
    experiment = load_experiment(file, ["model.kind=roberta", ROBERTA, *overrides])
    return {"config": to_tree(experiment), "teacher": None, "step": 3}


def checkpoints(folder: Path, snapshot_every: int | None) -> Checkpoints:
    durable = Checkpointer(folder / "durable", Config(every=10), rank=0, world_size=1)
    if snapshot_every is None:
        return Checkpoints(durable)
    config = Config(every=snapshot_every)
    return Checkpoints(durable, Checkpointer(folder / "snapshots", config, rank=0, world_size=1))


def test_where_a_step_is_saved(tmp_path: Path) -> None:
    both = checkpoints(tmp_path, 1)
    names = {both.durable: "durable", both.snapshots: "snapshot"}

    def due(step: int, is_best: bool = False, ending: bool = False) -> list[str]:
        return [names[each] for each in both.due(step, is_best, ending)]

    assert due(9) == ["snapshot"]
    assert due(10) == ["durable", "snapshot"]
    assert due(9, is_best=True) == ["durable", "snapshot"]
    assert due(9, ending=True) == due(9, is_best=True, ending=True) == ["durable"]


@pytest.mark.parametrize(("every", "waits"), [(None, False), (2, False), (1, True)])
def test_snapshots_of_each_step_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None, waits: bool
) -> None:
    may_write, write_step = threading.Event(), writer.write_step

    def write_later(*arguments: object, **options: object) -> None:
        assert may_write.wait(30)
        write_step(*arguments, **options)

    monkeypatch.setattr(writer, "write_step", write_later)
    found = checkpoints(tmp_path, every)
    if found.snapshots is not None:
        found.snapshots.save(2, {"weights": torch.zeros(3)}, {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(found.wait_for_snapshot)
        if waits:
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            may_write.set()
        waiting.result(30)
    assert found.keeps_each_step is waits
    if waits and found.snapshots is not None:
        assert found.snapshots.steps() == [2]
    may_write.set()
    if found.snapshots is not None:
        found.snapshots.wait()


def test_settings_of_initial_weights_may_change(experiment_file: str) -> None:
    stored = description(experiment_file)
    now = description(experiment_file, "model.initialization=fairseq", "training.steps=20")
    changes = "model.initialization: bert -> fairseq, training.steps: 12 -> 20"
    assert changes_since(stored, now) == changes
    now = description(experiment_file, "model.initializer_range=0.1")
    assert changes_since(stored, now) == "model.initializer_range: 0.02 -> 0.1"
    now = description(experiment_file, "model.norm_eps=1e-6", "model.initialization=fairseq")
    with pytest.raises(ConfigError, match=r"of another model .*norm_eps: 1e-05 -> 1e-06"):
        changes_since(stored, now)


def test_gradual_unfreezing_goes_on_as_it_began(experiment_file: str) -> None:
    stored = description(experiment_file, "optimizer.unfreeze_every=3")
    for value in ("2", "null"):
        now = description(experiment_file, f"optimizer.unfreeze_every={value}")
        with pytest.raises(ConfigError, match=r"optimizer\.unfreeze_every: 3 -> .*the former one"):
            changes_since(stored, now)


@pytest.mark.parametrize(
    ("before", "step", "now", "message"),
    [
        ((6, 6), 8, (3, 9), r"phases.0 had 6 steps and has 3, .* Restore phases.0.steps=6"),
        ((6, 6), 8, (6, 9), r"phases.1 had 6 steps and has 9, .* of step 8. Restore phases.1.st"),
        ((6, 6), 8, (6,), "phases.1 had 6 steps and is gone"),
        ((6, 6), 3, (), "phases.0 had 6 steps and is gone"),
        ((6, 6), 12, (6, 3, 3), "phases.1 had 6 steps and has 3"),
        ((), 3, (2, 10), r"the run has taken 3 steps without phases. Set phases.0.steps to 3"),
        ((6, 6), 0, (3, 9), None),
        ((6, 6), 6, (6, 9), None),
        ((6, 6), 6, (6, 3, 3), None),
        ((6, 6), 12, (6, 6, 3), None),
        ((), 3, (3, 9), None),
    ],
)
def test_phases_that_have_begun_keep_their_steps(
    experiment_file: str,
    before: tuple[int, ...],
    step: int,
    now: tuple[int, ...],
    message: str | None,
) -> None:
    def with_phases(steps: tuple[int, ...]) -> Tree:
        phases = ", ".join(f"{{steps: {each}}}" for each in steps)
        total = f"training.steps={sum(steps) or 12}"
        return description(experiment_file, total, f"phases=[{phases}]")

    stored = {**with_phases(before), "step": step}
    if message is None:
        assert "phases: " in changes_since(stored, with_phases(now))
        return
    with pytest.raises(ConfigError, match=message):
        changes_since(stored, with_phases(now))


def test_a_finished_run_is_trained_on_by_a_change_that_is_accepted(experiment_file: str) -> None:
    for settings, fix in (("[]", "raise training.steps"), ("[{steps: 12}]", "add a phase")):
        experiment = load_experiment(experiment_file, [f"phases={settings}"])
        assert reason_to_end(experiment, {"step": 12}) == f"is at step 12; {fix} to train on"
        assert reason_to_end(experiment, {"step": 11}) is None


def test_excluded_examples_are_those_of_the_first_data_order(experiment_file: str) -> None:
    stored = description(experiment_file)
    now = description(experiment_file, "data.exclude=[[3, 5]]")
    assert changes_since({**stored, "order": 0}, now).startswith("data.exclude")
    with pytest.raises(ConfigError, match=r"data\.exclude.* step 3 is in a later one"):
        changes_since({**stored, "order": 1}, now)


def test_settings_that_did_not_exist_have_their_defaults(experiment_file: str) -> None:
    stored = description(experiment_file)
    old = copy.deepcopy(stored)
    for section, name in (("model", "initialization"), ("model", "peft"), ("training", "faults")):
        del old["config"][section][name]
    assert changes_since(old, stored) == ""
    old["config"]["training"]["no_longer_there"] = 1
    assert "training.no_longer_there: 1 -> None" in changes_since(old, stored)


CPU = "accelerator={kind: cpu, threads: 1}"
BITWISE = ("training.exact=bitwise", "training.micro_batch_size=2", CPU)


def computed_by(description: Tree, device: str) -> Tree:
    sizes = [description["config"]["training"]["micro_batch_size"]]
    computed = {"device": device, "torch": "2.13.0"}
    return {**description, "arithmetic": computed, "micro_batch_sizes": sizes}


def test_exact_runs_keep_what_their_bits_depend_on(experiment_file: str) -> None:
    stored = computed_by(description(experiment_file, *BITWISE), "CPU, 1 thread")
    assert changes_since(stored, stored) == ""
    other = description(experiment_file, *BITWISE, "training.micro_batch_size=4")
    with pytest.raises(ConfigError, match=r"size of its units has changed .*phase 0: 2 -> 4"):
        changes_since(stored, computed_by(other, "CPU, 1 thread"))
    other = description(experiment_file, *BITWISE, "training.precision=bf16")
    with pytest.raises(ConfigError, match=r"other bits \(training.precision: fp32 -> bf16\)"):
        changes_since(stored, computed_by(other, "CPU, 1 thread"))
    with pytest.raises(ConfigError, match="CPU, 1 thread -> CPU, 2 threads"):
        changes_since(stored, computed_by(stored, "CPU, 2 threads"))


def test_a_run_may_become_exact_and_stop_being_exact(experiment_file: str) -> None:
    tolerant = description(experiment_file)
    exact = computed_by(description(experiment_file, *BITWISE), "CPU, 1 thread")
    assert "training.exact: tolerance -> bitwise" in changes_since(tolerant, exact)
    assert "training.exact: bitwise -> tolerance" in changes_since(exact, tolerant)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.precision=fp16", "training.precision=fp16 does not allow"),
        ("training.compile=true", "training.compile=true does not allow"),
        ("training.micro_batch_size=auto", "micro_batch_size is auto"),
        ("training.global_batch_size=20000", "has more than 8192 units of 2"),
        ("training.log_every=300000", "Use at most 209715"),
        ("strategy=deepspeed", "which strategy single, ddp and fsdp"),
        ("strategy=accelerate", "which strategy single, ddp and fsdp"),
        ("accelerator.threads=null", r"as accelerator=.kind: cpu, threads: 1."),
        ("accelerator=cuda", r"as accelerator=.kind: cuda, deterministic: true."),
        ("accelerator=null", r"as accelerator=.kind: cpu, threads: 1."),
    ],
)
def test_what_cannot_be_exact_is_rejected(
    experiment_file: str, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(experiment_file, [*BITWISE, override])
