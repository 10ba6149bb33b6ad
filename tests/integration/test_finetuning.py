"""Fine-tuning through the real command.

Every kind of task from files to scores, and what bad input gets.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from data_pipeline.sources import fault
from samestep import load_model
from samestep.cli import main
from samestep.config import load
from tests.conformance.worker import Losses, make_trainer, run_once
from tests.integration import tasks
from tests.integration.commands import Samestep, Start
from tests.processes import run_ranks
from trainer.metrics import squad
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.recorder import Destinations
from trainer.training.weights.loading import load_weights


@pytest.fixture(scope="module")
def tuned(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a classifier that was fine-tuned from the BERT of `finished_run`.

    Data, experiment, run.
    """
    folder = tmp_path_factory.mktemp("tuned")
    often = ("checkpoint.every=20", "checkpoint.keep_last=5")
    tasks.tune("classification", folder, finished_run, dataset_folder / "tokenizer", *often)
    return folder


def test_a_classifier_learns_and_is_scored_again_and_verified(
    tuned: Path, samestep: Samestep
) -> None:
    run = tuned / "run-classification"
    (last,) = (row for row in tasks.rows_of(run) if "heldout/accuracy" in row)
    assert last["heldout/accuracy"] > 0.9
    assert last["heldout/matthews"] > 0.8
    assert "heldout/perplexity" not in last
    evaluated = samestep("evaluate", run)
    assert f"accuracy     {last['heldout/accuracy']:.6g}" in evaluated.out
    resolved = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert (resolved["head"], resolved["labels"], resolved["layers"]) == (
        "classification",
        ["about_class", "about_file"],
        2,
    )
    assert samestep("ledger", "verify", run).code == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["regression", "multiple_choice", "question_answering", "tagging"])
