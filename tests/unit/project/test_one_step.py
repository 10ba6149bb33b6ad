"""The files of one step, as the README and the page about the architecture list them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

from tests.integration.commands import Samestep

ROOT = Path(__file__).parents[3]


def listed(page: str) -> list[tuple[str, str]]:
    """The (file, function) pairs of the list, in its order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (section,) = re.findall(r"^## One step\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(
        r"^\d+\. `([\w/]+\.py)`: (.*?)(?=^\d+\. |^\n)", section, re.MULTILINE | re.DOTALL
    )
    return [
        (file, function) for file, said in entries for function in re.findall(r"`([\w.]+)`", said)
    ]


def test_both_pages_have_the_same_list():
    assert listed("README.md") == listed("docs/architecture.md")


def test_a_step_calls_these_functions_in_this_order(
    samestep: Samestep, experiment_file: str, tmp_path: Path
):
    """An abstract method stands for those of its folder."""
    steps = [
        ((ROOT / file).parent, function.rpartition(".")[2])
        for file, function in listed("README.md")
    ]
    names = {name for _, name in steps}
    assert len(steps) >= 10
    called: list[tuple[Path, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in names:
            call = Path(frame.f_code.co_filename).parent, frame.f_code.co_name
            if call in steps and call not in called:
                called.append(call)

    one = (
        "strategy=single",
        "training.steps=1",
        "schedule.warmup_steps=0",
        "training.faults.action=skip",
    )
    sys.setprofile(note)
    try:
        result = samestep(
            "train", experiment_file, f"output={tmp_path}/run", "data.threads=0", *one
        )
    finally:
        sys.setprofile(None)
    assert result.code == 0, result.err
    assert called == steps


def test_the_functions_are_in_these_files():
    for file, function in listed("README.md"):
        kind, _, name = function.rpartition(".")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(
            rf"^class {kind}\b.*^    def {name}\(" if kind else rf"^def {name}\(", text, re.M | re.S
        ), name
