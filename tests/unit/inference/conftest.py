"""A tiny tokenizer and folders of random models, for trained models at work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.outputs import random_parameters
from trainer.checkpoint.huggingface import save_folder
from trainer.models.codecs import codec_of

WORDS = ("the", "a", "dog", "cat", "runs", "sleeps", "here", "use", "mask", "[", "]", "<", ">", ".")


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A WordPiece tokenizer of 19 tokens."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    vocabulary = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder


@pytest.fixture
def save(tmp_path: Path, tokenizer_folder: Path) -> Callable[[Any], Path]:
    """Writes a random model with the tokenizer as a folder of transformers."""

    def save(config: Any) -> Path:
        tensors = codec_of(config).export_tensors(random_parameters(config.build()))
        save_folder(
            tmp_path / "model", codec_of(config).to_huggingface(), tensors, tokenizer_folder
        )
        return tmp_path / "model"

    return save
