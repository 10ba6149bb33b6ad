"""Students that learn from a teacher, through the real command.

At any world size, and refusing what does not fit.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from samestep.config import load
from samestep.errors import ConfigError
from tests.conformance.worker import run_once
from tests.conftest import make_dataset
from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks
from trainer.checkpoint.huggingface import load_folder
from trainer.models.peft.kinds import prompt
from trainer.studies.finetune.runs import list_runs
from trainer.studies.finetune.task import Task
from trainer.training.experiment import Experiment
from trainer.training.weights.loading import load_weights
from trainer.training.weights.teacher import build_teacher

STUDENT = {
    "kind": "bert",
    "vocab_size": 600,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "max_positions": 32,
    "attention_dropout": 0.0,
}


@pytest.fixture(scope="module")
def taught(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a teacher that was fine-tuned (run-classification), and an experiment for its
    student.
    """
    folder = tmp_path_factory.mktemp("taught")
    tokenizer = dataset_folder / "tokenizer"
    experiment = tasks.tune(
        "classification", folder, finished_run, tokenizer, "training.evaluate_every=null"
    )
    tree = yaml.safe_load(experiment.read_text())
    del tree["init_from"]
    objective = {
        "kind": "distillation",
        "teacher": str(folder / "run-classification"),
        "of": tree["objective"],
        "hard": 0.5,
        "mse": 0.1,
    }
    model = {**STUDENT, "head": "classification", "labels": ["about_class", "about_file"]}
    tree |= {"output": str(folder / "student"), "objective": objective, "model": model}
    (folder / "student.yaml").write_text(yaml.safe_dump(tree))
    return folder


def distilled_mlm(teacher: Path) -> list[str]:
    """Settings that make a student with DistilBERT's loss of the experiment of the fixtures."""
    return [
        f"objective={{kind: distillation, teacher: {teacher}, of: mlm, soft: 5.0, hard: 2.0, "
        "cosine: 1.0, positions: all}",
        "model.layers=1",
    ]


