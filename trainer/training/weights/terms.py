"""The terms of use of trained weights: their license, languages and base models.

A Hugging Face folder states them in the front matter of its README.md, which may be a stranger's.
Known keys alone are read, as text of known forms; anything else is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

import yaml

from samestep.storage.hub import name_and_revision
from samestep.untrusted import read_regular
from trainer.checkpoint.collective import on_first_rank
from trainer.checkpoint.meta import read_meta
from trainer.training.weights.loading import Weights
from trainer.training.weights.places import is_step

Terms: TypeAlias = Mapping[str, str | list[str]]
"""Values by key of the Hub's front matter, such as `license: apache-2.0`; empty if unknown."""

_MODEL = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_FORMS = {
    "license": re.compile(r"[\w.+-]{1,64}", re.ASCII),
    "license_name": re.compile(r"[\w.+ -]{1,128}", re.ASCII),
    # A link to a file beside the README would lead nowhere in another folder.
    "license_link": re.compile(r"https://[\w.~:/?#@!$&'()*+,;=%-]{1,512}", re.ASCII),
    "language": re.compile(r"[A-Za-z0-9-]{1,32}"),
    "base_model": _MODEL,
}
_KEY = re.compile(rf"({'|'.join(_FORMS)})\s*:")
_MOST_BYTES = 4 * 2**20  # of a README
_MOST_PARSED = 2**12  # characters of the known entries
_MOST_VALUES = 512  # of one entry: languages of a multilingual model


def shared_terms(weights: Weights, rank: int, world_size: int) -> Terms:
    """Returns `terms_of` on all ranks; the first reads them. Collective."""
    return on_first_rank(partial(terms_of, weights), rank, world_size)


def terms_of(weights: Weights) -> Terms:
    """Returns the terms of trained weights: stated in their folder, or recorded by their run."""
    if is_step(weights.folder):
        meta = read_meta(weights.folder)
        # An average has no start of its own.
        return _checked((meta.get("average") or meta.get("start") or {}).get("terms"))
    assert isinstance(weights.folder, Path)
    terms = _read(weights.folder)
    if weights.base is not None:  # an adapter
        terms = {**terms_of(weights.base), **terms}
    # A folder of the Hub is itself what an export was made from.
    if weights.hub is not None:
        terms = {**terms, "base_model": name_and_revision(weights.hub)[0]}
    return terms


def _read(folder: Path) -> Terms:
    """Reads the front matter of a folder's README.md; empty if there is none, or it is damaged."""
    try:
        text = read_regular(folder / "README.md", _MOST_BYTES).decode("utf-8-sig")
        # All scalars are text, so that the language `no` is not read as false.
        entries = yaml.load(_known_entries(text), Loader=yaml.BaseLoader)
    except (OSError, ValueError, OverflowError, yaml.YAMLError, RecursionError):
        return {}
    return _checked(entries)


def _checked(entries: object) -> Terms:
    """The entries with known keys and values of known forms."""
    if not isinstance(entries, dict):
        return {}
    terms: dict[str, str | list[str]] = {}
    for key, form in _FORMS.items():
        value = entries.get(key)
        values = value if isinstance(value, list) else [value]
        known = [each for each in values if isinstance(each, str) and form.fullmatch(each)]
        # Some languages of a list alone would say something else than the list.
        if known and len(known) == len(values) <= _MOST_VALUES:
            terms[key] = known if isinstance(value, list) else known[0]
    return terms


def _known_entries(text: str) -> str:
    """The lines of the known keys in the front matter.

    The others are not parsed: scores on many tasks may be thousands of lines, which take seconds.
    """
    lines = iter(text.splitlines())
    if next(lines, "").rstrip() != "---":
        return ""
    kept: list[str] = []
    is_known = False
    for line in lines:
        if line.rstrip() == "---":
            found = "\n".join(kept)
            return found if len(found) <= _MOST_PARSED else ""
        # Lines below a key are indented, or items of its list.
        if line and line[0] not in " -#":
            is_known = _KEY.match(line) is not None
        if is_known:
            kept.append(line)
    return ""
