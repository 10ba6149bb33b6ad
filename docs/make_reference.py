"""Writes docs/reference.md, every setting there is, from the docstrings.

Python docs/make_reference.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from data_pipeline.building.config import Config as BuildConfig
from launch.records import KINDS
from samestep.config import Kinds
from samestep.config.decode import kinds_of
from trainer.studies import study as study_file
from trainer.training.experiment import Experiment

HEADER = """# Settings

Written by `docs/make_reference.py` from the docstrings of the `Config` classes; edit those, not this page.
[configuration.md](configuration.md) says how files, overrides and kinds work.
"""  # noqa: E501
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


def render() -> str:
    """The whole page."""
    experiment = _section(Experiment, "", "An experiment: `samestep train FILE`", {})
    dataset = _section(BuildConfig, "", "A dataset: `samestep data build FILE`", {})
    study = _section(study_file.Config, "", "A study: `samestep study FILE`", {})
    return "\n".join([HEADER, *experiment, *dataset, *study, *_stages(), *_clusters()])


def _stages() -> Iterator[str]:
    for kind in study_file.STAGES.available():
        schema = study_file.STAGES.schema(kind, "stages")
        yield from _section(schema, "stages.NAME", f"`stages.NAME.kind: {kind}`", {})


def _clusters() -> Iterator[str]:
    yield "## A cluster: `samestep launch CLUSTER FILE`\n\n`cluster.key=value` sets one of these.\n"
    for kind in KINDS.available():
        yield from _section(KINDS.schema(kind, "cluster"), "cluster", f"`kind: {kind}`", {})


def _section(
    schema: type[Any],
    path: str,
    title: str,
    listed: dict[object, str],
    above: tuple[Kinds, ...] = (),
) -> Iterator[str]:
    """The table of a dataclass, then those of the sections inside it.

    Of kinds that it is itself one of, there are none.

    Args:
        listed: title of each dataclass, and path of each package of kinds, that the page has.
    """
    if listed.get((title, schema)) is not None:
        return
    listed[title, schema] = title
    hints, texts, fields = (
        get_type_hints(schema, include_extras=True),
        _attributes(schema),
        dataclasses.fields(schema),
    )
    summary = inspect.cleandoc(schema.__doc__ or "").partition("\n\n")[0]
    yield f"{'###' if path else '##'} {title}\n\n{summary}\n"
    if fields:
        yield "| key | value | default | what it is |\n|---|---|---|---|"
        for field in fields:
            type_, default = _type(hints[field.name]), _default(field)
            yield f"| `{field.name}` | {type_} | {default} | {texts[field.name]} |"
        yield ""
    for field in fields:
        hint, inner = hints[field.name], f"{path}.{field.name}" if path else field.name
        if kinds := kinds_of(hint):
            if kinds in above:
                continue
            first = listed.setdefault(kinds, inner)
            if first != inner:
                yield f"### `{inner}`\n\nThe kinds and settings of `{first}`.\n"
                continue
            for kind in kinds.available():
                title = f"`{inner}: {{kind: {kind}}}`"
                yield from _section(
                    kinds.schema(kind, inner), inner, title, listed, (*above, kinds)
                )
        elif section := next(filter(dataclasses.is_dataclass, (hint, *get_args(hint))), None):
            yield from _section(cast(type[Any], section), inner, f"`{inner}`", listed, above)


def _attributes(schema: type[Any]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute."""
    listed = "\n".join(inspect.cleandoc(base.__doc__ or "") for base in reversed(schema.__mro__))
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: re.sub(r"\bNone\b", "null", " ".join(text.split())) for name, text in found}


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        inner = _type(arguments[0])
        nested = inner.startswith("list")
        return f"list of {inner.replace('list', 'lists', 1) if nested else inner + 's'}"
    return "a kind" if origin is Annotated else _NAMES.get(hint, "section")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        module = type(field.default_factory()).__module__
        return f"`{module.rpartition('.')[2]}`" if "Kinds" in str(field.type) else "its defaults"
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{field.default if isinstance(field.default, str) else json.dumps(field.default)}`"


if __name__ == "__main__":
    Path(__file__).with_name("reference.md").write_text(render(), encoding="utf-8")
