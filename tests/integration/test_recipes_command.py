"""`samestep recipes`: the list, one recipe, and a copy that stays valid in another folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestep.config import read_tree, recipes
from samestep.errors import DataError
from tests.integration.commands import Samestep
from trainer.inference.candidates import read_probes
from trainer.inspect.recipes import copy as copy_of
from trainer.inspect.recipes import file_of
from trainer.studies.study import Study


def test_the_list_names_each_recipe_with_a_summary(samestep: Samestep) -> None:
    lines = samestep("recipes").out.splitlines()
    folders = [line for line in lines if line.startswith("recipes")]
    assert len(folders) == len(set(folders))
    listed = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert list(listed) == recipes.names()
    assert listed["recipes/pretrain/roberta_base"].startswith("RoBERTa")


def test_show_prints_the_file(samestep: Samestep) -> None:
    file = recipes.FOLDER / "pretrain" / "bert_base.yaml"
    for name in ("recipes/pretrain/bert_base", "pretrain/bert_base", "configs/pretrain/bert_base"):
        assert samestep("recipes", "show", name).out == file.read_text()


def test_commands_of_the_documentation_work_where_there_is_no_checkout(
    samestep: Samestep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "layers: 12" in samestep("config", "configs/pretrain/bert_base.yaml").out
    own = tmp_path / "configs" / "pretrain" / "bert_base.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("base: recipes/pretrain/bert_base\nmodel: {layers: 3}\n")
    assert "layers: 3" in samestep("config", "configs/pretrain/bert_base.yaml").out


def test_copies_have_the_same_settings(samestep: Samestep, tmp_path: Path) -> None:
    """A second copy does not replace the first, which may have been changed."""
    for name in ("recipes/pretrain/bert_large_lamb", "recipes/tasks/glue/rte"):
        copy = Path(samestep("recipes", "copy", name, tmp_path / "mine").out.strip())
        assert copy.parent == tmp_path / "mine"
        assert read_tree(copy) == read_tree(name)
        copy.write_text("mine")
        refused = samestep("recipes", "copy", name, tmp_path / "mine")
        assert (refused.code, copy.read_text()) == (2, "mine")
        assert f"{copy} exists already" in refused.message


@pytest.mark.long
def test_all_copies_are_read_in_another_folder(tmp_path: Path) -> None:
    with_bases = [name for name in recipes.names() if has_base(file_of(name))]
    assert len(with_bases) > 200
    for number, name in enumerate(with_bases):
        copy = copy_of(name, tmp_path / str(number))
        assert read_tree(copy) == read_tree(name), name


@pytest.mark.long
def test_copies_of_studies_find_their_files(tmp_path: Path) -> None:
    names = [each for each in recipes.names() if re.fullmatch(r"recipes/studies/\w+", each)]
    assert len(names) > 30
    for name in names:
        study, copied = Study.read(name), Study.read(str(copy_of(name, tmp_path)))
        for arm in study.config.arms:
            assert copied.stages_of(arm) == study.stages_of(arm), name


def test_probes_that_come_along_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for prefix in ("recipes", "configs"):
        assert len(read_probes(f"{prefix}/studies/probes/cloze.jsonl")) == 160
    with pytest.raises(DataError, match=r"cannot read the probes in probes/cloze\.jsonl"):
        read_probes("probes/cloze.jsonl")


def has_base(file: Path) -> bool:
    return any(line.startswith("base:") for line in file.read_text().splitlines())


def test_what_is_no_recipe_is_refused(samestep: Samestep, tmp_path: Path) -> None:
    typo = samestep("recipes", "show", "recipes/pretrain/bert_bse")
    assert "Did you mean recipes/pretrain/bert_base?" in typo.message
    outside = samestep("recipes", "show", "recipes/../pyproject")
    assert "no recipe" in outside.message
    file = samestep("recipes", "copy", "recipes/pretrain/bert_base", tmp_path / "mine.yaml")
    assert "Name the folder" in file.message
    assert not list(tmp_path.iterdir())
