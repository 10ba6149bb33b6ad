"""Parameter counts and checkpoint sizes of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint.integrity import committed_steps, rank_files, step_folder


def sizes(run: Path) -> Mapping[str, float]:
    """Returns the sizes of the newest checkpoint of a run; nothing if it has kept none.

    `trained_parameters` are those that the optimizer changes, as only they are saved;
    `checkpoint_bytes` are of the weights and the optimizer's state.
    """
    from trainer.checkpoint.layout import read_files

    root = run / "checkpoints"
    steps = committed_steps(root) if root.exists() else []
    if not steps:
        return {}
    files = rank_files(step_folder(root, steps[-1]))
    shapes = {
        piece.name: piece.shape for pieces in read_files(files).pieces.values() for piece in pieces
    }
    trained = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model/"))
    written = sum(Path(str(file)).stat().st_size for file in files)
    return {"trained_parameters": float(trained), "checkpoint_bytes": float(written)}
