"""Datasets that tests write without a build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.format.manifest import Manifest, ShardInfo
from data_pipeline.tokenizers.tokenizer import Tokenizer


def save_manifest(
    folder: Path,
    file: str,
    documents: int,
    splits: dict[str, tuple[ShardInfo, ...]],
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes the manifest of shards of 16-bit tokens, beside their tokenizer.

    Args:
        file: name of the file that the documents came from.
    """
    tokenizer = Tokenizer.load(folder / "tokenizer")
    Manifest(
        format=1,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocabulary.size,
        dtype="uint16",
        source={},
        files=(file,),
        documents_in=documents,
        documents_rejected={},
        splits=splits,
        settings=dict(settings or {}),
    ).save(folder)
