"""Which jobs a study has, and what its file may not say."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import BertConfig, BertForMaskedLM

from samestep.cli import build_parser
from samestep.errors import ConfigError
from tests.waiting import until
from trainer.checkpoint import Checkpointer
from trainer.checkpoint import Config as Settings
from trainer.monitoring.costs import Config as Costs
from trainer.monitoring.costs import CpuEnergy, Usage
from trainer.studies import inputs, page, results
from trainer.studies.jobs import Jobs, Result, list_jobs
from trainer.studies.size import sizes
from trainer.studies.stages import task
from trainer.studies.study import Study

EXPERIMENT = {
    "data": {"path": "stage:corpus", "sequence_length": 32},
    "model": {"kind": "bert", "vocab_size": 300, "layers": 1, "width": 16, "heads": 2},
    "objective": {"kind": "mlm"},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
    "training": {"steps": 10, "global_batch_size": 4},
}


def content(folder: Path) -> dict[str, Any]:
    """The content of a study of two arms."""
    (folder / "text.jsonl").write_text('{"text": "one"}\n')
    recipe = {
        "source": {"kind": "jsonl", "paths": [str(folder / "text.jsonl")]},
        "tokenizer": {"path": "unused"},
        "output": "unused",
    }
    (folder / "tiny-corpus.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return {
        "question": "Does it help?",
        "figure": "none",
        "scale": "tiny",
        "seeds": 2,
        "stages": {
            "corpus": {"kind": "build", "recipe": "{scale}-corpus.yaml"},
            "pretrain": {"kind": "train", "experiment": "{scale}.yaml"},
            "again": {"kind": "evaluate", "run": "stage:pretrain"},
        },
        "arms": {
            "a": {},
            "b": {"pretrain": {"settings": {"optimizer": {"lr": 0.1}}}},
        },
        "measures": {"loss": {"score": "pretrain/loss", "better": "lower"}},
    }


def read(tree: dict[str, Any], folder: Path, *overrides: str) -> Study:
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return Study.read(str(file), overrides)


def jobs_of(tree: dict[str, Any], folder: Path, *overrides: str) -> Jobs:
    return list_jobs(read(tree, folder, *overrides), folder / "jobs")


def stages(jobs: Jobs) -> list[str]:
    return [job.stage for job in jobs.all]


def test_equal_jobs_are_made_once(tmp_path: Path) -> None:
    jobs = jobs_of(content(tmp_path), tmp_path)
    # One dataset for all; the first repetition of both arms comes before the second.
    assert stages(jobs) == ["corpus", *["pretrain", "again"] * 4]
    assert jobs.of["a", 0, "corpus"] is jobs.of["a", 0, "pretrain"].needs["corpus"]
    assert [job.seed for job in jobs.all if job.stage == "pretrain"] == [0, 0, 1, 1]
    one = jobs_of(content(tmp_path), tmp_path, "stages.pretrain.seed=7")
    assert stages(one) == ["corpus", *["pretrain", "again"] * 2]


def test_a_pilot_has_other_seeds_and_shares_what_has_none(tmp_path: Path) -> None:
    tree = content(tmp_path)
    study, pilot = (jobs_of(tree, tmp_path, f"first_seed={seed}") for seed in (0, 100))
    assert {seed for _, seed, _ in pilot.of} == {100, 101}
    assert [job.seed for job in pilot.all if job.stage == "pretrain"] == [100, 100, 101, 101]
    shared = {job.digest for job in study.all} & {job.digest for job in pilot.all}
    assert shared == {study.of["a", 0, "corpus"].digest}
    # Seeds that overlap are the same jobs, and all have a stage's own seed.
    overlapping = jobs_of(tree, tmp_path, "first_seed=1")
    assert overlapping.of["b", 1, "again"].digest == study.of["b", 1, "again"].digest
    fixed = jobs_of(tree, tmp_path, "first_seed=100", "stages.pretrain.seed=7")
    assert {job.seed for job in fixed.all if job.stage == "pretrain"} == {7}


def test_an_arm_may_differ_in_its_random_numbers_alone(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["arms"]["b"] = {"pretrain": {"seed_offset": 1000}}
    jobs = jobs_of(tree, tmp_path)
    one, other = (jobs.of[arm, 1, "pretrain"] for arm in "ab")
    assert (one.seed, other.seed) == (1, 1001)
    assert one.settings() == other.settings()
    assert one.digest != other.digest
    assert jobs.of["a", 1, "again"].digest != jobs.of["b", 1, "again"].digest
    # The digest follows from the seed: the same run as in a study that begins there.
    tree["arms"]["b"] = {}
    later = jobs_of(tree, tmp_path, "first_seed=1001")
    assert later.of["a", 1001, "pretrain"].digest == other.digest


def test_settings_name_folders_and_digests_do_not(tmp_path: Path) -> None:
    study = read(content(tmp_path), tmp_path)
    jobs = list_jobs(study, tmp_path / "jobs")
    pretrain = jobs.of["b", 1, "pretrain"]
    dataset = pretrain.needs["corpus"].folder / "dataset"
    assert pretrain.settings()["data"]["path"] == str(dataset)
    assert pretrain.settings()["optimizer"]["lr"] == 0.1
    assert jobs.of["b", 1, "again"].settings()["run"] == str(pretrain.folder / "run")
    moved = list_jobs(study, tmp_path / "elsewhere")
    assert [job.digest for job in moved.all] == [job.digest for job in jobs.all]


def test_changed_files_and_settings_make_new_jobs(tmp_path: Path) -> None:
    tree = content(tmp_path)
    first = jobs_of(tree, tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "another"}\n')
    rewritten = jobs_of(tree, tmp_path)
    assert not {job.digest for job in first.all} & {job.digest for job in rewritten.all}
    first = rewritten
    tree["arms"]["b"]["pretrain"]["settings"]["optimizer"]["lr"] = 0.2
    second = jobs_of(tree, tmp_path)
    assert first.of["a", 0, "pretrain"].digest == second.of["a", 0, "pretrain"].digest
    assert first.of["b", 0, "pretrain"].digest != second.of["b", 0, "pretrain"].digest


def test_names_and_published_scores_make_no_new_jobs(tmp_path: Path) -> None:
    """A dataset is the same one wherever its recipe would put it; so is a task's run."""
    tree = content(tmp_path)
    file = tmp_path / "task.yaml"
    tree["stages"]["topic"] = {"kind": "task", "task": str(file), "start": "stage:pretrain"}
    source = {"kind": "classification", "labels": ["a", "b"]}
    source["paths"] = [str(tmp_path / "text.jsonl")]
    digests = []
    recipe = tmp_path / "tiny-corpus.yaml"
    unnamed = recipe.read_text()
    for score, name in enumerate(("here", "elsewhere")):
        recipe.write_text(unnamed.replace("unused", name))
        file.write_text(yaml.safe_dump({"source": source, "published": {"accuracy": score}}))
        digests.append([job.digest for job in jobs_of(tree, tmp_path).all])
    assert digests[0] == digests[1]


