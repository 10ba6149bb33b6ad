"""How a folder of `sentence-transformers` embeds a text, for `samestep features`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.config import Tree
from samestep.errors import CheckpointError, ConfigError
from samestep.stored_json import damage_of, read_json
from samestep.untrusted import inside

logger = logging.getLogger(__name__)

_MODULES = ["Transformer", "Pooling", "Normalize"]
_POOLS: Mapping[str, Literal["mean", "first", "max"]] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "first",
    "cls_token": "first",
    "max": "max",
    "max_tokens": "max",
}
_FIX = "With --pool, features are hidden states of the encoder alone"


@dataclass(frozen=True)
class SentenceEmbedding:
    """The steps from a text to its vector.

    Attributes:
        pool: how the last layer's vectors of its tokens are combined.
        normalize: whether the result has length 1.
        length: most tokens of a text with its special tokens; None: as many as the model reads.
        prompt: is put before each text.
    """

    pool: Literal["mean", "first", "max"]
    normalize: bool
    length: int | None
    prompt: str

    def __str__(self) -> str:
        parts = [f"pooled by {self.pool}", "normalized" if self.normalize else "not normalized"]
        if self.length is not None:
            parts.append(f"at most {self.length} tokens")
        if self.prompt:
            parts.append(f"after {self.prompt!r}")
        return ", ".join(parts)


def read(folder: Path) -> SentenceEmbedding | None:
    """Reads the settings of a folder; None if it is not of `sentence-transformers`.

    Raises:
        CheckpointError: a file is damaged or missing.
        ConfigError: it has a module or setting that samestep does not compute.
    """
    file = inside(folder, "modules.json")
    if not file.is_file():
        return None
    with damage_of(file, CheckpointError, "Copy the folder again."):
        modules = read_json(file, list[dict[str, object]])
    for number, module in enumerate(modules):
        kind = str(module.get("type"))
        name = kind.rpartition(".")[2]
        is_known = kind.startswith("sentence_transformers.") and [name] == _MODULES[number:][:1]
        if not is_known or (number == 0 and module.get("path") != ""):
            raise ConfigError(
                f"{file} has the module {kind} at place {number}, which samestep does not "
                f"compute: it has Transformer, Pooling, Normalize in this order. {_FIX}"
            )
    if len(modules) < 2:
        raise ConfigError(f"{file} has no module Pooling. {_FIX}")
    length, prompt = _length(folder), _prompt(folder)
    pooling = inside(folder, f"{modules[1].get('path')}/config.json")
    if not pooling.is_file():
        raise CheckpointError(f"{pooling} is missing. Copy the folder again")
    pool = _pool(pooling, prompt)
    return SentenceEmbedding(pool, len(modules) > 2, length, prompt)


def _pool(file: Path, prompt: str) -> Literal["mean", "first", "max"]:
    content = _content(file)
    # Version 5 and later name the mode; earlier ones have a flag for each.
    modes = content.get("pooling_mode") or [
        name.removeprefix("pooling_mode_")
        for name, is_set in content.items()
        if name.startswith("pooling_mode_") and is_set is True
    ]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLS:
        raise ConfigError(
            f"{file} pools by {modes}, which samestep does not compute: it has mean, cls or max. "
            f"{_FIX}"
        )
    if prompt and content.get("include_prompt") is False:
        raise ConfigError(
            f"{file} has include_prompt false, which leaves the prompt {prompt!r} out of the "
            f"pooling. samestep does not compute that. {_FIX}"
        )
    return _POOLS[modes[0]]


def _length(folder: Path) -> int | None:
    file = inside(folder, "sentence_bert_config.json")
    content = _content(file)
    if content.get("do_lower_case"):
        raise ConfigError(
            f"{file} has do_lower_case true, which is the tokenizer's decision in samestep. Set it "
            "to false if the tokenizer converts to lower case"
        )
    length = content.get("max_seq_length")
    if length is None:  # as newer versions save it
        length = _content(inside(folder, "tokenizer_config.json")).get("model_max_length")
    if length is not None and (not isinstance(length, int | float) or length < 1):
        raise CheckpointError(f"{file} has max_seq_length {length!r}. Write a number of tokens")
    return None if length is None else int(length)


def _prompt(folder: Path) -> str:
    file = inside(folder, "config_sentence_transformers.json")
    content = _content(file)
    prompts, name = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(prompts, dict) or not (name is None or isinstance(prompts.get(name), str)):
        raise CheckpointError(
            f"{file} has the prompts {prompts!r} and default_prompt_name {name!r}. Name one of them"
        )
    if others := [other for other, text in prompts.items() if text and other != name]:
        logger.info(
            "the prompts %s in %s are not used; write one at the beginning of each text that "
            "needs it",
            ", ".join(others),
            file,
        )
    return "" if name is None else str(prompts[name])


def _content(file: Path) -> Tree:
    if not file.is_file():
        return {}
    with damage_of(file, CheckpointError, "Copy the folder again."):
        return read_json(file, Tree)