def test_each_kind_of_task_learns_and_its_predictions_give_its_scores(
    kind: str, finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    assert (
        samestep(
            "data", "build", tasks.write_build(kind, tmp_path, dataset_folder / "tokenizer")
        ).code
        == 0
    )
    assert (
        samestep("train", tasks.write_experiment(kind, tmp_path, finished_run, steps=120)).code == 0
    )
    scored = [
        row
        for row in tasks.rows_of(tmp_path / f"run-{kind}")
        if f"heldout/{tasks.SCORES[kind]}" in row
    ]
    assert scored[-1][f"heldout/{tasks.SCORES[kind]}"] > 0.8, scored[-1]
    file = tmp_path / "predictions.jsonl.gz"
    evaluated = samestep("evaluate", tmp_path / f"run-{kind}", "--predictions", file)
    assert evaluated.code == 0, evaluated.err
    scores, _, _ = evaluated.out.partition("\n\n")  # tables of classes follow
    printed = {line.split()[0]: float(line.split()[1]) for line in scores.splitlines()}
    (kept,) = (
        json.loads(line)
        for line in (tmp_path / f"run-{kind}" / "scores.jsonl").read_text().splitlines()
    )
    threshold = kept.get("heldout/threshold", 0.0)  # with all its digits
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert [row["row"] for row in rows] == list(range(60))
    given = [json.loads(line) for line in (tmp_path / f"{kind}-dev.jsonl").read_text().splitlines()]
    again = {
        "regression": check_numbers,
        "multiple_choice": check_choices,
        "question_answering": check_answers,
        "tagging": check_tags,
    }[kind](rows, given, threshold)
    assert {name: printed[name] for name in again} == pytest.approx(again, rel=1e-5)
    if kind != "multiple_choice":
        check_predict(kind, tmp_path / f"run-{kind}", rows)


Lines = list[dict[str, Any]]


def check_predict(kind: str, run: Path, rows: Lines) -> None:
    """A loaded model predicts what the evaluation has written."""
    texts = [row["words"] if kind == "tagging" else tuple(row["texts"]) for row in rows]
    found: list[Any] = load_model(run).predict(texts, batch_tokens=200)
    for row, prediction in zip(rows, found, strict=True):
        if kind == "regression":
            assert prediction.value == pytest.approx(row["prediction"], abs=1e-5)
        elif kind == "classification":
            assert prediction.label == row["prediction"]
            assert prediction.probabilities == pytest.approx(row["probabilities"], abs=1e-5)
        elif kind == "tagging":
            assert prediction.labels == tuple(row["prediction"])
        else:
            best = row["n_best"][0]
            assert (prediction.text, prediction.begin, prediction.end) == (
                best["text"],
                best["begin"],
                best["end"],
            )
            assert prediction.probability == pytest.approx(best["probability"], abs=1e-5)


def check_numbers(rows: Lines, given: Lines, threshold: float) -> dict[str, float]:
    """Checks lines of predictions against the rows of the file that was built.

    Gives the scores that they have.
    """
    assert [(row["texts"], row["label"]) for row in rows] == [
        ([row["a"], row["b"]], row["score"]) for row in given
    ]
    label, prediction = ([row[name] for row in rows] for name in ("label", "prediction"))
    return {"pearson": float(np.corrcoef(label, prediction)[0, 1])}


def check_choices(rows: Lines, given: Lines, threshold: float) -> dict[str, float]:
    for row, source in zip(rows, given, strict=True):
        assert (row["texts"], row["label"]) == (
            [source["context"], *source["choices"]],
            source["label"],
        )
        assert row["prediction"] == np.argmax(row["probabilities"])
        assert sum(row["probabilities"]) == pytest.approx(1)
    return {"accuracy": float(np.mean([row["prediction"] == row["label"] for row in rows]))}


def check_tags(rows: Lines, given: Lines, threshold: float) -> dict[str, float]:
    from seqeval.metrics import f1_score

    assert [(row["words"], row["label"]) for row in rows] == [
        (row["tokens"], row["ner"]) for row in given
    ]
    return {
        "entity_f1": f1_score([row["label"] for row in rows], [row["prediction"] for row in rows])
    }


def check_answers(rows: Lines, given: Lines, threshold: float) -> dict[str, float]:
    """Names of questions are kept.

    "" is predicted where it is that much better than the best of the n best.
    """
    for row, source in zip(rows, given, strict=True):
        assert (row["id"], row["texts"]) == (source["id"], [source["question"], source["context"]])
        assert row["answers"] == [answer["text"] for answer in source["answers"]]
        answers = [answer for answer in row["n_best"] if answer["text"]]
        assert row["prediction"] == ("" if row["null_odds"] > threshold else answers[0]["text"])
        assert all(
            answer["text"] == source["context"][answer["begin"] : answer["end"]]
            for answer in row["n_best"]
        )
    scores = squad.raw_scores([row["prediction"] for row in rows], [row["answers"] for row in rows])
    return {**scores.means_by_kind(), "best_f1": scores.means()["f1"]}


def test_predictions_are_one_file_of_any_number_of_processes(
    tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run, one, two = tuned / "run-classification", tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    evaluated = samestep("evaluate", run, "--predictions", one)
    again = samestep("evaluate", run, "--predictions", two, "--processes", 2, "strategy=ddp")
    assert again.code == 0, again.err
    rows, others = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in (one, two)
    )
    given = [
        json.loads(line) for line in (tuned / "classification-dev.jsonl").read_text().splitlines()
    ]
    assert [(row["texts"], row["label"]) for row in rows] == [
        ([row["text"]], row["label"]) for row in given
    ]
    accuracy = np.mean([row["prediction"] == row["label"] for row in rows])
    assert f"accuracy     {accuracy:.6g}" in evaluated.out
    for row, other in zip(rows, others, strict=True):
        assert row["prediction"] == max(row["probabilities"], key=row["probabilities"].__getitem__)
        assert row.pop("probabilities") == pytest.approx(other.pop("probabilities"), abs=1e-5)
        assert row == other


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("predictions.csv", [], "is written as JSON Lines. Use a name that ends in .jsonl"),
        ("nowhere/predictions.jsonl", [], "nowhere does not exist"),
        ("there.jsonl", [], "there.jsonl exists already and is complete. Name another"),
        ("predictions.jsonl", ["--generate"], "--generate writes texts"),
    ],
)
def test_predictions_that_cannot_be_written_are_refused(
    name: str, arguments: list[str], message: str, tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    (tmp_path / "there.jsonl").touch()
    file = tmp_path / name
    assert (
        message
        in samestep(
            "evaluate", tuned / "run-classification", "--predictions", file, *arguments
        ).message
    )
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]