def test_jobs_depend_on_all_that_they_read(tmp_path: Path) -> None:
    """Also on further held-out rows, an own tokenizer, and a run or a dataset of no stage."""
    tree = content(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    further = tmp_path / "further.jsonl"
    task_file = {
        "source": {
            "kind": "classification",
            "labels": ["a", "b"],
            "paths": [str(tmp_path / "rows.jsonl")],
        },
        "also": {"further": {"heldout": [str(further)]}},
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task_file))
    folders = {name: tmp_path / name for name in ("tokenizer", "data", "run")}
    for folder in folders.values():
        folder.mkdir()
    tree["stages"] = {
        "corpus": {
            **tree["stages"]["corpus"],
            "settings": {"tokenizer": {"path": str(folders["tokenizer"])}},
        },
        "pretrain": {
            **tree["stages"]["pretrain"],
            "settings": {"data": {"path": str(folders["data"])}},
        },
        "again": {"kind": "evaluate", "run": str(folders["run"])},
        "topic": {"kind": "task", "task": str(tmp_path / "task.yaml"), "start": "stage:pretrain"},
    }

    def digests() -> dict[str, str]:
        for cached in (inputs._files, inputs._identity):
            cached.cache_clear()  # as in another process
        jobs = jobs_of(tree, tmp_path)
        return {stage: jobs.of["a", 0, stage].digest for stage in tree["stages"]}

    files = {
        "corpus": folders["tokenizer"] / "tokenizer.json",
        "pretrain": folders["data"] / "manifest.json",
        "topic": further,
    }
    for file in files.values():
        file.write_text("{}\n")
    sizes_of_bert = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=300, intermediate_size=16, **sizes_of_bert))
    model.save_pretrained(folders["run"])
    before = digests()
    for stage in ("corpus", "topic", "pretrain", "again"):
        if stage == "again":
            model.cls.predictions.bias.data += 1
            model.save_pretrained(folders["run"])
        else:
            files[stage].write_text("changed\n")
        after = digests()
        assert before[stage] != after[stage], stage
        before = after


