"""Recipes by name: which file a name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import read_tree, recipes
from trainer.errors import ConfigError


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
