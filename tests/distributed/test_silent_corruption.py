"""A bit that flips in one process's weights is noticed, with the name of the process, before
anything is saved.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.distributed.test_hangs import train_to_the_end

FLIP = "objective={kind: tests.distributed.mishaps, mishap: bit flips}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "strategy", "every", "line"),
    [
        (
            3,
            "ddp",
            100,
            "silent corruption on rank 1 ({node}): after the update of step 4 the bits of model/",
        ),
        (
            2,
            "ddp",
            2,
            "silent corruption on rank 0 ({node}) and rank 1 ({node}), one of them: after the "
            "update",
        ),
        (2, "fsdp", 1, "since the update of step 2 the bits of model/"),
    ],
)
def test_a_flipped_bit(
    ranks: int, strategy: str, every: int, line: str, experiment_file: str, tmp_path: Path
):
    """Rank 1 flips it before the forward pass of step 3."""
    settings = (
        f"strategy={strategy}",
        f"training.verify_state_every={every}",
        "checkpoint.every=4",
    )
    said = train_to_the_end(ranks, experiment_file, tmp_path, FLIP, *settings)
    assert line.format(node=platform.node()) in said
    assert "rank 1 (" in said
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