def test_a_task_depends_on_a_teacher_and_on_vectors_of_no_stage(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "vectors.json").write_text("{}")
    model = BertForMaskedLM(BertConfig(vocab_size=300, num_hidden_layers=1, hidden_size=24))
    model.save_pretrained(tmp_path / "teacher")
    source = {"kind": "classification", "labels": ["a", "b"], "paths": [str(tmp_path / "*.jsonl")]}
    config = task.Config(task="unread.yaml", start="stage:pretrain")
    rows = config.inputs({"task": {"source": source}})
    settings = {
        "source": source,
        "objective": {"teacher": str(tmp_path / "teacher")},
        "experiment": {"init_embeddings": str(tmp_path / "vectors")},
    }
    read = config.inputs({"task": settings})
    assert [name for name, *_ in read[len(rows) :]] == ["vectors.json", str(tmp_path / "teacher")]


def test_a_tokenizer_that_is_half_saved_is_trained_again(tmp_path: Path) -> None:
    job = jobs_of(content(tmp_path), tmp_path).of["a", 0, "corpus"]
    folder = tmp_path / "job" / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    train, build = job.config.commands(folder.parent, 0, job.settings())
    assert (train[1], train[-1], build[1]) == ("tokenizer", "--force", "build")
    (folder / "tokenizer_config.json").write_text("{}")
    assert job.config.commands(folder.parent, 0, job.settings()) == [build]


def test_a_copy_of_the_data_makes_no_new_jobs(tmp_path: Path) -> None:
    tree = content(tmp_path)
    first = jobs_of(tree, tmp_path)
    os.utime(tmp_path / "text.jsonl", (1, 1))
    again = jobs_of(tree, tmp_path)
    assert [job.digest for job in again.all] == [job.digest for job in first.all]


def test_hashes_of_large_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inputs, "_LARGE", 0)
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    source = {"kind": "jsonl", "paths": [str(file)]}

    def stamps() -> list[inputs.Stamp]:
        inputs._sha256.cache_clear()  # as in another process
        return inputs.stamps_of({"source": source})

    expected = [["rows.jsonl", hashlib.sha256(b"{}").hexdigest()]]
    assert stamps() == expected
    (kept,) = (tmp_path / "cache" / "digests").iterdir()
    kept.write_text("of the cache")
    assert stamps() == [["rows.jsonl", "of the cache"]]
    file.write_text("[]")
    os.utime(file, (1, 1))
    assert stamps() == [["rows.jsonl", hashlib.sha256(b"[]").hexdigest()]]