@pytest.mark.long
def test_a_student_learns_what_its_teacher_says(
    taught: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """From the teacher alone, without a label; `evaluate` asks the teacher, too."""
    run = tmp_path / "run"
    alone = (
        "objective.hard=0",
        f"output={run}",
        "training.steps=80",
        "training.evaluate_every=20",
        "optimizer.lr=1e-2",
    )
    assert samestep("train", taught / "student.yaml", *alone).code == 0
    rows = [row for row in tasks.rows_of(run) if "train/loss" in row]
    first, last = (
        np.mean([row["train/agreement"] for row in some]) for some in (rows[:5], rows[-5:])
    )
    assert first < 0.8 < 0.9 < last, (first, last)
    scored = [row for row in tasks.rows_of(run) if "heldout/accuracy" in row][-1]
    assert scored["heldout/accuracy"] > 0.9
    assert scored["heldout/agreement"] > 0.9
    for name in ("soft_loss", "mse", "hard_loss", "loss"):
        assert f"heldout/{name}" in scored
    assert f"agreement    {scored['heldout/agreement']:.6g}" in samestep("evaluate", run).out
    assert samestep("ledger", "verify", run).code == 0
    assert samestep("replay", run, 70, "--exact").code == 0


@pytest.mark.parametrize("task", [pytest.param("classification", marks=pytest.mark.long), "mlm"])
def test_any_number_of_processes_makes_the_same_steps(
    task: str, taught: Path, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    """Three of DDP and two of FSDP2 take the steps of one."""
    file, settings = (
        str(taught / "student.yaml"),
        ["training.steps=10", "training.evaluate_every=null"],
    )
    if task == "mlm":
        file, settings = experiment_file, ["training.steps=8", *distilled_mlm(finished_run)]
    found = [
        run_ranks(
            count,
            run_once,
            file,
            [*settings, f"strategy={strategy}", f"output={tmp_path / strategy}"],
        )[0]
        for count, strategy in ((1, "single"), (2, "fsdp"), (3, "ddp"))
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-6)


def tinybert(teacher: Path) -> list[str]:
    """Settings that make a narrower student with TinyBERT's losses of layers."""
    return [
        f"objective={{kind: distillation, teacher: {teacher}, of: mlm, soft: 0.0, hidden: 1.0, "
        "attention: 1.0, layer_map: [0, 2]}",
        "model={kind: bert, vocab_size: 600, layers: 1, width: 16, heads: 2, ffn_width: 32, "
        "max_positions: 32, teacher_width: 32}",
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "{kind: deepspeed, stage: 3}"])
def test_layers_are_learned_alike_at_any_number_of_processes(
    strategy: str, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    settings = ["training.steps=6", f"output={tmp_path}", *tinybert(finished_run)]
    (one,) = run_ranks(1, run_once, experiment_file, [*settings, "strategy=single"])
    found = run_ranks(2, run_once, experiment_file, [*settings, f"strategy={strategy}"])[0]
    np.testing.assert_allclose(found, one, rtol=2e-6)
    assert one[-1] < one[0]


@pytest.mark.long
def test_a_tinybert_is_fine_tuned_and_exported(
    taught: Path, experiment_file: str, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Both stages: layers in general, then layers and then predictions of the task."""
    general = tmp_path / "general"
    settings = tinybert(finished_run)
    assert samestep("train", experiment_file, f"output={general}", *settings).code == 0
    before = general
    for name, terms in (
        ("layers", "soft: 0.0, hidden: 1.0, attention: 1.0, layer_map: [0, 2]"),
        ("predictions", "soft: 1.0"),
    ):
        result = samestep(
            "train",
            taught / "student.yaml",
            f"output={tmp_path / name}",
            f"init_from={before}",
            f"objective={{kind: distillation, teacher: {taught / 'run-classification'}, "
            f"of: {{kind: classification}}, {terms}}}",
            "training.steps=10",
            *(["model.teacher_width=32"] if name == "layers" else []),
        )
        assert result.code == 0, result.message
        before = tmp_path / name
    assert samestep("export", before, tmp_path / "hf").code == 0
    assert not any("fit" in name for name in load_folder(tmp_path / "hf")[1])


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (("layer_map: [0, 2]", "layer_map: [0, 3]"), "its layers are 1 to 2, after"),
        (("teacher_width: 32", "teacher_width: 0"), "set model.teacher_width=32"),
        (("heads: 2", "heads: 1"), "has heads 2, and model.heads is 1"),
        (("layers: 1", "layers: 2"), None),
        (("layer_map: [0, 2]", "layer_map: [0, 1, 2]"), "needs attention.2, compared.2"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    change: tuple[str, str],
    fix: str | None,
    experiment_file: str,
    finished_run: Path,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    settings = [setting.replace(*change) for setting in tinybert(finished_run)]
    short = ("training.steps=1", "schedule.warmup_steps=0")
    result = samestep("train", experiment_file, f"output={tmp_path / 'run'}", *settings, *short)
    assert result.code == (0 if fix is None else 2), result.message
    assert fix is None or fix in result.message, result.message


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["{kind: deepspeed, stage: 3}", "accelerate"])
def test_other_backends_hold_the_teacher_too(
    strategy: str, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    settings = [
        "training.steps=3",
        "schedule.warmup_steps=1",
        f"output={tmp_path}",
        *distilled_mlm(finished_run),
    ]
    (one,) = run_ranks(1, run_once, experiment_file, [*settings, "strategy=single"])
    found = run_ranks(2, run_once, experiment_file, [*settings, f"strategy={strategy}"])[0]
    np.testing.assert_allclose(found, one, rtol=1e-6)


@pytest.mark.long
def test_a_resumed_run_goes_on_with_its_teacher_and_no_other(
    taught: Path, tmp_path: Path, samestep: Samestep
) -> None:
    settings = (
        "training.evaluate_every=null",
        f"output={tmp_path / 'run'}",
        "schedule.warmup_steps=1",
    )
    teacher = tmp_path / "teacher"
    shutil.copytree(taught / "run-classification", teacher)
    train = (
        "train",
        taught / "student.yaml",
        *settings,
        f"objective.teacher={teacher}",
        "checkpoint.every=6",
    )
    assert samestep(*train, "training.steps=12").code == 0
    whole = losses(tmp_path / "run")
    for gone in ("checkpoints/step-00000012", "metrics.jsonl"):
        shutil.move(tmp_path / "run" / gone, tmp_path / Path(gone).name)
    assert samestep(*train, "training.steps=12").code == 0
    resumed = losses(tmp_path / "run")
    assert resumed == {step: pytest.approx(whole[step], rel=1e-6) for step in range(7, 13)}
    # The same weights elsewhere are the same teacher; another run of it is none.
    longer = [*train, "training.steps=14"]
    assert samestep(*longer, f"objective.teacher={taught / 'run-classification'}").code == 0
    more = ("training.steps=61", "training.evaluate_every=null", f"output={teacher}")
    assert samestep("train", taught / "classification.yaml", *more).code == 0
    message = samestep(*train, "training.steps=16").message
    assert (
        "objective.teacher names other weights than the run has learned from until step 14"
        in message
    )
    step = teacher / "checkpoints" / "step-00000060"
    assert samestep(*train, "training.steps=16", f"objective.teacher={step}").code == 0


def test_teachers_that_do_not_fit_are_refused(
    taught: Path, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file, output = taught / "student.yaml", f"output={tmp_path / 'run'}"
    for settings, message in (
        (
            [f"objective.teacher={finished_run}"],
            "has head language_model, and model.head is classification",
        ),
        (["objective.cosine=1"], "has width 32, and model.width is 16; set objective.cosine=0"),
        (["objective.teacher=nowhere"], "nowhere"),
        (
            ["data.sequence_length=64", "model.max_positions=64"],
            "reads 32 tokens, and the run has sequences of 64",
        ),
    ):
        assert message in samestep("train", file, output, *settings).message
        assert message in samestep("config", file, output, *settings, "--devices", 1).message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_teacher_with_a_prompt_reads_one_text_a_row(taught: Path) -> None:
    config = replace(
        load_weights(taught / "run-classification").config, peft=prompt.Config(length=4)
    )
    build_teacher(load(Experiment, str(taught / "student.yaml")), config)
    packed = load(Experiment, str(taught / "student.yaml"), ["data.packing=best_fit"])
    with pytest.raises(
        ConfigError,
        match=r"the teacher .* puts 4 positions before each sequence.* set data\.packing=padded",
    ):
        build_teacher(packed, config)


def test_a_teacher_of_another_vocabulary_is_refused(
    experiment_file: str, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    other = make_dataset(tmp_path / "other", vocabulary=500)
    settings = (f"data.path={other}", f"output={tmp_path / 'run'}", *distilled_mlm(finished_run))
    message = samestep("train", experiment_file, *settings).message
    assert "was trained with another tokenizer than" in message
    message = samestep(
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        *distilled_mlm(finished_run)[:1],
        "model.vocab_size=640",
    ).message
    assert "has vocab_size 600, and model.vocab_size is 640" in message


def test_the_recipe_of_distilbert_is_that_of_its_released_code() -> None:
    """README and train.py of transformers' research_projects/distillation.

    66 million parameters, in its paper.
    """
    recipe = load(Experiment, "configs/distill/distilbert.yaml")
    loss = {
        "temperature": 2.0,
        "soft": 5.0,
        "hard": 2.0,
        "mse": 0.0,
        "cosine": 1.0,
        "positions": "all",
    }
    assert {name: getattr(recipe.objective, name) for name in loss} == loss
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.weight_decay) == (
        5e-4,
        (0.9, 0.98),
        0,
    )
    assert recipe.schedule.warmup_steps == pytest.approx(0.05 * recipe.training.steps)
    assert (recipe.training.global_batch_size, recipe.training.max_grad_norm) == (4096, 5.0)
    assert recipe.init_layers == (0, 2, 4, 7, 9, 11)
    with torch.device("meta"):
        model = recipe.model.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        66e6, rel=0.02
    )
    build_teacher(
        recipe, load(Experiment, "configs/pretrain/bert_base.yaml").model
    )  # raises if it does not fit


def test_a_suite_makes_students_anew_when_their_teacher_has_changed(
    taught: Path, finished_run: Path, tmp_path: Path
) -> None:
    task, teacher = Task.read(tasks.write_task("classification", tmp_path)), tmp_path / "teacher"
    shutil.copytree(taught / "run-classification", teacher)
    objective = (
        f"objective={{kind: distillation, teacher: {teacher}, of: {{kind: classification}}}}"
    )

    def digest() -> str:
        (run,) = list_runs(
            str(finished_run), [task], tmp_path / "suite", range(1), False, [objective]
        )
        return run.digest

    before = digest()
    assert digest() == before
    (teacher / "checkpoints" / "step-00000060").rename(tmp_path / "gone")
    shutil.copytree(
        finished_run / "checkpoints" / "step-00000012", teacher / "checkpoints" / "step-00000012"
    )
    assert digest() != before


@pytest.mark.long
def test_a_plan_counts_the_teacher(taught: Path, samestep: Samestep) -> None:
    def planned(*settings: object) -> dict[str, int]:
        plan = samestep(
            "plan",
            taught / "student.yaml",
            *settings,
            "--devices",
            2,
            "--strategy",
            "fsdp",
            "--json",
        )
        (found,) = json.loads(plan.out)["phases"][0]["plans"]
        return found["bytes"]

    alone = planned("objective={kind: classification}")
    weights = sum(int(np.prod(shape)) * 4 for shape in _shapes(taught / "run-classification"))
    assert planned()["parameters"] - alone["parameters"] == weights


def _shapes(run: Path) -> list[tuple[int, ...]]:
    tensors = load_weights(run).tensors
    return [tensors.shape(name) for name in tensors]
