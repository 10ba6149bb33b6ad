"""The page of the documentation at the end of an error about a setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestep.config.pages import PAGES, page_about
from tests.integration.commands import Samestep

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize("setting", PAGES)
def test_every_page_exists_and_is_about_its_section(setting: str) -> None:
    page = DOCS / PAGES[setting]
    assert page.is_file()
    word = setting.rpartition(".")[2]
    assert re.search(rf"\b{word}\b", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("message", "page"),
    [
        ("training.steps is 0", "docs/training.md"),
        ("training.best.metric is x; set training.steps", "docs/finetuning.md"),
        ("training.bestial is no setting", "docs/training.md"),
        ("optimizer.lr must be above 0; set schedule.decay", "docs/optimizers.md"),
        ("phases.1.lr is -1", "docs/training.md"),
        ("the model, bert. Use another", None),
        ("cannot read /data/training.yaml", None),
        ("runs/data.old is no run", None),
        ("--devices must be at least 1", None),
    ],
)
def test_the_first_setting_of_a_message_decides(message: str, page: str | None) -> None:
    assert page_about(message) == page


def test_errors_of_settings_end_with_the_page(samestep: Samestep, experiment_file: str) -> None:
    result = samestep("config", experiment_file, "optimizer.lr=much")
    assert result.code == 2
    assert result.message == "optimizer.lr must be a number, not 'much' (see docs/optimizers.md)"
    result = samestep("config", experiment_file, "objective.kind=mml")
    assert result.code == 2
    assert "did you mean 'mlm'?" in result.message
    assert result.message.endswith("(see docs/objectives.md)")
    assert "(see docs/" not in samestep("config", "absent.yaml").message


@pytest.mark.long
def test_the_page_is_said_once_by_several_processes(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    command = ["train", experiment_file, "--processes", 2, f"output={tmp_path / 'run'}"]
    result = samestep(*command, "data.lanes=100000")
    assert result.code == 2
    assert result.err.count("(see docs/training.md)") == result.err.count("error: ")