def test_an_arm_may_leave_out_a_stage(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["arms"]["b"]["again"] = None
    jobs = jobs_of(tree, tmp_path)
    assert ("a", 0, "again") in jobs.of
    assert ("b", 0, "again") not in jobs.of


def test_a_scale_may_change_settings_and_overrides_have_the_last_word(tmp_path: Path) -> None:
    tree = content(tmp_path) | {"scales": {"large": {"seeds": 5, "baseline": "b"}}}
    config = read(tree, tmp_path).config
    assert (config.seeds, config.baseline) == (2, None)
    config = read(tree, tmp_path, "scale=large", "seeds=3").config
    assert (config.seeds, config.baseline) == (3, "b")


def test_a_scale_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scales\.tiny must be a section"):
        read(content(tmp_path) | {"scales": {"tiny": None}}, tmp_path)


def test_a_gain_is_the_difference_of_two_stages_of_an_arm(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["measures"]["gain"] = {"score": "again/loss", "minus": "pretrain/loss", "better": "lower"}
    study = read(tree, tmp_path)
    jobs = list_jobs(study, tmp_path / "jobs")
    for job in jobs.all:
        start = job.needs.get("pretrain")  # of `again`, which loses 1 + seed in the arm b
        loss = 5 + job.seed
        if start is not None and start.resolved["optimizer"]["lr"] == 0.1:
            loss += 1 + job.seed
        job.folder.mkdir(parents=True, exist_ok=True)
        Result({"loss": loss}, Usage()).save(job.folder)
    found = results.collect(study, jobs)
    assert [row.values for row in found.of("gain")] == [[0, 0], [1, 2]]
    (_, line) = page.lines(found)
    assert line[0] == "b"
    assert line[3].startswith("+1.500 [\N{MINUS SIGN}4.853")


def test_the_size_of_a_run_is_that_of_its_newest_checkpoint(tmp_path: Path) -> None:
    assert sizes(tmp_path) == {}
    checkpointer = Checkpointer(tmp_path / "checkpoints", Settings(), rank=0, world_size=1)
    for step, size in ((1, 10), (2, 30)):
        tensors = {
            "model/a": torch.zeros(size, 2),
            "model/b": torch.zeros(3),
            "optimizer/exp_avg/a": torch.zeros(size, 2),
        }
        checkpointer.save(step, tensors, {})
        checkpointer.wait()
    found = sizes(tmp_path)
    assert found["trained_parameters"] == 63
    assert found["checkpoint_bytes"] > 4 * (60 + 3 + 60)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seeds=0", "seeds is 0. Use at least 1"),
        ("first_seed=-1", "first_seed is -1. Use at least 0"),
        ("stages.pretrain.seed_offset=-1", "seed_offset is -1. Use at least 0"),
        ("arms.b.pretrain.seed_offset=1", "so repetitions would share runs. Use at least 2"),
        ("stages.corpus.seed_offset=1", "this stage uses no random numbers"),
        ("arms.b.pretrain={seed: 1, seed_offset: 1}", "seed and seed_offset exclude each other"),
        ("calibrate=2", "and primary, the comparison, is not set"),
        ("baseline=c", "baseline is 'c'. Use one of a, b"),
        ("arms.b={other: {}}", "arms.b is 'other'. Use one of corpus, pretrain, again"),
        ("measures.loss.score=pretrain", "Write the stage and the score, as pretrain/loss"),
        ("measures.loss.minus=pretrain", "measures.loss.minus is 'pretrain'. Write the stage"),
        ("measures.loss.score=fit/loss", "measures.loss.score is 'fit'. Use one of corpus"),
        ("relations=[{measure: loss, against: size}]", "relations.0.against is 'size'"),
        ("curves=[{stage: fit}]", "curves.0.stage is 'fit'"),
        (
            "primary={measure: loss, arms: [a], pilot_deviation: 1, detects: 1}",
            "primary.arms names 1 arms. Name two",
        ),
        ("comparisons=[{measure: loss, arms: [b, b]}]", "comparisons.0.arms names one arm twice"),
        ("comparisons=[{measure: fit, arms: [a, b]}]", "comparisons.0.measure is 'fit'"),
        ("comparisons=[{measure: loss, arms: [a, c]}]", "comparisons.0.arms is 'c'. Use one of a"),
        ("stages.again.run=stage:later", "uses stage:later, and there is no such stage"),
        ("stages.pretrain.settings.seed=1", "a stage's own `seed` holds for all jobs"),
        ("stages.pretrain.settings.data.path=stage:again", "which comes later or is left out"),
        ("stages.pretrain.settings.optimizer.rate=1", "optimizer.rate is not a known key"),
        ("stages.pretrain.kind=fit", "no module for 'fit'"),
        (
            "stages.pretrain.settings.data={path: null, "
            "sources: [{path: stage:corpus}, {path: stage:corpus}]}",
            "arm 'a', stage pretrain: data: two sources have the same name in dataset, dataset",
        ),
        ("scale=huge", "huge-corpus.yaml"),
        (
            "stages.own={kind: vectors, dataset: stage:corpus, method: glove, options: {seed: 3}}",
            "options.seed is chosen by the study",
        ),
        (
            "stages.own={kind: vectors, dataset: stage:corpus, method: glove, options: {rat: 3}}",
            "options.rat is not a known key; did you mean 'rate'",
        ),
        ("stages.corpus.settings.source.paths=[missing.jsonl]", "missing.jsonl"),
    ],
)
def test_refusals_come_before_any_work(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=message.replace("(", r"\(")) as caught:
        jobs_of(content(tmp_path), tmp_path, override)
    assert type(caught.value) is ConfigError
    assert not (tmp_path / "jobs").exists()


