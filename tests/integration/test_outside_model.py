"""The example of docs/new_architecture.md, in a package of its own, trains the same under every
strategy.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conformance.worker import losses
from tests.conftest import VOCAB_SIZE
from tests.processes import run_ranks
from trainer.strategies.world import World

PAGE = Path(__file__).parents[2] / "docs" / "new_architecture.md"
MODEL = f"{{kind: outside.narrow, vocab_size: {VOCAB_SIZE}, embedding_width: 16, max_positions: 32, layers: 2,"  # noqa: E501
MODEL += " width: 32, heads: 2, ffn_width: 64}"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package `outside`."""
    (source,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    folder = tmp_path / "packages"
    (folder / "outside").mkdir(parents=True)
    (folder / "outside" / "narrow.py").write_text(source, encoding="utf-8")
    return folder


def test_outside_model(package: Path, experiment_file: str, tmp_path: Path) -> None:
    settings = [
        f"model={MODEL}",
        "training.steps=3",
        "schedule.warmup_steps=1",
        "optimizer.lr=1e-2",
    ]
    first, second = ([*settings, f"output={tmp_path / name}"] for name in ("first", "second"))
    second += ["strategy=fsdp", "training.activation_checkpointing=true", "checkpoint.every=2"]
    ((sharded,), (same,)) = run_ranks(2, train, package, experiment_file, [(second, None)])
    resumed = [*second, "strategy=single"]
    ((plain, rest),) = run_ranks(1, train, package, experiment_file, [(first, None), (resumed, 2)])
    assert len(set(plain)) == 3
    assert sharded == same == pytest.approx(plain, rel=1e-5)
    assert rest == pytest.approx(plain[2:], rel=1e-5)


def train(package: Path, file: str, runs: list[tuple[list[str], int | None]]) -> list[list[float]]:
    """The losses of runs with a model of another package.

    Their settings, and the step to resume from.
    """
    sys.path.insert(0, str(package))
    world = World.start(60)
    world.connect("gloo")
    found = [losses(file, overrides, world, resume=step) for overrides, step in runs]
    world.close()
    return found