def test_a_run_without_a_task_has_no_predictions_of_rows(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep("evaluate", finished_run, "--predictions", tmp_path / "predictions.jsonl")
    assert "samestep generate writes texts, samestep fill fills masks" in result.message
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_any_number_of_processes_makes_the_same_steps(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Every kind of task has the same losses from the start, with rows grouped by length, weights
    of classes and label smoothing, and the same scores.
    """
    files = {}
    for kind in tasks.SOURCES:
        assert (
            samestep(
                "data", "build", tasks.write_build(kind, tmp_path, dataset_folder / "tokenizer")
            ).code
            == 0
        )
        experiment = tasks.write_experiment(kind, tmp_path, finished_run, steps=10)
        more = [] if kind == "multiple_choice" else ["data.group_by_length=4"]
        if kind in ("classification", "tagging"):
            more += ["objective.class_weights=balanced", "objective.label_smoothing=0.1"]
        resolved = yaml.safe_load(samestep("config", experiment, "model.dropout=0.1", *more).out)
        experiment.write_text(yaml.safe_dump(resolved | {"init_from": None}))
        files[kind] = str(experiment)
    expected = run_ranks(1, traces, files, "single")[0]
    assert {len(trace) for trace in expected.values()} == {11}
    for processes, strategy in ((2, "fsdp"), (3, "ddp")):
        found = run_ranks(processes, traces, files, strategy)[0]
        for kind, trace in expected.items():
            np.testing.assert_allclose(
                found[kind][:-1], trace[:-1], rtol=1e-5, err_msg=f"{kind}, {processes} processes"
            )
            assert found[kind][-1] == pytest.approx(trace[-1], abs=1e-3), (
                kind
            )  # of nearly equal predictions, here


def traces(files: dict[str, str], strategy: str) -> dict[str, list[float]]:
    """The losses of each step of runs, and their score after the last one."""
    world = World.start(60)
    world.connect("gloo")
    found = {}
    for kind, file in files.items():
        output = f"output={Path(file).parent}/{strategy}-{kind}"
        trainer = make_trainer(load(Experiment, file, [f"strategy={strategy}", output]), world)
        tracker = Losses("train/loss", f"heldout/{tasks.SCORES[kind]}")
        trainer.fit(Destinations([tracker]))
        trainer.loader.close()
        found[kind] = tracker.values
    world.close()
    return found


@pytest.mark.long
def test_datasets_with_the_same_labels_are_mixed(
    tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """One process and two take the same steps, and all held-out rows are scored, each by its own
    label.
    """
    rows = [
        {**row, "label": 1 - tasks.LABELS.index(row["label"])}
        for row in tasks.classification(90, 500)
    ]
    train, heldout = (
        tasks.write(tmp_path / "train.jsonl", rows[20:]),
        tasks.write(tmp_path / "dev.jsonl", rows[:20]),
    )
    files = (f"source.paths=[{train}]", f"source.heldout=[{heldout}]")
    for name, labels in (("more", []), ("unlike", ["source.labels=[x,y]"])):
        build = (
            "data",
            "build",
            tuned / "classification-data.yaml",
            f"output={tmp_path / name}",
            *files,
            *labels,
        )
        assert samestep(*build).code == 0
    parts = {tuned / "data-classification": 60, tmp_path / "more": 20}  # held-out rows
    mixture = [
        "data.path=null",
        f"data.sources={json.dumps([{'path': str(part)} for part in parts])}",
    ]
    run, file = tmp_path / "run", tuned / "classification.yaml"
    short = ["training.steps=8", "schedule.warmup_steps=1", "training.evaluate_every=8"]
    assert samestep("train", file, f"output={run}", *mixture, *short).code == 0
    found = [
        run_ranks(
            count, run_once, f"{run}/config.yaml", [f"output={tmp_path / kind}", f"strategy={kind}"]
        )[0]
        for count, kind in ((1, "single"), (2, "fsdp"))
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    assert samestep("ledger", "verify", run).code == 0
    (last,) = (row for row in tasks.rows_of(run) if "heldout/accuracy" in row)
    right = 0.0
    for part, count in parts.items():
        scored = samestep("evaluate", run, "data.sources=[]", f"data.path={part}").out
        right += count * _accuracy(scored)
    assert last["heldout/accuracy"] * sum(parts.values()) == pytest.approx(right, abs=0.01)
    refused = mixture[1].replace(str(tmp_path / "more"), str(tmp_path / "unlike"))
    message = samestep("train", file, f"output={tmp_path / 'refused'}", mixture[0], refused).message
    assert (
        f"the labels of {tmp_path / 'unlike'} are x, y, and model.labels is about_class, about_file"
        in message
    )


@pytest.fixture(scope="module")
def reordered(tuned: Path) -> Path:
    """The dataset of `tuned`, built with its labels in the other order."""
    output, labels = tuned / "data-reordered", json.dumps(tasks.LABELS[::-1])
    build = [str(tuned / "classification-data.yaml"), f"output={output}", f"source.labels={labels}"]
    assert main(["data", "build", *build]) == 0
    return output


def test_labels_in_another_order_are_the_same_labels(
    tuned: Path, reordered: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """The advice of the message, obeyed, gives the scores and predictions of the run."""
    run, data = tuned / "run-classification", f"data.path={reordered}"
    message = samestep("evaluate", run, data).message
    advice = """model.labels='["about_file", "about_class"]'"""
    assert f"set {advice}, in this order, or build the dataset again" in message
    assert """with source.labels='["about_class", "about_file"]'""" in message
    obeyed = (data, advice.replace("'", ""))
    files = [tmp_path / "own.jsonl", tmp_path / "reordered.jsonl"]
    own = samestep("evaluate", run, "--predictions", files[0])
    other = samestep("evaluate", run, *obeyed, "--predictions", files[1])
    # The table of classes, which follows, is in the order of the labels.
    assert own.out.partition("Classes")[0] == other.out.partition("Classes")[0]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for one, two in zip(
        *(sorted(each, key=lambda row: row["texts"]) for each in rows), strict=True
    ):
        assert (one["label"], one["prediction"]) == (two["label"], two["prediction"])
        assert one["probabilities"] == pytest.approx(two["probabilities"], abs=1e-5)
    # A run that has begun keeps its order.
    train = ("train", tuned / "classification.yaml", "training.steps=61", *obeyed)
    assert "the checkpoint is of another model (model.labels" in samestep(*train).message


def test_a_checkpoint_is_not_scored_as_another_model(
    tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """With outputs of other names, or with settings that leave all shapes as they are."""
    run = tuned / "run-classification"
    assert "holds another model than" in samestep("evaluate", run, "model.heads=1").message
    unlike = tmp_path / "unlike"
    build = ("data", "build", tuned / "classification-data.yaml", f"output={unlike}")
    renamed = "source.words={label: {about_class: x, about_file: y}}"
    assert samestep(*build, "source.labels=[x,y]", renamed).code == 0
    message = samestep("evaluate", run, f"data.path={unlike}", "model.labels=[x,y]").message
    assert "model.labels: ['about_class', 'about_file'] -> ['x', 'y']" in message


def test_a_head_is_trained_on_with_its_labels_in_another_order(
    tuned: Path, reordered: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """As the start of a run, as frozen weights of its checkpoints, and as a teacher."""
    trained, run = tuned / "run-classification", tmp_path / "run"
    start = (
        *("train", tuned / "classification.yaml", f"init_from={trained}", f"data.path={reordered}"),
        *("training.steps=1", "training.evaluate_every=1", "optimizer.lr=1e-9"),
        *("schedule.warmup_steps=0", "optimizer.weight_decay=0"),
    )
    expected = _accuracy(samestep("evaluate", trained).out)
    assert expected > 0.9
    assert samestep(*start, f"output={run}", "frozen=[head, embeddings]").code == 0
    assert _accuracy(samestep("evaluate", run).out) == expected
    bias = [load_weights(each).tensors["head.classifier.bias"] for each in (trained, run)]
    assert torch.equal(bias[1], bias[0].flip(0))
    assert load_weights(run).config.labels == tasks.LABELS[::-1]
    distill = (
        f"objective={{kind: distillation, teacher: {trained}, of: classification, hard: 0.0}}",
        "model.dropout=0",
        "model.attention_dropout=0",
    )
    assert samestep(*start, f"output={tmp_path / 'student'}", *distill).code == 0
    (first, *_) = tasks.rows_of(tmp_path / "student")
    assert first["train/soft_loss"] == pytest.approx(0, abs=1e-6)
    assert (first["train/agreement"], first["train/accuracy"]) == (1, 1)


def _scores(printed: str) -> dict[str, str]:
    """The scores that evaluate prints; a table of classes may follow."""
    return dict(line.split() for line in printed.partition("\n\n")[0].splitlines())


def _accuracy(scores: str) -> float:
    return float(_scores(scores)["accuracy"])


def test_a_mixture_has_one_order_of_labels(
    tuned: Path, reordered: Path, tmp_path: Path, samestep: Samestep
) -> None:
    parts = [{"path": str(tuned / "data-classification")}, {"path": str(reordered)}]
    train = ("train", tuned / "classification.yaml", f"output={tmp_path / 'run'}")
    message = samestep(*train, "data.path=null", f"data.sources={json.dumps(parts)}").message
    assert f"the labels of {reordered} are about_file, about_class" in message
    fix = """; build the dataset again with source.labels='["about_class", "about_file"]'"""
    assert f"about_class, about_file{fix}" in message


def test_a_fine_tuned_model_serves_in_transformers(
    tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    from transformers import pipeline

    assert samestep("export", tuned / "run-classification", tmp_path / "exported").code == 0
    classify = pipeline("text-classification", model=str(tmp_path / "exported"), device="cpu")
    rows = [
        json.loads(line) for line in (tuned / "classification-dev.jsonl").read_text().splitlines()
    ]
    said = [answer["label"] for answer in classify([row["text"] for row in rows])]
    assert np.mean([answer == row["label"] for answer, row in zip(said, rows, strict=True)]) > 0.9


@pytest.mark.parametrize(
    ("kind", "row", "settings", "message"),
    [
        (
            "classification",
            {"text": "a", "label": "c"},
            {},
            r"dev.jsonl:3: label is not one of about_class",
        ),
        ("classification", {"text": "a"}, {}, r"dev.jsonl:3: no column 'label'"),
        ("classification", {"label": 1}, {}, r"dev.jsonl:3: no column 'text'"),
        ("classification", {"text": " ", "label": 1}, {}, r"dev.jsonl:3: empty text"),
        (
            "question_answering",
            {"question": "?", "context": "a b", "answers": [{"text": "c", "answer_start": 0}]},
            {},
            r"dev.jsonl:3: an answer is not in the context: 'c'",
        ),
        ("tagging", {"tokens": ["a"], "ner": ["NAME"]}, {}, r"dev.jsonl:3: tag is not BIO: 'NAME'"),
        (
            "multiple_choice",
            {"context": "a", "choices": ["b", "c", "d"], "label": 3},
            {},
            r"dev.jsonl:3: .*label",
        ),
        ("regression", {"a": "a", "b": "b", "score": "x"}, {}, r"dev.jsonl:3: .*score"),
    ],
)
def test_bad_rows_are_named(
    kind: str,
    row: dict,
    settings: dict,
    message: str,
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    import re

    build = tasks.write_build(kind, tmp_path, dataset_folder / "tokenizer")
    tasks.write(
        tmp_path / f"{kind}-dev.jsonl", [*getattr(tasks, kind)(2), row, *getattr(tasks, kind)(2)]
    )
    assert re.search(message, samestep("data", "build", build).message)
    assert samestep("data", "build", build, "on_error=skip").code == 0
    (line,) = (tmp_path / f"data-{kind}" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["line"] == 3
    manifest = json.loads((tmp_path / f"data-{kind}" / "manifest.json").read_text())
    assert manifest["documents_rejected"] == {fault(json.loads(line)["reason"]): 1}
    kept = sum(shard["documents"] for shards in manifest["splits"].values() for shard in shards)
    assert (manifest["documents_in"], kept) == (245, 244)


def test_an_empty_split_is_named(dataset_folder: Path, tmp_path: Path, samestep: Samestep) -> None:
    build = tasks.write_build("classification", tmp_path, dataset_folder / "tokenizer")
    (tmp_path / "classification-dev.jsonl").write_text("")
    assert "classification-dev.jsonl" in samestep("data", "build", build).message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["objective=tagging"], "holds rows for classification"),
        (["data.packing=concat"], "data.packing=padded"),
        (["model.labels=[x,y,z]"], """set model.labels='["about_class", "about_file"]'"""),
        (["objective.metrics=[bleu]"], "bleu"),
        (["init_from=nowhere"], "nowhere"),
        (["model.layers=3"], "another model"),
        (["data.sequence_length=64"], "model.max_positions"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: list[str], message: str, tuned: Path, tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep(
        "train", tuned / "classification.yaml", f"output={tmp_path / 'run'}", *settings
    )
    assert message in result.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_commands_that_need_words_say_what_to_use_instead(tuned: Path, samestep: Samestep) -> None:
    run, said = tuned / "run-classification", "has the head classification, which "
    assert f"{said}predicts no tokens; use the model" in samestep("fill", run, "a [MASK]").message
    assert f"{said}predicts no words; use one with" in samestep("generate", run, "the").message
    assert (
        f"{said}generates no text; leave --generate out"
        in samestep("evaluate", run, "--generate").message
    )


@pytest.mark.long
def test_a_missing_package_is_named_before_the_first_step(
    tuned: Path, tmp_path: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where there is something to score."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    short = ["training.steps=2", "schedule.warmup_steps=1"]
    train = ["train", tuned / "classification.yaml", f"output={tmp_path / 'run'}", *short]
    assert "pip install 'scikit-learn>=1.4'" in samestep(*train).message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert samestep(*train, "training.evaluate_every=null").code == 0
    assert "pip install 'scikit-learn>=1.4'" in samestep("evaluate", tmp_path / "run").message
    dataset, experiment = tuned / "data-classification", tuned / "classification.yaml"
    assert "→ about_" in samestep("data", "show", dataset, "--objective", experiment).out
    assert samestep("plan", experiment, "--devices", 2, "--strategy", "ddp").code == 0


@pytest.mark.long
def test_frozen_features_with_a_mix_of_layers(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Only the mix and the head are trained; the frozen weights come from the base."""
    settings = ("frozen=[embeddings,layers]", "model.scalar_mix=true", "optimizer.lr=1e-2")
    tasks.tune("classification", tmp_path, finished_run, dataset_folder / "tokenizer", *settings)
    run = tmp_path / "run-classification"
    tensors = load_weights(run).tensors
    assert tensors["mix.scores"].abs().max() > 0
    before = load_weights(finished_run).tensors
    assert all(torch.equal(tensors[name], before[name]) for name in before if "layers." in name)
    assert samestep("evaluate", run).code == 0
    result = samestep("export", run, tmp_path / "hf")
    assert (result.code, "scalar_mix is set" in result.message) == (2, True), result.message


@pytest.mark.long
def test_two_texts_in_both_orders(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    """The score of a pair is that of the pair turned around; the same in three processes."""
    settings = ("objective.both_orders=true", "training.steps=24", "training.evaluate_every=24")
    experiment = tasks.tune(
        "regression", tmp_path, finished_run, dataset_folder / "tokenizer", *settings
    )
    run = tmp_path / "run-regression"
    rows = tasks.regression(9, begin=500)
    turned = [{**row, "a": row["b"], "b": row["a"]} for row in rows]
    found = []
    for name, given in (("rows", rows), ("turned", turned)):
        file = tasks.write(tmp_path / f"{name}.jsonl", given)
        output = tmp_path / f"{name}-labeled.jsonl"
        result = samestep("label", run, file, "--output", output)
        assert result.code == 0, result.err
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        found.append([line["score"] for line in lines])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert len(set(found[0])) > 1
    alone = tasks.write(tmp_path / "alone.jsonl", [{"a": "only one", "b": ""}])
    wrong = samestep("label", run, alone, "--output", tmp_path / "alone-labeled.jsonl")
    assert wrong.code == 1
    assert samestep("evaluate", run).code == 0
    tasks.assert_same_in_three_processes(start, experiment, run, tmp_path / "three", *settings)
    plan = samestep("plan", experiment, *settings, "--devices", 1, "--strategy", "single")
    assert plan.code == 0, plan.err


@pytest.mark.long
def test_long_texts_in_windows(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    """The word that matters is beyond the length of a sequence: truncated texts do not have it."""

    def rows(count: int, begin: int = 0) -> tasks.Rows:
        found = tasks.classification(count, begin)
        for number, row in enumerate(found):
            words = row["text"].split()
            (key,) = [word for word in words if word in tasks.NAMES]
            filler = [tasks.FILL[(number + place) % 10] for place in range(24 + number % 6)]
            row["text"] = " ".join([*filler, key])
        return found

    folders = {}
    for name in ("whole", "truncated"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        file = tasks.write_build("classification", folders[name], dataset_folder / "tokenizer")
        tasks.write(folders[name] / "classification.jsonl", rows(240))
        tasks.write(folders[name] / "classification-dev.jsonl", rows(60, 240))
        assert samestep("data", "build", file).code == 0
    scores = {}
    for name, stride in (("whole", 10), ("truncated", None)):
        experiment = tasks.write_experiment("classification", folders[name], finished_run, 90)
        settings = (f"objective.stride={json.dumps(stride)}", "data.sequence_length=16")
        result = samestep("train", experiment, *settings)
        assert result.code == 0, result.err
        run = folders[name] / "run-classification"
        (last,) = (row for row in tasks.rows_of(run) if "heldout/accuracy" in row)
        scores[name] = last["heldout/accuracy"]
    assert scores["whole"] > 0.9
    assert scores["truncated"] < 0.75

    # Each row has one prediction, the same as for a row that is labeled by itself.
    run = folders["whole"] / "run-classification"
    predictions = tmp_path / "predictions.jsonl"
    assert samestep("evaluate", run, "--predictions", predictions).code == 0
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert len(lines) == 60
    labeled = tmp_path / "labeled.jsonl"
    file = folders["whole"] / "classification-dev.jsonl"
    assert samestep("label", run, file, "--output", labeled).code == 0
    for line, row in zip(lines, labeled.read_text().splitlines(), strict=True):
        expected = pytest.approx(line["probabilities"], rel=1e-3, abs=1e-4)
        assert json.loads(row)["label"] == expected
    settings = ("objective.stride=10", "data.sequence_length=16")
    experiment = folders["whole"] / "classification.yaml"
    tasks.assert_same_in_three_processes(start, experiment, run, tmp_path / "three", *settings)


@pytest.mark.long
def test_features_below_an_lstm_and_a_conditional_random_field(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    """ELMo's way to tag, on frozen layers; the same in three processes."""
    settings = (
        *("frozen=[embeddings,layers]", "model.scalar_mix=true", "model.head_lstm=2"),
        *("model.crf=true", "objective.crf=true", "optimizer.lr=2e-2"),
    )
    folder = tmp_path / "one"
    folder.mkdir()
    experiment = tasks.tune(
        "tagging", folder, finished_run, dataset_folder / "tokenizer", *settings
    )
    run = folder / "run-tagging"
    rows = tasks.rows_of(run)
    assert [row for row in rows if "heldout/entity_f1" in row][-1]["heldout/entity_f1"] > 0.8
    tensors = load_weights(run).tensors
    assert tensors["tag_transitions"].shape[0] == len(load_weights(run).config.labels) + 1
    assert samestep("evaluate", run).code == 0
    tasks.assert_same_in_three_processes(start, experiment, run, tmp_path / "three", *settings)
    # Objective and model must agree.
    other = samestep("train", experiment, f"output={tmp_path}/x", *settings, "model.crf=false")
    assert "model.crf=true" in other.message
    other = samestep("train", experiment, f"output={tmp_path}/x", *settings, "objective.crf=false")
    assert "model.crf=false" in other.message
