"""The mixtures that tests train on."""

from __future__ import annotations

import json
from pathlib import Path


def sources(parts: dict[str, Path], **weights: float) -> str:
    """The override with the weights of these datasets."""
    return "data.sources=" + json.dumps(
        [{"path": str(parts[name]), "weight": w} for name, w in weights.items()]
    )
