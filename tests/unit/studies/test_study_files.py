"""The studies in configs/studies: their jobs can be listed, and what they state is so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import pytest

from samestep.config import Kinds, Tree, decode, load, recipes, to_tree
from samestep.config.tree import merge
from samestep.tasks import TASKS
from trainer.models.families import lstm
from trainer.studies.jobs import Job, list_jobs
from trainer.studies.stages import task
from trainer.studies.statistics import detectable
from trainer.studies.study import Study
from trainer.training.experiment import Experiment

FILES = sorted((recipes.FOLDER / "studies").glob("*.yaml"))
SCALES = sorted(path.name for path in (recipes.FOLDER / "studies" / "scales").iterdir())
# Files that are not free to copy; jobs are listed by their names and sizes.
OWN_FILES = ("train.jsonl", "dev.jsonl", "train.conll", "valid.conll")
_MODEL = Annotated[Any, Kinds("trainer.models.families")]
PAGES = Path(__file__).parents[3] / "docs" / "studies"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_arm_has_its_jobs(
    file: Path, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conll2003").mkdir()
    for name in OWN_FILES:
        Path("conll2003", name).touch()
    if scale == "nano" != Study.read(str(file)).config.scale:
        pytest.skip("too small for any study but of the method itself")
    study = Study.read(str(file), [f"scale={scale}"])
    jobs = list_jobs(study, tmp_path)
    assert {arm for arm, *_ in jobs.of} == set(study.config.arms)
    # Arms whose jobs are the same would compare a thing with itself.
    of_arms = [frozenset(job.digest for job in jobs.of_arm(arm)) for arm in study.config.arms]
    assert len(set(of_arms)) == len(of_arms)
    for job in jobs.all:
        if isinstance(job.config, task.Config):
            check_settings_of_the_model(pretrained(job), job.resolved["task"])


def pretrained(job: Job) -> Tree:
    """The settings of the model that a task starts from, perhaps by way of other tasks."""
    start = next(need for need in job.needs.values() if need.config.product != "vectors")
    return pretrained(start) if isinstance(start.config, task.Config) else start.resolved["model"]


def check_settings_of_the_model(before: Tree, file: Tree) -> None:
    """A task's settings of a model are those that the kind of its start has, or their own kind."""
    changes, source = file["experiment"].get("model") or {}, file["source"]
    config = decode(_MODEL, before, "model")
    if source["kind"] in TASKS:
        default = {"regression": ["score"], "question_answering": []}
        labels = source.get("labels") or default.get(source["kind"], ["a", "b"])
        direction = {"causal": changes["causal"]} if "causal" in changes else {}
        config = dataclasses.replace(config, **direction)
        config = config.for_needs(frozenset({TASKS[source["kind"]].head}), tuple(labels))
    tree = merge({"model": {"kind": before["kind"], **to_tree(config)}}, {"model": changes})
    decode(_MODEL, {"vocab_size": config.vocab_size, **tree["model"]}, "model")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_states_what_it_can_detect_and_what_it_costs(file: Path) -> None:
    config = Study.read(str(file)).config
    assert config.seeds >= 3
    assert config.cpu_hours > 0
    assert config.primary is not None
    found = detectable(config.primary.pilot_deviation, config.seeds)
    assert config.primary.detects == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_has_a_page_that_says_whether_it_has_been_run(file: Path) -> None:
    page = (PAGES / f"{file.stem}.md").read_text(encoding="utf-8")
    _, results, _ = page.replace("<!-- /results -->", "<!-- results -->").split("<!-- results -->")
    assert ("| arm |" in results) != ("Not run yet." in results)
    assert f"({file.stem}.md)" in (PAGES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("scale", ["tiny", "mini"])
def test_the_recurrent_model_of_a_scale_reads_the_batches_of_its_encoder(scale: str) -> None:
    """So that a study may compare them by model and objective alone."""
    folder = recipes.FOLDER / "studies" / "scales" / scale
    settings = ["data.path=dataset", "output=run"]
    ours, encoder = (
        load(Experiment, folder / f"{name}.yaml", settings) for name in ("lstm", "encoder")
    )
    assert isinstance(ours.model, lstm.Config)
    assert (ours.data, ours.training, ours.schedule) == (
        encoder.data,
        encoder.training,
        encoder.schedule,
    )
    assert ours.model.vocab_size == encoder.model.vocab_size


def test_the_table_of_pilots_says_what_a_study_detects() -> None:
    page = (PAGES.parent / "studies.md").read_text(encoding="utf-8")
    seeds, factors = (
        [float(number) for number in line.split("|")[2:-1]]
        for line in page.splitlines()
        if line.startswith(("| seeds | 2", "| deviations |"))
    )
    assert len(seeds) == len(factors) == 8
    for count, factor in zip(seeds, factors, strict=True):
        assert factor == pytest.approx(detectable(1.0, int(count)), abs=0.005)
