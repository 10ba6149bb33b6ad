"""Parameter-efficient fine-tuning through the real command.

What is trained, kept, resumed, exported and refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from benchmarks import peft as benchmark
from samestep.cli import main
from samestep.config import load
from tests.conformance.worker import STRATEGIES, make_trainer, run_once
from tests.conformance.worker import losses as train_and_note
from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer
from trainer.training.weights.loading import load_weights

LORA = "model.peft={kind: lora, rank: 4, targets: [query, value, up, down]}"


@pytest.fixture(scope="module")
def base(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a pre-trained BERT, which may be changed."""
    return Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("base") / "run"))


@pytest.fixture(scope="module")
def tuned(base: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier that was fine-tuned by LoRA: data, experiment, run."""
    folder = tmp_path_factory.mktemp("tuned")
    often = ("checkpoint.every=20", "checkpoint.keep_last=5")
    tasks.tune(
        "classification",
        folder,
        base,
        dataset_folder / "tokenizer",
        LORA,
        "optimizer.lr=1e-2",
        *often,
    )
    return folder


def _tensors(checkpoint: Path) -> set[str]:
    """The names of the tensors in a checkpoint."""
    keys = chain.from_iterable(
        safe_open(file, "np").keys() for file in checkpoint.glob("*.safetensors")
    )
    return {key.partition("@")[0] for key in keys}


def test_only_what_was_added_is_learned_and_kept(
    tuned: Path, base: Path, samestep: Samestep
) -> None:
    run = tuned / "run-classification"
    (last,) = (row for row in tasks.rows_of(run) if "heldout/accuracy" in row)
    assert last["heldout/accuracy"] > 0.9
    kept = _tensors(run / "checkpoints" / "step-00000060")
    assert all(".lora." in name or "/head." in name for name in kept)
    assert len([name for name in kept if name.startswith("model/")]) * 3 == len(kept), (
        "moments of what is trained"
    )
    weights, before = load_weights(run), load_weights(base)
    for name in before.tensors:
        if name.startswith(("embeddings.", "layers.")):
            np.testing.assert_array_equal(weights.tensors[name], before.tensors[name], err_msg=name)
    evaluated = samestep("evaluate", run)
    assert f"accuracy     {last['heldout/accuracy']:.6g}" in evaluated.out


@pytest.mark.long
def test_plans_and_the_run_count_what_is_trained(tuned: Path, samestep: Samestep) -> None:
    arguments = ("--devices", 4, "--strategy", "single", "ddp", "fsdp", "zero1", "--json", LORA)
    ((phase,),) = (
        json.loads(samestep("plan", tuned / "classification.yaml", *arguments).out)["phases"],
    )
    weights = load_weights(tuned / "run-classification")
    trained = sum(
        math.prod(weights.tensors.shape(name))
        for name in weights.tensors
        if ".lora." in name or "head." in name
    )
    whole = sum(math.prod(weights.tensors.shape(name)) for name in weights.tensors)
    for plan in phase["plans"]:
        held, parts = plan["bytes"], {"single": 1, "ddp": 1}.get(plan["strategy"], 4)
        assert held["optimizer"] == pytest.approx(8 * trained / parts, rel=0.2), plan["strategy"]
        assert held["gradients"] <= 4 * trained * 1.3
        assert held["parameters"] >= 4 * whole / parts
    assert {
        plan["strategy"]: sum(each["nbytes"] for each in plan["collectives"])
        for plan in phase["plans"]
    }["ddp"] == 4 * trained


METHODS = {
    "lora": LORA,
    "adapters": "model.peft={kind: adapters, width: 8}",
    "prefix": "model.peft={kind: prefix, length: 4}",
    "prefix of a network": "model.peft={kind: prefix, length: 4, network_width: 6}",
    "prompt": "model.peft={kind: prompt, length: 4}",
    "frozen": "frozen=[embeddings, layers.0]",
}


@pytest.fixture(scope="module")
def short(tuned: Path) -> dict[str, Path]:
    """Runs of 8 steps with a checkpoint in the middle, one for each way to freeze."""
    settings = [
        "training.steps=8",
        "schedule.warmup_steps=2",
        "checkpoint.every=4",
        "training.evaluate_every=null",
    ]
    settings += ["data.sequence_length=20", "model.max_positions=32"]
    runs = {method: tuned / f"short-{method}" for method in METHODS}
    for method, run in runs.items():
        command = [
            "train",
            str(tuned / "classification.yaml"),
            f"output={run}",
            METHODS[method],
            *settings,
        ]
        assert main(command) == 0
    return runs


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (
            2,
            [
                ("lora", "fsdp"),
                ("lora", "zero-2"),
                ("adapters", "zero-1"),
                ("prompt", "accelerate"),
            ],
        ),
        pytest.param(
            3,
            [
                ("lora", "zero-3"),
                ("prefix", "ddp"),
                ("prefix of a network", "fsdp"),
                ("frozen", "fsdp"),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_same_losses_everywhere_and_after_a_restart(
    world_size: int, cases: list[tuple[str, str]], short: dict[str, Path], tmp_path: Path
) -> None:
    """From step 4, which one process has reached, and from the start."""
    found = run_ranks(
        world_size,
        run_all,
        cases,
        {method: str(run) for method, run in short.items()},
        str(tmp_path),
    )[0]
    for (method, strategy), (whole, resumed) in zip(cases, found, strict=True):
        expected = [loss for _, loss in sorted(losses(short[method]).items())]
        np.testing.assert_allclose(whole, expected, rtol=1e-5, err_msg=f"{method} {strategy}")
        np.testing.assert_allclose(resumed, expected[4:], rtol=1e-5, err_msg=f"{method} {strategy}")
        kept, alone = (
            run / "checkpoints" / "step-00000008"
            for run in (tmp_path / f"{method}-{strategy}", short[method])
        )
        assert _tensors(kept) == _tensors(alone)


def run_all(
    cases: list[tuple[str, str]], runs: dict[str, str], folder: str
) -> list[tuple[list[float], list[float]]]:
    """The losses of each case from the start, and those from step 4 on."""
    world = World.start(60)
    world.connect("gloo")
    found = []
    for method, strategy in cases:
        output = f"{folder}/{method}-{strategy}"
        overrides = [f"output={output}", f"strategy={STRATEGIES.get(strategy, strategy)}"]
        whole = train_and_note(f"{runs[method]}/config.yaml", overrides, world)
        resumed = f"{output}-resumed"
        if world.rank == 0:
            shutil.copytree(
                f"{runs[method]}/checkpoints/step-00000004", f"{resumed}/checkpoints/step-00000004"
            )
        dist.barrier()
        overrides[0] = f"output={resumed}"
        found.append(
            (whole, train_and_note(f"{runs[method]}/config.yaml", overrides, world, resume=4))
        )
    world.close()
    return found


@pytest.mark.long
def test_what_is_frozen_has_no_gradients_and_no_state(
    short: dict[str, Path], tmp_path: Path
) -> None:
    """Where a step of each strategy is taken.

    The memory of gradients, buffers included, is that of what is trained.
    """
    weights = load_weights(short["lora"])
    trained = {name for name in weights.tensors if ".lora." in name or name.startswith("head.")}
    count = sum(math.prod(weights.tensors.shape(name)) for name in trained)
    strategies = ("ddp", "fsdp", "zero-2", "zero-3")
    ranks = run_ranks(2, hold_all, strategies, str(short["lora"] / "config.yaml"), str(tmp_path))
    for strategy, found in zip(strategies, zip(*ranks, strict=True), strict=True):
        assert [each["reached"] for each in found] == [trained] * 2, strategy
        copies = 2 if strategy == "ddp" else 1
        for held, each in (("gradients", count), ("state", 2 * count)):  # Adam has two moments
            whole = copies * each
            assert whole <= sum(rank[held] for rank in found) <= 1.01 * whole, (
                strategy,
                held,
            )  # parts are padded


def hold_all(strategies: Sequence[str], file: str, folder: str) -> list[dict[str, Any]]:
    """What a rank holds under each strategy when gradients are there.

    Whose, and in how many numbers.
    """
    world = World.start(60)
    world.connect("gloo")
    found = []
    for name in strategies:
        changes = ["training.steps=1", "schedule.warmup_steps=0", f"output={folder}/{name}"]
        trainer = make_trainer(
            load(Experiment, file, [*changes, f"strategy={STRATEGIES.get(name, name)}"]), world
        )
        found.append(hold(trainer))
        trainer.close()
    world.close()
    return found


def hold(trainer: Trainer) -> dict[str, Any]:
    step, found = trainer.strategy.step, dict[str, Any]()

    def look(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
        held = {
            name: each.grad
            for name, each in trainer.strategy.parameters.items()
            if each.grad is not None
        }
        of_model = {
            name: each.grad
            for name, each in trainer.model.named_parameters()
            if each.grad is not None
        }
        found["reached"] = {
            name.removeprefix("module.") for name in (*held, *of_model)
        }  # DDP's is a module
        found["gradients"] = numbers([*held.values(), *of_model.values()])
        step(optimizer, grad_norm)
        moments = (value for state in optimizer.state.values() for value in state.values())
        found["state"] = numbers(
            value for value in moments if isinstance(value, torch.Tensor) and value.ndim
        )

    trainer.strategy.step = look  # type: ignore[method-assign]
    trainer.fit()
    return found


def numbers(tensors: Iterable[torch.Tensor]) -> int:
    """Of fp32 in the memory that tensors are in, of which they may be parts."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in local}
    return sum(storage.nbytes() for storage in storages.values()) // 4


@pytest.mark.long
def test_bf16_is_the_same_in_two_processes(short: dict[str, Path], tmp_path: Path) -> None:
    expected = [loss for _, loss in sorted(losses(short["lora"]).items())]
    file, settings = (
        f"{short['lora']}/config.yaml",
        ["training.precision=bf16", f"output={tmp_path}"],
    )
    found = [
        run_ranks(count, run_once, file, [*settings, f"strategy={strategy}"])[0]
        for count, strategy in ((1, "single"), (2, "fsdp"))
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)
    assert found[0] == pytest.approx(expected, rel=2e-2)
    assert found[0] != expected


def _set_base(adapter: Path, base: Path) -> None:
    """As the message says, of an adapter that was added to a run."""
    file = adapter / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "base_model_name_or_path": str(base)}))