class Awaited(CpuEnergy):
    """Counts its readings, to wait for one."""

    readings = 0

    def has_read(self) -> None:
        before = self.readings
        until(lambda: self.readings >= before + 2)  # the first may have begun before this call

    def joules(self) -> float | None:
        joules = super().joules()
        self.readings += 1
        return joules


def test_energy_of_a_long_job_is_more_than_a_counter_holds(tmp_path: Path) -> None:
    counter = tmp_path / "intel-rapl:0"
    counter.mkdir()
    (counter / "max_energy_range_uj").write_text("9999999\n")
    (counter / "energy_uj").write_text("0\n")
    threads = threading.active_count()
    with Awaited(tmp_path, every=0.001) as energy:
        for joules in (6, 12, 18, 24):
            (counter / "energy_uj").write_text(f"{joules % 10}000000\n")
            energy.has_read()
    assert threading.active_count() == threads
    assert energy.joules() == pytest.approx(24.0)


def test_energy_is_measured_where_the_cpu_counts_it(tmp_path: Path) -> None:
    counter = tmp_path / "intel-rapl:0"
    counter.mkdir()
    (counter / "max_energy_range_uj").write_text("9999999\n")
    (counter / "energy_uj").write_text("9000000\n")
    energy = CpuEnergy(tmp_path)
    (counter / "energy_uj").write_text("1000000\n")  # after 9,999,999 it starts again from 0
    assert energy.joules() == pytest.approx(2.0)
    assert CpuEnergy(tmp_path / "nothing").joules() is None
    costs = Costs(watts_per_core=10, overhead=2, grams_per_kwh=500)
    assert costs.kwh(Usage(cpu_seconds=3600)) == pytest.approx(0.02)
    measured = Usage(cpu_seconds=3600, device_joules=3.6e6, cpu_joules=1.8e6)
    assert costs.kwh(measured) == pytest.approx(3.0)
    assert costs.grams(measured) == pytest.approx(1500)


