"""What `samestep data build` reads: recipes of datasets, and the files of tasks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from data_pipeline.building.recipe import OF_RUNS, TaskData, load_recipe
from data_pipeline.format.manifest import Manifest
from data_pipeline.reading.dataset import Dataset
from samestep.errors import ConfigError
from tests.integration import tasks
from tests.integration.commands import Samestep
from trainer.studies.finetune.runs import list_runs
from trainer.studies.finetune.task import Config, Task

FOLDER = Path(__file__).parents[4] / "configs" / "tasks"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.yaml"))
GIVEN = ("tokenizer.path=tokenizer", "output=datasets/rows")


def test_settings_of_runs_are_all_that_a_task_has_besides_its_rows() -> None:
    names = {field.name for field in dataclasses.fields(Config)} - {
        field.name for field in dataclasses.fields(TaskData)
    }
    assert {*OF_RUNS} == names | {"experiment", "also", "generation"}


@pytest.mark.parametrize("name", FILES)
def test_every_task_is_a_recipe_of_the_rows_that_its_runs_have(name: str) -> None:
    task, recipe = Task.read(FOLDER / name).config, load_recipe(str(FOLDER / name), GIVEN)
    for field in dataclasses.fields(TaskData):
        assert getattr(recipe, field.name) == getattr(task, field.name)
    assert (recipe.tokenizer.path, recipe.output, recipe.limit) == (
        "tokenizer",
        "datasets/rows",
        None,
    )


@pytest.mark.parametrize(
    ("more", "overrides", "message"),
    [
        ("", [], "a.yaml is a task file, .* Add tokenizer.path=FOLDER, .* and output=FOLDER"),
        ("", GIVEN[:1], "is a task file"),
        ("", GIVEN[1:], "is a task file"),
        (
            "heldout_fracton: 0.5",
            GIVEN,
            "heldout_fracton is not a known key; did you mean 'heldout_fraction'",
        ),
        ("", [*GIVEN, "score=f1"], "score is not a known key"),
        (
            "",
            [*GIVEN, "source.field=body", "source.kind=text"],
            "source.kind=text comes after source.field and drops it",
        ),
    ],
)
def test_what_makes_no_dataset_is_refused(
    more: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(f"base: {FOLDER}/glue/cola.yaml\n{more}\n")
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(tmp_path / "a.yaml"), overrides)


def test_a_task_may_hold_what_a_recipe_does(tmp_path: Path) -> None:
    """Given on the command line of `samestep launch`, these settings are written into one file with
    the task's.
    """
    (tmp_path / "a.yaml").write_text(
        f"base: {FOLDER}/text/qqp.yaml\ntokenizer: {{path: t}}\noutput: o\nlimit: "
        "1MB\nheldout_fraction: 0.2\n"
    )
    recipe = load_recipe(str(tmp_path / "a.yaml"), ["workers=1"])
    assert (recipe.limit, recipe.workers, recipe.heldout_fraction, recipe.on_error) == (
        "1MB",
        1,
        0.2,
        "skip",
    )


def test_a_recipe_of_a_dataset_has_its_own_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "source: {kind: text, paths: [a.txt]}\ntokenizer: {path: t}\noutput: o\n"
    )
    assert load_recipe(str(tmp_path / "a.yaml")).heldout_fraction == 0.005


def test_the_dataset_of_a_task_is_the_one_that_its_runs_have(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file = tasks.write_task("tagging", tmp_path)
    tree = yaml.safe_load(file.read_text())
    tree["source"].pop("heldout")  # so that the share of rows that are held out is used
    file.write_text(yaml.safe_dump(tree))
    given = (f"tokenizer.path={dataset_folder}/tokenizer", f"output={tmp_path}/data")
    assert samestep("data", "build", file, *given).code == 0
    (run, *_) = list_runs(
        str(finished_run), [Task.read(file)], tmp_path / "suite", range(1), False, []
    )
    built = Manifest.load(tmp_path / "data")
    assert built.splits["heldout"]
    assert dataclasses.replace(Dataset.open(Path(run.experiment["data"]["path"])).manifest) == built


def test_a_number_of_rows_leaves_the_held_out_ones_and_other_suites_as_they_are(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file = tasks.write_task("classification", tmp_path)
    whole = Task.read(file)
    file.write_text(file.read_text() + "rows: 7\n")
    given = (f"tokenizer.path={dataset_folder}/tokenizer", f"output={tmp_path}/data")
    assert samestep("data", "build", file, *given).code == 0
    built = Manifest.load(tmp_path / "data")
    assert sum(shard.documents for shard in built.splits["train"]) == 7
    folder = tmp_path / "suite"
    few, all_rows = (
        list_runs(str(finished_run), [task], folder, range(1), False, [])[0]
        for task in (Task.read(file), whole)
    )
    assert few.digest != all_rows.digest
    assert few.experiment["training"]["steps"] < all_rows.experiment["training"]["steps"]
    of_few, of_all = (Dataset.open(Path(run.experiment["data"]["path"])) for run in (few, all_rows))
    assert of_few.manifest.splits["heldout"] == of_all.manifest.splits["heldout"]
    tree = yaml.safe_load(file.read_text())
    tree["source"].pop("heldout")
    file.write_text(yaml.safe_dump(tree))
    refused = samestep("data", "build", file, given[0], f"output={tmp_path}/other")
    assert refused.code == 2
    assert "rows is 7, and source.heldout is not set" in refused.message
    assert "Use at least 1" in samestep("data", "build", file, *given, "rows=0").message
