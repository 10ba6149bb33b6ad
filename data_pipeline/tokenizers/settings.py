"""Settings in a tokenizer's folder: tokenizer_config.json, as samestep reads and writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.config import Tree
from samestep.errors import DataError
from samestep.stored_json import damage_of, read_json

if TYPE_CHECKING:
    import tokenizers

MODEL = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPIECE = "spiece.model"  # name of the file in transformers
_NAMES = "special_tokens_map.json"
SAVED_FILES = (MODEL, CONFIG, _NAMES, SPIECE)
"""Files of a tokenizer that samestep has saved; only one of the first and the last is there."""

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order of transformers


def read_settings(folder: Path) -> Tree:
    """Reads the settings of a folder: an empty tree if it has none.

    Where both files name a special token, transformers takes special_tokens_map.json, unless
    tokenizer_config.json lists the added tokens.
    """
    settings, names = read_file(folder / CONFIG), read_file(folder / _NAMES)
    return {**names, **settings} if "added_tokens_decoder" in settings else {**settings, **names}


def stated(backend: tokenizers.Tokenizer) -> Tree:
    """Returns the settings that tokenizer.json has, by their names in tokenizer_config.json."""
    normalizer, splitter = map(_state, (backend.normalizer, backend.pre_tokenizer))
    found: Tree = {}
    if normalizer.get("type") == "BertNormalizer":
        found["do_lower_case"] = normalizer["lowercase"]
        found["strip_accents"] = normalizer["strip_accents"]
        found["tokenize_chinese_chars"] = normalizer["handle_chinese_chars"]
    if splitter.get("type") == "ByteLevel":
        found["add_prefix_space"] = splitter["add_prefix_space"]
    return found


def _state(part: Any) -> Tree:
    return {} if part is None else json.loads(part.__getstate__())


def parts(part: Any) -> dict[str, Tree]:
    """Returns the parts of a normalizer or pre-tokenizer by their type."""
    state = _state(part)
    members = state.get("normalizers") or state.get("pretokenizers") or [state]
    return {member["type"]: member for member in members if member}


def role_name(settings: Tree, role: str) -> str | None:
    """Returns the special token that the settings name for a role such as "unk"."""
    value = settings.get(f"{role}_token")
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) and name else None


def by_name(settings: Tree) -> Tree:
    """Returns settings for a folder whose tokenizer.json has the added tokens.

    `transformers` reads their properties there, but only if the settings list none.
    """
    plain = {name: value for name, value in settings.items() if name != "added_tokens_decoder"}
    for role in ROLES:
        if name := role_name(settings, role):
            plain[f"{role}_token"] = name
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(plain.get(name), list):
            plain[name] = [
                token["content"] if isinstance(token, dict) else token for token in plain[name]
            ]
    return plain


def read_file(path: Path) -> Tree:
    """Reads a JSON object: an empty tree if there is no such file."""
    if not path.is_file():
        return {}
    with damage_of(path, DataError, "Copy or download it again."):
        return read_json(path, dict[str, Any])