def test_a_second_run_in_each_repetition_has_other_seeds(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["stages"]["second"] = {**tree["stages"]["pretrain"], "seed_offset": 100}
    jobs = jobs_of(tree, tmp_path)
    assert [jobs.of["a", seed, "pretrain"].seed for seed in (0, 1)] == [0, 1]
    assert [jobs.of["a", seed, "second"].seed for seed in (0, 1)] == [100, 101]


def test_options_of_an_evaluation_change_its_command_and_its_digest_only_if_set(
    tmp_path: Path,
) -> None:
    tree = content(tmp_path)
    plain = jobs_of(tree, tmp_path).of["a", 0, "again"]
    assert plain.resolved == {"run": "stage:pretrain", "settings": {}}
    tree["stages"]["second"] = {**tree["stages"]["pretrain"], "seed_offset": 100}
    tree["stages"]["again"] |= {
        "encoder": "stage:second",
        "ensemble": ["stage:second"],
        "keep_predictions": True,
    }
    # Stages that are named come before.
    tree["stages"]["again"] = tree["stages"].pop("again")
    job = jobs_of(tree, tmp_path).of["a", 0, "again"]
    assert job.digest != plain.digest
    second = str(job.needs["second"].folder / "run")
    (command,) = job.config.commands(tmp_path, job.seed, job.settings())
    options = dict(itertools.pairwise(command))
    assert options["--encoder"] == options["--ensemble"] == second
    assert options["--predictions"] == str(tmp_path / "predictions.jsonl")


def test_an_evaluation_of_texts_generates_them(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["stages"]["again"] |= {"metrics": ["accuracy"], "generate": {"max_new_tokens": 4}}
    job = jobs_of(tree, tmp_path).of["a", 0, "again"]
    (command,) = job.config.commands(tmp_path, job.seed, job.settings())
    assert list(command[-4:]) == ["--generate", "max_new_tokens=4", "--metrics", "accuracy"]
    assert job.resolved["metrics"] == ["accuracy"]
    for wrong, named in (
        ({"metrics": []}, "generate needs metrics"),
        ({"keep_predictions": True}, "Leave encoder and keep_predictions out"),
    ):
        changed = content(tmp_path)
        changed["stages"]["again"] = {**tree["stages"]["again"], **wrong}
        with pytest.raises(ConfigError, match=named):
            jobs_of(changed, tmp_path)


def test_a_distance_is_measured_between_two_stages(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["stages"]["second"] = {**tree["stages"]["pretrain"], "seed_offset": 100}
    tree["stages"]["moved"] = {
        "kind": "distance",
        "start": "stage:pretrain",
        "run": "stage:second",
    }
    job = jobs_of(tree, tmp_path).of["a", 0, "moved"]
    (command,) = job.config.commands(tmp_path, job.seed, job.settings())
    folders = [str(job.needs[name].folder / "run") for name in ("pretrain", "second")]
    assert list(command[:4]) == ["checkpoint", "distance", *folders]
    (tmp_path / "scores.json").write_text('{"all": 0.5}')
    assert job.config.scores(tmp_path) == {"all": 0.5}


def test_probes_ask_a_run_and_their_content_names_the_job(tmp_path: Path) -> None:
    """Not the file's name: a copy in another folder is the same job."""
    tree = content(tmp_path)
    digests = []
    for name, text in (("a", "1"), ("b", "1"), ("b", "2")):
        file = tmp_path / name / "probes.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        tree["stages"]["asked"] = {"kind": "probe", "run": "stage:pretrain", "probes": str(file)}
        job = jobs_of(tree, tmp_path).of["a", 0, "asked"]
        digests.append(job.digest)
    assert digests[0] == digests[1] != digests[2]
    (command,) = job.config.commands(tmp_path, job.seed, job.settings())
    assert list(command[:4]) == [
        "fill",
        str(job.needs["pretrain"].folder / "run"),
        "--probes",
        str(file),
    ]
    (tmp_path / "scores.json").write_text('{"accuracy.adjacent": 0.5}')
    assert job.config.scores(tmp_path) == {"accuracy.adjacent": 0.5}


def test_vectors_are_trained_on_a_dataset(tmp_path: Path) -> None:
    tree = content(tmp_path)
    tree["stages"]["own"] = {
        "kind": "vectors",
        "dataset": "stage:corpus",
        "method": "glove",
        "options": {"dimensions": 8, "x_max": 10},
    }
    job = jobs_of(tree, tmp_path).of["a", 1, "own"]
    (command,) = job.config.commands(tmp_path, job.seed, job.settings())
    dataset = str(job.needs["corpus"].folder / "dataset")
    assert list(command[:4]) == ["vectors", dataset, "--method", "glove"]
    args = build_parser().parse_args(list(command))
    assert (args.dimensions, args.x_max, args.units, args.seed) == (8, 10, "tokens", 1)
    assert args.output == str(tmp_path / "vectors")


def test_a_task_that_failed_under_an_older_version_is_finished(tmp_path: Path) -> None:
    """The failed run's folder has another digest, and stays."""
    suite = tmp_path / "suite"
    for digest in ("0000aaaa", "ffffbbbb"):
        (suite / "runs" / "conll" / f"lr-1e-3-seed-0-{digest}").mkdir(parents=True)
    result = {"task": "conll", "run": "lr-1e-3-seed-0", "settings": {}, "seed": 0}
    result |= {
        "digest": "ffffbbbb00000000",
        "scores": {},
        "steps": 1,
        "seconds": 1.0,
        "learned": True,
    }
    (suite / "results.jsonl").write_text(json.dumps(result) + "\n")
    task.Config(task="conll.yaml", start="stage:pretrain").finish(tmp_path)
    assert (tmp_path / "model").resolve().name.endswith("-ffffbbbb")
