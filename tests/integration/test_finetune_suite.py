"""`samestep finetune-suite`: tasks x seeds, killed in the middle and run again, and the table."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.integration import tasks
from tests.integration.commands import Samestep, Start, children, data_of
from tests.waiting import until
from trainer.studies.finetune.runs import list_runs
from trainer.studies.finetune.task import find_tasks

MODULE = (sys.executable, "-m", "samestep.cli")


def results(folder: Path) -> list[dict[str, object]]:
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.long
def test_killed_in_the_middle_and_run_again(
    finished_run: Path, tmp_path: Path, start: Start, samestep: Samestep
) -> None:
    files = [tasks.write_task(kind, tmp_path) for kind in ("classification", "tagging")]
    further = f"also: {{again: {{heldout: [{tmp_path}/classification-dev.jsonl]}}}}\n"
    files[0].write_text(files[0].read_text() + further)
    files[1].write_text(
        files[1].read_text().replace("epochs: 2", "epochs: 30")
    )  # time to be killed in
    folder = tmp_path / "suite"
    command = [
        "finetune-suite",
        finished_run,
        "--seeds",
        "1",
        "--output",
        folder,
        "--tasks",
        *files,
    ]
    command.append("checkpoint.every=4")
    process = start(*command, command=MODULE)
    until(lambda: list(folder.glob("runs/tagging/*/checkpoints/step-*")), 200)
    trainings = children(process.popen.pid)
    os.kill(process.popen.pid, signal.SIGKILL)  # the suite alone
    process.popen.wait()
    if shutil.which("setpriv"):
        assert trainings
        until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in trainings), 30)
    before = results(folder)
    assert len(before) == 1
    scores = before[0]["scores"]
    assert isinstance(scores, dict)
    assert scores["again/accuracy"] == scores["accuracy"]
    page = tmp_path / "watch.html"
    assert samestep("watch", folder, "--once", "--output", page).out == f"{page}\n"
    (shown,) = data_of(page)["suites"]
    assert (shown["finished"], shown["total"]) == (1, 2)
    assert [(task["task"], task["mean"]) for task in shown["tasks"]] == [
        ("classification", scores["accuracy"]),
        ("tagging", None),
    ]
    again = samestep(*command)
    assert again.code == 0
    found = results(folder)
    assert found[: len(before)] == before
    assert [(row["task"], row["run"]) for row in found[1:]] == [("tagging", "lr-0.003-seed-0")]
    (log,) = folder.glob("runs/tagging/*/log.txt")
    assert "continuing   at step" in log.read_text()
    assert "classification" in again.out
    assert "Published: classification, tagging: BERT-base (Devlin et al. 2019)." in " ".join(
        again.out.split()
    )
    page = (folder / "table.html").read_text()
    for run in folder.glob("runs/*/*"):
        assert len((run / "predictions.jsonl").read_text().splitlines()) == 60
        assert (run / "report.html").stat().st_size
        for name in ("predictions.jsonl", "report.html"):
            assert f'href="{run.relative_to(folder)}/{name}"' in page
    assert (
        "classification, lr 0.003, seed 0"
        in (folder / "curves" / "classification.html").read_text()
    )
    assert page.count("<tr") == 1 + 2 * 3 + 1, (
        "three scores of the task's rows and of the further ones; one of tags"
    )
    once_more = samestep(*command)
    assert (once_more.code, results(folder)) == (0, found)


@pytest.mark.long
def test_ctrl_c_saves_and_the_same_command_continues(
    finished_run: Path, tmp_path: Path, start: Start, samestep: Samestep
) -> None:
    file = tasks.write_task("tagging", tmp_path)
    file.write_text(file.read_text().replace("epochs: 2", "epochs: 20"))
    folder = tmp_path / "suite"
    command = ["finetune-suite", finished_run, "--seeds", "1", "--tasks", file, "--output", folder]
    process = start(*command, command=MODULE)
    until(lambda: list(folder.glob("runs/tagging/*/metrics.jsonl")), 200)
    os.kill(process.popen.pid, signal.SIGINT)
    stopped = process.wait(100)
    assert stopped.code == 130, stopped.err
    assert "0 of 1 runs are finished, and those that had begun are saved" in stopped.err
    assert "the same command continues" in stopped.err
    assert "Traceback" not in stopped.err
    (log,) = folder.glob("runs/tagging/*/log.txt")
    assert "the same command continues" in log.read_text()
    (saved,) = folder.glob("runs/tagging/*/checkpoints/step-*/COMMITTED")
    step = int(saved.parent.name.removeprefix("step-"))
    again = samestep(*command)
    assert again.code == 0, again.err
    assert f"continuing   at step {step}" in log.read_text()
    assert len(results(folder)) == 1
    rows = tasks.rows_of(log.parent)
    found = [row["step"] for row in rows if "train/loss" in row]
    assert found == sorted(found)
    assert len(found) == len(set(found))


@pytest.mark.long
def test_runs_start_from_the_best_of_another_task(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Which alone keeps its checkpoint."""
    first = tasks.write_task("classification", tmp_path)
    after = tmp_path / "after.yaml"
    after.write_text(
        f"base: {first}\nstart: classification\nevaluations: 3\ngrid: {{optimizer.lr: [3e-3]}}\n"
    )
    folder = tmp_path / "suite"
    done = samestep(
        *(
            "finetune-suite",
            finished_run,
            "--output",
            folder,
            "--seeds",
            "1",
            "--grid",
            "--parallel",
            "2",
        ),
        *("--tasks", after, first, "training.steps=6"),
    )
    assert (done.code, done.err.count("error")) == (0, 0), done.err
    scores = {
        row["run"]: row["scores"]["accuracy"]
        for row in results(folder)
        if row["task"] == "classification"
    }
    best = max(("lr-0.003-seed-0", "lr-0.001-seed-0"), key=lambda name: scores[name])
    (kept,) = [
        run
        for run in (folder / "runs" / "classification").iterdir()
        if (run / "checkpoints").exists()
    ]
    assert kept.name.startswith(best)
    (run,) = (folder / "runs" / "after").iterdir()
    assert yaml.safe_load((run / "config.yaml").read_text())["init_from"] == str(kept)
    assert len(list((folder / "runs").glob("*/*/predictions.jsonl"))) == 3
    assert "of several evaluations of a run, the best counts" in " ".join(done.out.split())
    (result,) = [row for row in results(folder) if row["task"] == "after"]
    found = [row["heldout/accuracy"] for row in tasks.rows_of(run) if "heldout/accuracy" in row]
    assert len(found) == 3
    assert result["scores"]["accuracy"] == max(found)