def test_exports_are_those_of_transformers_and_peft(
    tuned: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged, and as what was added, read as its card says beside the base, which is exported, too.

    The same logits.

    Features read either.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = tuned / "run-classification"
    base = load_weights(run).base.folder
    assert samestep("export", run, tmp_path / "merged").code == 0
    said = samestep("export", run, tmp_path / "added", "--adapter").err
    assert f"export it with: samestep export {base} DIR" in said
    assert samestep("export", base, tmp_path / "base").code == 0
    card = (tmp_path / "added" / "README.md").read_text()
    assert "library_name: peft\n" in card
    assert "| labels | about_class, about_file |" in card
    assert f"samestep export {base.name} base\n" in card
    assert str(tmp_path.parent) not in card
    (code,) = re.findall(r"```python\n(.*?)```\n", card, re.DOTALL)
    loaded: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), loaded)
    texts = ["the class of a list", "a file"]
    inputs = AutoTokenizer.from_pretrained(tmp_path / "merged")(
        texts, padding=True, return_tensors="pt"
    )
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    added = loaded["model"].eval()
    torch.testing.assert_close(
        added(**inputs).logits, merged(**inputs).logits, rtol=1e-5, atol=1e-5
    )
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    _set_base(tmp_path / "added", tmp_path / "base")
    found = []
    for source in (run, tmp_path / "merged", tmp_path / "added"):
        output = tmp_path / f"{source.name}.npy"
        assert samestep("features", source, tmp_path / "texts.txt", "--output", output).code == 0
        found.append(np.load(output))
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=1e-5)


