"""`probes`: small tasks on which the hidden states are scored during a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from samestep.cli import main
from tests.integration import tasks
from tests.integration.commands import Samestep, losses


@pytest.fixture(scope="module")
def probed(dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 240 rows to train on and 60 held-out ones."""
    folder = tmp_path_factory.mktemp("probed")
    build = tasks.write_build("classification", folder, dataset_folder / "tokenizer")
    assert main(["data", "build", str(build)]) == 0
    return folder / "data-classification"


@pytest.fixture(scope="module")
def noisy(probed: Path, dataset_folder: Path) -> Path:
    """The same texts, a third of them with the other label.

    Rows lie near the border then, so a score shows a change of the features.
    """
    folder = probed.parent
    for file in ("classification.jsonl", "classification-dev.jsonl"):
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        swapped = np.random.default_rng(len(rows)).random(len(rows)) < 1 / 3
        for row, swap in zip(rows, swapped, strict=True):
            row["label"] = tasks.LABELS[swap ^ tasks.LABELS.index(row["label"])]
        tasks.write(folder / f"noisy-{file}", rows)
    source = {
        "kind": "classification",
        "paths": [str(folder / "noisy-classification.jsonl")],
        "heldout": [str(folder / "noisy-classification-dev.jsonl")],
        **tasks.SOURCES["classification"],
    }
    build = folder / "noisy.yaml"
    tree = {"source": source, "tokenizer": {"path": str(dataset_folder / "tokenizer")}}
    build.write_text(yaml.safe_dump({**tree, "output": str(folder / "noisy"), "workers": 1}))
    assert main(["data", "build", str(build)]) == 0
    return folder / "noisy"


def setting(path: Path, **others: object) -> str:
    probe = {"path": str(path), "every": 4, "rows": 200, "sequence_length": 24, **others}
    return f"probes={json.dumps({'files': probe})}"


def scores(run: Path) -> dict[int, float]:
    rows = tasks.rows_of(run)
    return {
        row["step"]: row["probe/files/accuracy"] for row in rows if "probe/files/accuracy" in row
    }


@pytest.mark.long
def test_a_run_takes_the_same_steps_and_finds_what_the_features_tell(
    experiment_file: str, probed: Path, tmp_path: Path, samestep: Samestep
) -> None:
    train = ("train", experiment_file, "training.evaluate_every=6", "strategy=single")
    assert samestep(*train, f"output={tmp_path / 'without'}").code == 0
    assert samestep(*train, f"output={tmp_path / 'with'}", setting(probed)).code == 0
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    found = scores(tmp_path / "with")
    assert list(found) == [4, 8, 12]
    assert min(found.values()) > 0.8  # one word tells the class


@pytest.mark.long
def test_other_ranks_other_strategies_and_a_stop_change_no_score(
    experiment_file: str, noisy: Path, tmp_path: Path, samestep: Samestep
) -> None:
    train = ("train", experiment_file, "optimizer.lr=0.1")  # so that each step changes the features
    often = (setting(noisy, rows=60, layer=1, every=1), f"output={tmp_path / 'one'}")
    assert samestep(*train, *often, "strategy=single").code == 0
    two = (*train, setting(noisy, rows=60, layer=1), f"output={tmp_path / 'two'}")
    two = (*two, "--processes", 2)  # FSDP
    assert samestep(*two, "training.steps=6", "schedule.decay=constant").code == 0
    one_found, two_found = scores(tmp_path / "one"), scores(tmp_path / "two")
    assert list(two_found) == [4, 6]
    assert two_found[4] == one_found[4]
    assert len(set(one_found.values())) > 1  # they follow the weights
    # Continued: the score of the last step stands, and others follow.
    assert samestep(*two, "schedule.decay=constant").code == 0
    assert list(scores(tmp_path / "two")) == [4, 6, 8, 12]


@pytest.mark.parametrize("pool", ["mean", "first"])
def test_the_encoder_of_an_encoder_decoder_is_probed(
    t5_experiment: str, pool: str, tmp_path: Path, samestep: Samestep
) -> None:
    tokenizer = Path(t5_experiment).parent / "dataset" / "tokenizer"
    build = tasks.write_build("classification", tmp_path, tokenizer)
    assert samestep("data", "build", str(build)).code == 0
    chosen = setting(tmp_path / "data-classification", pool=pool, layer=1)
    steps = ("training.steps=4", "strategy=single", f"output={tmp_path / 'run'}")
    assert samestep("train", t5_experiment, chosen, *steps).code == 0
    assert list(scores(tmp_path / "run")) == [4]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"layer": 3}, "the layers 0 to 2"),
        ({"layer": -4}, "the layers 0 to 2"),
        ({"sequence_length": 33}, "32 positions"),
        ({"every": 0}, "every is 0"),
    ],
)
def test_settings_that_do_not_fit_end_the_run_before_it_starts(
    experiment_file: str,
    probed: Path,
    others: dict[str, int],
    message: str,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    found = samestep("train", experiment_file, setting(probed, **others), f"output={tmp_path}")
    assert found.code == 2
    assert message in found.message


def test_other_rows_and_another_tokenizer_are_rejected(
    experiment_file: str,
    dataset_folder: Path,
    t5_experiment: str,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    train = ("train", experiment_file, f"output={tmp_path / 'run'}")
    assert "classification" in samestep(*train, setting(dataset_folder)).message
    tokenizer = Path(t5_experiment).parent / "dataset" / "tokenizer"
    build = tasks.write_build("classification", tmp_path, tokenizer)
    assert samestep("data", "build", str(build)).code == 0
    other = samestep(*train, setting(tmp_path / "data-classification"))
    assert "another tokenizer" in other.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