@pytest.mark.long
def test_a_run_that_fails_is_named_with_its_log(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file = tasks.write_task("classification", tmp_path)
    command = [
        "finetune-suite",
        finished_run,
        "--tasks",
        file,
        "--seeds",
        "1",
        "--output",
        tmp_path / "suite",
    ]
    broken = samestep(*command, "data.sequence_length=99")
    assert broken.code == 1
    assert "log.txt" in broken.err
    assert "model.max_positions" in broken.err
    file.write_text(file.read_text().replace("score: accuracy", "score: bleu"))
    assert "score is 'bleu', and the objective gives accuracy" in samestep(*command).message


def test_bad_rows_are_named_before_any_run(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file, folder = tasks.write_task("classification", tmp_path), tmp_path / "suite"
    rows = tmp_path / "classification.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text(
        "".join([*lines[:4], '{"text": "what?", "label": "about_nothing"}\n', *lines[4:]])
    )
    bad = samestep("finetune-suite", finished_run, "--tasks", file, "--output", folder)
    assert bad.code == 1
    assert f"{rows}:5: label is not one of about_class, about_file" in bad.message
    assert not list(folder.rglob("manifest.json"))
    assert {path.name for path in folder.iterdir()} == {"data"}, "no run, result or table"


@pytest.mark.long
def test_answers_that_are_written_are_scored(tmp_path: Path, samestep: Samestep) -> None:
    """T5 writes the names of classes, and a text that is none of them is wrong."""
    transformers = pytest.importorskip("transformers")
    from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig

    checkpoint, rows = tmp_path / "t5", tasks.classification(40)
    texts = [f"topic: {row['text']} about_class about_file" for row in rows]
    TokenizerConfig("", "unigram", 28, lowercase=False).train(texts).save(checkpoint)
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 2,
    }
    config = transformers.T5Config(vocab_size=200, decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(checkpoint)

    paths = {"paths": [str(tasks.write(tmp_path / "train.jsonl", rows[:32]))]}
    paths["heldout"] = [str(tasks.write(tmp_path / "dev.jsonl", rows[32:]))]
    labels = ["about_class", "about_file"]
    tree = {
        "source": {
            "kind": "table_pairs",
            **paths,
            "source": "topic: {text}",
            "target": "label",
            "labels": labels,
        },
        "objective": {"kind": "seq2seq", "target_length": 16},
        "metrics": ["accuracy", "f1"],
        "generation": {"beams": 2, "max_new_tokens": 5},
        "score": "accuracy",
        "sequence_length": 40,
        "experiment": {"accelerator": "cpu", "data": {"lanes": 8}},
    }
    file = tmp_path / "topic.yaml"
    file.write_text(json.dumps(tree))
    arguments = [
        "--seeds",
        "1",
        "--recipe",
        "t5",
        "training.steps=2",
        "training.global_batch_size=8",
    ]
    suite = samestep(
        "finetune-suite", checkpoint, "--tasks", file, *arguments, "--output", tmp_path / "suite"
    )
    assert suite.code == 0, suite.err
    (result,) = results(tmp_path / "suite")
    scores = result["scores"]
    assert isinstance(scores, dict)
    assert {"accuracy", "f1", "no_label"} <= scores.keys()
    assert 0 <= scores["accuracy"] <= 1 - scores["no_label"] / 8

    (task,) = find_tasks([str(file)], "t5")
    changes = [name for name in arguments if "=" in name]
    runs = [
        list_runs(str(checkpoint), [each], tmp_path / "suite", range(1), False, changes)[0]
        for each in (task, replace(task, generation={}))
    ]
    assert [run.digest == result["digest"] for run in runs] == [True, False]
    assert runs[0].evaluations[""][:4] == [
        "--generate",
        "max_new_tokens=16",
        "beams=2",
        "max_new_tokens=5",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nope"], "no task 'nope'.*glue/mrpc.yaml"),
        (["--tasks", "mrpcc"], "no task .mrpcc.*did you mean .mrpc.?"),
        (["--tasks", "mrpc", "--seeds", "0"], "--seeds must be at least 1"),
        (["--tasks", "mrpc", "mrpc"], "named twice"),
        (["--tasks", "mrpc", "--parallel", "0"], "--parallel must be at least 1"),
        (["--tasks", "mrpc", "seed=1"], "leave seed=... out"),
        (["--tasks", "mrpc", "output=x"], "leave output=... out"),
        (["--tasks", "mrpc", "init_from=x"], "leave init_from=... out"),
        (["--tasks", "seed=1"], "--tasks names no task"),
        (["--tasks", "scale=base/task.yaml"], "scale=base/task.yaml: .*nonsense"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale=base").mkdir()
    (tmp_path / "scale=base" / "task.yaml").write_text("nonsense: 1\n")
    result = samestep("finetune-suite", "nowhere", *arguments, "--output", tmp_path / "suite")
    assert result.code == 2
    assert re.search(message, result.message)
    assert not (tmp_path / "suite").exists()
