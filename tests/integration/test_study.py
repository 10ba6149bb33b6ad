"""`samestep study`: killed in the middle and run again; the numbers and pages that it leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration import tasks
from tests.integration.commands import Samestep, Start, data_of
from tests.waiting import until

MODULE = (sys.executable, "-m", "samestep.cli")
EXPERIMENT = """
data: {path: stage:corpus, sequence_length: 32, packing: best_fit}
model: {kind: bert, vocab_size: 300, layers: 1, width: 16, heads: 2, ffn_width: 32, max_positions: 64}
objective: {kind: mlm, mask_fraction: 0.15}
optimizer: {kind: adamw, lr: 1e-3}
training: {steps: 40, global_batch_size: 8, evaluate_every: 10, evaluate_batches: 2, log_every: 10}
checkpoint: {every: 5, keep_every: 20}
accelerator: cpu
"""  # noqa: E501
STUDY = """
question: Does a larger rate help?
figure: none
scale: tiny
seeds: 2
stages:
  corpus: {kind: build, recipe: corpus.yaml}
  pretrain: {kind: train, experiment: pretrain.yaml}
  often: {kind: evaluate, run: stage:pretrain, settings: {objective: {mask_fraction: 0.5}}}
  topic: {kind: task, task: classification.yaml, start: stage:pretrain, at: 0.5}
arms:
  small: {often: null}
  large: {pretrain: {settings: {optimizer: {lr: 3e-3}}}, topic: {scratch: true}}
measures:
  loss: {score: pretrain/loss, better: lower}
  loss at half: {score: often/loss, better: lower}
  topic: {score: topic/accuracy, percent: true}
  parameters: {score: pretrain/trained_parameters}
primary: {measure: loss, arms: [small, large], pilot_deviation: 0.1, detects: 0.6}
curves: [{stage: pretrain, against: flops}, {stage: pretrain}]
relations: [{measure: loss, against: parameters, logarithmic: true}]
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of two arms: one leaves out a stage, the other starts a task from random weights."""
    recipe = "source: python_docs\nlimit: 200KB\nshard_bytes: 32768\nheldout_fraction: 0.1\n"
    tokenizer = "tokenizer: {path: unused, vocab_size: 300, lowercase: true}\noutput: unused\n"
    (tmp_path / "corpus.yaml").write_text(recipe + tokenizer)
    (tmp_path / "pretrain.yaml").write_text(EXPERIMENT)
    tasks.write_task("classification", tmp_path)
    file = tmp_path / "rates.yaml"
    file.write_text(STUDY)
    return file


def kill_after(trained: int, start: Start, *command: object) -> None:
    """Kills a study when so many runs of pre-training have ended."""
    process, jobs = start(*command, command=MODULE), Path(str(command[3])) / "jobs"
    until(lambda: len(list(jobs.glob("train-*/result.json"))) >= trained, 200)
    os.kill(process.popen.pid, signal.SIGKILL)
    process.popen.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_in_the_middle_it_continues(
    study: Path, tmp_path: Path, start: Start, samestep: Samestep
) -> None:
    command = ["study", study, "--output", tmp_path / "one"]
    listed = samestep(*command, "--list").out.splitlines()
    # 1 dataset; 2 seeds x (2 rates of pre-training, 1 evaluation, 2 arms of the task).
    assert listed[-1] == "0 of 11 jobs are finished"
    kill_after(2, start, *command)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("one/jobs/*/result.json")}
    watched = tmp_path / "watch.html"
    assert samestep("watch", tmp_path / "one", "--once", "--output", watched).code == 0
    (shown,) = data_of(watched)["studies"]
    assert (shown["name"], shown["total"]) == ("rates", 11)
    assert len(before) <= shown["finished"] < 11
    assert [run["state"] for run in shown["runs"]].count("finished") >= 2
    page = tmp_path / "rates.md"
    page.write_text("# Rates\n\n<!-- results -->\nstale\n<!-- /results -->\n\nWe conclude.\n")

    done = samestep(*command, "--page", page)

    assert done.code == 0, done.err
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    # What a killed study has begun may run to its end once more; nothing finished does.
    repeated = [file.parent.name for file in before if f"{file.parent.name} (" in done.err]
    assert not repeated
    assert "Found: " in done.out
    text = page.read_text()
    assert text.startswith("# Rates\n")
    assert text.endswith("We conclude.\n")
    assert "stale" not in text
    assert "| large |" in text
    for image in tmp_path.glob("images/*.svg"):
        assert f"images/{image.name}" in text
    plotted = {image.stem.removeprefix("rates-") for image in tmp_path.glob("images/*.svg")}
    curves = {"pretrain-heldout_loss", "pretrain-heldout_loss-against-flops"}
    assert {"loss", "loss-against-parameters", *curves} <= plotted
    prose = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    assert max(map(len, prose)) <= 120
    assert "parameters" not in plotted  # no seed changes it
    assert "<svg" in (tmp_path / "one" / "rates" / "index.html").read_text()
    costs = json.loads((tmp_path / "one" / "rates" / "costs.json").read_text())
    assert costs["total"]["jobs"] == 11
    assert costs["total"]["flops"] > 0
    assert costs["total"]["kwh"] > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_second_study_has_the_scores_of_one_that_was_killed(
    study: Path, tmp_path: Path, start: Start, samestep: Samestep
) -> None:
    """One process at a time changes no number, either."""
    command = ["study", study, "--output", tmp_path / "one", "seeds=1", "--parallel", "2"]
    kill_after(1, start, *command)
    done = samestep(*command)
    assert done.code == 0, done.err
    done = samestep("study", study, "--output", tmp_path / "two", "--parallel", "1", "seeds=1")
    assert done.code == 0, done.err
    once, again = (tmp_path / run / "rates" / "scores.json" for run in ("one", "two"))
    assert once.read_bytes() == again.read_bytes()


@pytest.mark.long
def test_wrong_input_is_refused(study: Path, tmp_path: Path, samestep: Samestep) -> None:
    for overrides, message in (
        (["--parallel", "0"], "--parallel must be at least 1"),
        (["arms.small.pretrain.settings.optimizer.lrr=1"], "optimizer.lrr is not a known key"),
        (["stages.pretrain.settings.schedule.warmup_steps=90"], "warmup_steps"),
    ):
        failed = samestep("study", study, "--output", tmp_path / "out", *overrides)
        assert failed.code == 2
        assert message in failed.err
        assert "Traceback" not in failed.err
    assert not list(tmp_path.glob("out/jobs/*"))


@pytest.mark.long
def test_a_failed_job_is_named_and_the_rest_is_shown(
    study: Path, tmp_path: Path, samestep: Samestep
) -> None:
    settings = "arms.large.pretrain.settings.data.sequence_length=4096"
    done = samestep("study", study, "--output", tmp_path / "out", "seeds=1", settings)
    assert done.code == 1
    assert "ended with exit code" in done.err
    assert "max_positions" in done.err
    assert "small" in done.out
