"""A tiny tokenizer and folders of random models, for trained models at work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.huggingface import save_folder

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


def random_parameters(config: Any) -> dict[str, Tensor]:
    """Larger than at initialization, so that the tokens matter."""
    model, generator = config.build(), torch.Generator().manual_seed(0)
    return {
        name: 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


@pytest.fixture
def save(tmp_path: Path, tokenizer_folder: Path) -> Callable[[Any], Path]:
    """Writes a random model with the tokenizer as a folder of transformers."""

    def save(config: Any) -> Path:
        tensors = config.export_tensors(random_parameters(config))
        save_folder(tmp_path / "model", config.to_huggingface(), tensors, tokenizer_folder)
        return tmp_path / "model"

    return save