def test_a_prompt_is_left_out_of_features(
    short: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    (tmp_path / "texts.txt").write_text("the class of a list\n")
    shapes = []
    for method in ("prefix", "prompt", "lora"):
        arguments = ("--output", tmp_path / f"{method}.npy", "--pool", "none")
        assert samestep("features", short[method], tmp_path / "texts.txt", *arguments).code == 0
        shapes.append(np.load(tmp_path / f"{method}.npy").shape)
    assert shapes[0] == shapes[1] == shapes[2]
    said = samestep("export", short["prompt"], tmp_path / "exported").message
    assert "cannot be merged" in said
    assert "--adapter" in said
    assert (
        "peft does not compute adapters"
        in samestep("export", short["adapters"], tmp_path / "exported", "--adapter").message
    )
    assert (
        "leave --adapter out"
        in samestep("export", short["frozen"], tmp_path / "exported", "--adapter").message
    )
    assert samestep("export", short["prompt"], tmp_path / "exported", "--adapter").code == 0
    base = load_weights(short["prompt"]).base.folder
    assert samestep("export", base, tmp_path / "base").code == 0
    _set_base(tmp_path / "exported", tmp_path / "base")
    arguments = ("--output", tmp_path / "again.npy", "--pool", "none")
    assert samestep("features", tmp_path / "exported", tmp_path / "texts.txt", *arguments).code == 0
    np.testing.assert_allclose(
        np.load(tmp_path / "again.npy"), np.load(tmp_path / "prompt.npy"), atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["init_from=null", "model={kind: bert, peft: lora}"], "init_from, which is not set"),
        (["model.peft.rank=0"], "rank is 0"),
        (["model.peft.targets=[qery]"], "Did you mean 'query'?"),
        (["model.peft={kind: lorra}"], "did you mean 'lora'?"),
        (["frozen=[layer.0]"], "no parameter is called so; use layers.0"),
        (["model.peft=null", "frozen=[embeddings, layers, head]"], "every parameter is frozen"),
        (["frozen=[head.classifier]"], "head.classifier.weight is frozen, and"),
        (["redraw_layers=1"], "which is frozen"),
        (["model.peft={kind: prompt, length: 16}"], "model.max_positions"),
        (
            [
                "data.sequence_length=16",
                "model.peft={kind: prompt, length: 4}",
                "data.packing=best_fit",
            ],
            "data.packing=padded",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: list[str], message: str, tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    overrides = [LORA, f"output={tmp_path / 'run'}", *settings]
    assert message in samestep("train", tuned / "classification.yaml", *overrides).message


def test_another_base_is_refused(
    tuned: Path, base: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """When the run goes on, and when its checkpoint is opened.

    The checkpoint it began with may be named.
    """
    run = Path(shutil.copytree(tuned / "run-classification", tmp_path / "run"))
    began = load_weights(run).base.folder
    other = base / "checkpoints" / "step-00000008"
    again = [
        "train",
        run / "config.yaml",
        f"output={run}",
        "training.steps=61",
        "schedule.warmup_steps=1",
    ]
    assert f"set init_from={began}" in samestep(*again, f"init_from={other}").message
    assert samestep(*again, f"init_from={began}").code == 0
    full = [
        "train",
        tuned / "classification.yaml",
        f"output={tmp_path / 'full'}",
        f"init_from={run}",
    ]
    assert (
        "holds a model with lora, and the experiment's has none"
        in samestep(*full, "model.peft=null").message
    )


def test_a_base_that_has_moved_is_found_beside_the_checkpoints(
    tuned: Path, base: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """As a link or a copy, if its content is what it was.

    Every command and `init_from` find it there.
    """
    run = Path(shutil.copytree(tuned / "run-classification", tmp_path / "run"))
    began, beside, moved = (
        load_weights(run).base.folder,
        run / "checkpoints" / "base",
        tmp_path / "moved" / "base",
    )
    scores = samestep("evaluate", run).out
    moved.parent.mkdir()
    began.rename(moved)
    try:
        message = samestep("evaluate", run).message
        assert "holds only the trained parameters" in message
        assert (
            f"restore the original content of {began}, or copy that to {beside}, or put a link "
            "there" in message
        )
        beside.symlink_to(base / "checkpoints" / "step-00000008")
        assert (
            "does not hold the frozen weights that go with it" in samestep("evaluate", run).message
        )
        beside.unlink()
        beside.symlink_to(moved)
        assert samestep("evaluate", run).out == scores
        more = ("training.steps=1", "schedule.warmup_steps=0", "training.evaluate_every=null")
        again = (
            "train",
            run / "config.yaml",
            f"output={tmp_path / 'again'}",
            f"init_from={run}",
            *more,
        )
        assert samestep(*again).code == 0
        beside.unlink()
        shutil.copytree(moved, beside)
        assert samestep("evaluate", run).out == scores
    finally:
        moved.rename(began)


@pytest.mark.exhaustive
def test_the_benchmark_compares_methods(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its smallest run; its figures are not tested."""
    file = str(tuned / "classification.yaml")
    benchmark.main(["--methods", "full", "lora", "--seeds", "1", file, "training.steps=6"])
    heading, _, *rows = capsys.readouterr().out.splitlines()[-4:]
    found = [dict(zip(heading.split(" | "), row.split(" | "), strict=True)) for row in rows]
    full, lora = (int(row["trained parameters"].replace(",", "")) for row in found)
    assert full > 10 * lora > 0
    assert [0 <= float(row["accuracy"]) <= 1 for row in found] == [True, True]
