"""Recipes by name: which file a name stands for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestep.config import read_tree, recipes
from samestep.errors import ConfigError


@pytest.mark.long
def test_every_file_has_a_name_that_is_read() -> None:
    names = recipes.names()
    assert {"recipes/pretrain/bert_base", "recipes/tasks/glue/sst2"} <= set(names)
    assert len(names) == len(list(recipes.FOLDER.rglob("*.yaml")))
    for name in names:
        file = recipes.locate(name)
        assert (
            file
            == recipes.locate(f"{name}.yaml")
            == recipes.FOLDER.joinpath(*Path(f"{name}.yaml").parts[1:])
        )
        assert recipes.name_of(file) == name
        assert read_tree(name) == read_tree(file)


def test_tasks_name_the_commit_of_their_rows() -> None:
    """A run of next year reads the same rows. No commit of the others is known to us."""
    found = set()
    for name in recipes.names():
        if name.startswith("recipes/tasks/"):
            tree = read_tree(name)
            sources = [tree.get("source"), *(tree.get("also") or {}).values()]
            for source in filter(None, sources):
                dataset = {**tree["source"], **source}.get("dataset")
                if dataset and "path" in dataset:
                    found.add((dataset["path"], dataset.get("revision")))
    unpinned = {path for path, commit in found if commit is None}
    assert unpinned == {"SetFit/TREC-QC", "allenai/swag", "fancyzhx/yelp_polarity"}
    pinned = {path: commit for path, commit in found if commit is not None}
    assert len(pinned) == len(found) - 3 == 13  # one commit of each dataset
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in pinned.values())


def test_a_local_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides the recipe of its own name only, and may be based on a recipe."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes" / "pretrain"
    folder.mkdir(parents=True)
    (folder / "bert_base.yaml").write_text("{base: recipes/pretrain/bert_large, output: mine}")
    tree = read_tree("recipes/pretrain/bert_base")
    large = read_tree("recipes/pretrain/bert_large")
    assert (tree["output"], tree["model"]) == ("mine", large["model"])
    assert large["output"] != "mine"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bert_base", "recipes/pretrain/bert_base?"),
        ("configs/pretrain/bert_bas.yaml", "recipes/pretrain/bert_base?"),
        ("recipes/pretrain/roberta", "recipes/pretrain/roberta_base?"),
        ("recipes/zzz", "`samestep recipes` lists the recipes"),
        ("recipes/../pyproject", "`samestep recipes` lists the recipes"),
    ],
)
def test_the_recipe_that_was_meant(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read_tree(name)
    assert hint in str(refusal.value)


def test_other_names_get_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read_tree("experiments/protein_run_7.yaml")
    assert "samestep recipes" not in str(refusal.value)
