"""YAML files, their `base:` files and `key=value` overrides, merged into one tree of values."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import yaml

from samestep.addresses import ELSEWHERE, credential_in, has_userinfo
from samestep.errors import ConfigError

T = TypeVar("T")

_SOURCES = ("source.", "decontaminate.source.")  # of a dataset's recipe
_MOST_VALUES = 100_000  # in a file, counting those behind each alias
_MOST_LEVELS = 100
# Settings in which a folder named "~" would be made, or looked for.
_FOLDERS = re.compile(
    r"output|init_from|init_embeddings|phases|data\.sources(\.\d+\.path)?|checkpoint\.folder|"
    r"(phases\.\d+\.)?objective\.(teacher|guide\.path)|"
    r"(tokenizer|data|probes\.[^.]+|training\.retrieval)\.path"
)

# Settings of a section that exclude each other: the one given last drops those of the other.
_EXCLUSIVE = {"data": {"path": ("sources", "weights", "proportional"), "sources": ("path",)}}

Tree: TypeAlias = dict[str, Any]
"""A section of YAML or JSON: plain values by key, of types that nobody has checked yet."""


class _Loader(yaml.SafeLoader):
    """Reads 2026-05-01 as text: no setting is a date, but an output may have one as its name."""

    _levels = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # PyYAML takes a time for each token that grows with the depth.
        if self._levels == _MOST_LEVELS:
            raise yaml.YAMLError(f"it is nested in more than {_MOST_LEVELS} levels")
        self._levels += 1
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_TEXT, *_NOT_TEXT = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")
)
# PyYAML's own errors, and Python's where a value with a tag such as !!int is converted.
_ERRORS = (yaml.YAMLError, RecursionError, AttributeError, LookupError, TypeError, ValueError)


def _parse(text: str, where: str) -> object:
    try:
        # PyYAML quotes a line of a text in its errors, but none of a file.
        loader = _Loader(text if credential_in(text) is None else io.StringIO(text))
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {_MOST_VALUES} values")
        _check_keys(node, set())
        return loader.construct_document(node)
    except _ERRORS as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def parse_file(content: bytes, path: Path, wanted_by: str = "") -> Tree:
    """Returns what a file says on its own.

    Args:
        wanted_by: continues the path in messages.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read the configuration {path}{wanted_by}: it is not UTF-8 text"
        ) from error
    tree = _parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, not a {type(tree).__name__}")
    return tree


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return []


def _size(node: yaml.Node, sizes: dict[yaml.Node, float]) -> float:
    """Number of values in a node, counting those behind each alias: ten of ten of ten are 1,000.

    Args:
        sizes: of the nodes that were visited; receives new ones.
    """
    if node not in sizes:
        sizes[node] = math.inf  # until it is known: a node that contains itself has no end
        sizes[node] = 1 + sum(_size(child, sizes) for child in _children(node))
    return sizes[node]


def _check_keys(node: yaml.Node, visited: set[yaml.Node]) -> None:
    """Rejects a key given twice, of which PyYAML would silently take the last one.

    A section pasted twice would otherwise change a run without a word. Merge keys (<<) are not
    resolved yet, whose values a section may override.

    Keys are names, so others become the text that the file has: a label 0 or no needs no quotes.
    """
    visited.add(node)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, _ in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a list or a section stands where a key must be"
            elif key.value in seen:
                problem = f"key {key.value!r} is given twice"
            if problem:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
            if key.tag in _NOT_TEXT:
                key.tag = _TEXT
    for child in _children(node):
        if child not in visited:
            _check_keys(child, visited)


def merge(base: Tree, changes: Tree) -> Tree:
    """Merges `changes` into a copy of `base`, section by section.

    A section of another `kind` replaces the whole section of the base: the settings of one
    optimizer mean nothing to another. `optimizer: lamb` is short for `optimizer: {kind: lamb}`, on
    either side. `data.path` replaces the `data.sources` of the base, and they replace it.
    """
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        if isinstance(below, list) and isinstance(value, dict):  # phases.1.lr=1e-3
            value = _merge_items(key, below, value)
        # Both short forms become sections before the two are merged.
        if isinstance(below, dict) and "kind" in below and isinstance(value, str):
            value = {"kind": value}
        if isinstance(below, str) and isinstance(value, dict):
            below = {"kind": below}
        if (
            isinstance(below, dict)
            and isinstance(value, dict)
            and value.get("kind") in (None, below.get("kind"))
        ):
            for name, others in _EXCLUSIVE.get(key, {}).items():
                if value.get(name):
                    below = {each: below[each] for each in below if each not in others}
            value = merge(below, value)
        merged[key] = value
    return merged


def _merge_items(name: str, items: list[object], changes: Tree) -> list[object]:
    """Merges changes into the items of a list, named by their numbers from 0."""
    # A list becomes a section with keys "0", "1", ..., so `merge` handles both.
    numbered = {str(number): item for number, item in enumerate(items)}
    changed = {str(key): value for key, value in changes.items()}
    for key in changed:
        if key not in numbered:
            raise ConfigError(
                f"{name}.{key} does not exist: {name} has {len(items)} items, numbered from 0"
            )
    return list(merge(numbered, changed).values())


def _locate(name: str | Path, folder: Path | None = None) -> Path:
    """The path of a file, or of the recipe with this name; see `recipes.locate`."""
    path = ((folder or Path.cwd()) / name).resolve()
    if path.is_file():
        return path
    from samestep.config import recipes

    return recipes.locate(name, folder)


def _open_file(
    path: Path, name: str | Path, chain: tuple[Path, ...]
) -> tuple[Tree, list[tuple[Path, str]]]:
    """Reads a file without its bases.

    Args:
        path: the file that `name` stands for.
        chain: the files that have led to it.

    Returns:
        The tree of the file alone, and the file and the name of each base.
    """
    if path in chain:
        raise ConfigError(f"{path} is its own base: {' -> '.join(str(p) for p in (*chain, path))}")
    wanted_by = f" (named as base by {chain[-1]})" if chain else ""
    try:
        content = path.read_bytes()
    except OSError as error:
        message = f"cannot read the configuration {path}{wanted_by}: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            from samestep.config import recipes

            hint = recipes.suggestion(name)
            message += f".{hint}" if hint else ""
        raise ConfigError(message) from error
    tree = parse_file(content, path, wanted_by)
    # `base` belongs to the file, not to the experiment.
    bases = tree.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"base in {path} must be the name of a file, or a list of names, not {bases!r}"
        )
    return tree, [(_locate(base, path.parent), base) for base in bases]


def _read_file(path: Path, name: str | Path, chain: tuple[Path, ...]) -> Tree:
    """Reads a file merged into its bases; arguments as of `_open_file`."""
    tree, bases = _open_file(path, name, chain)
    # Later bases override earlier ones, and this file overrides all of them.
    merged: Tree = {}
    for base in bases:
        merged = merge(merged, _read_file(*base, (*chain, path)))
    return merge(merged, tree)


def files_of(path: str | Path) -> list[Tree]:
    """Returns what each file says on its own: all bases of a file, then the file itself."""

    def collect(path: Path, name: str | Path, chain: tuple[Path, ...]) -> list[Tree]:
        tree, bases = _open_file(path, name, chain)
        return [each for base in bases for each in collect(*base, (*chain, path))] + [tree]

    return collect(_locate(path), path, ())


def differences(before: Tree, after: Tree, path: str = "") -> dict[str, tuple[object, object]]:
    """Returns the values that differ, (before, after) by dotted key; None for a missing one."""
    found: dict[str, tuple[object, object]] = {}
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{path}{key}.")
        elif old != new:
            found[f"{path}{key}"] = (old, new)
    return found


def of_kinds(changes: Mapping[str, T]) -> dict[str, T]:
    """Leaves out the other settings of each section whose kind differs: all of them differ.

    Example: of strategy.kind and strategy.replicas only strategy.kind is left.
    """
    sections = tuple(
        f"{key.removesuffix('kind')}" for key in changes if key.rpartition(".")[2] == "kind"
    )
    return {
        key: change
        for key, change in changes.items()
        if key.rpartition(".")[2] == "kind" or not key.startswith(sections)
    }


def check_addresses(tree: Tree, path: str = "") -> None:
    """Rejects addresses with credentials: settings are stored in many files, and shown.

    Folders that begin with ~ are rejected, too: they may be of another machine's user.

    Signed addresses are allowed as sources of a dataset, which stores them without the signature.

    Raises:
        ConfigError: naming the setting, but not the credential.
    """
    for key, value in tree.items():
        place = f"{path}{key}"
        if isinstance(value, dict):
            check_addresses(value, f"{place}.")
            continue
        for text in _texts(value):
            if text.startswith("~") and _FOLDERS.fullmatch(place):
                raise ConfigError(
                    f"{place} has {text!r}, and only a shell knows the home folder as ~. Write the "
                    "whole path."
                )
            is_source = place.startswith(_SOURCES)
            credential = credential_in(text)
            if credential and not (is_source and not has_userinfo(text)):
                raise ConfigError(f"{place}: the address has {credential} in it. {ELSEWHERE}")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.items():
            yield from _texts(list(each))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def parse_override(text: str) -> Tree:
    """Turns `a.b=value` (the value is YAML) into the tree {a: {b: value}}."""
    key, equals, value = text.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{text!r} is not an override; write key=value, for example optimizer.lr=1e-3"
        )
    tree: Tree = {parts.pop(): _parse(value, f"the value of {key}")}
    # From the inside out: a.b=1 is {b: 1}, then {a: {b: 1}}.
    while parts:
        tree = {parts.pop(): tree}
    return tree


def read_tree(path: str | Path, overrides: Iterable[str] = ()) -> Tree:
    """Reads a configuration file with its bases, and merges the overrides into it, in order.

    Args:
        path: a file, or the name of a recipe.
    """
    tree = _read_file(_locate(path), path, ())
    check_addresses(tree)
    return merge_overrides(tree, overrides)


def merge_overrides(tree: Tree, overrides: Iterable[str]) -> Tree:
    """Merges overrides into a tree, in order.

    Raises:
        ConfigError: a later kind, as strategy.kind=fsdp or strategy=fsdp, drops a key that an
            earlier override has set by itself, as strategy.replicas=2.
    """
    texts = list(overrides)
    for text in texts:
        changes = parse_override(text)
        check_addresses(changes)
        tree = merge(tree, changes)
    for earlier, later in combinations(texts, 2):
        dropped, value = earlier.partition("=")[0], later.partition("=")[2]
        path = dropped.split(".")
        # A section that is written as a whole, strategy={kind: fsdp}, is meant to replace another.
        kind = None if value.lstrip().startswith("{") else _kind_above(parse_override(later), path)
        if kind is not None and not _has(tree, path):
            raise ConfigError(
                f"{kind} comes after {dropped} and drops it, as a section of another kind begins "
                f"anew. Put {kind.partition('=')[0]} before {dropped}."
            )
        section, _, setting = dropped.partition(".")
        for name, others in _EXCLUSIVE.get(section, {}).items():
            is_chosen = later.partition("=")[0] == f"{section}.{name}" and value.strip() != "[]"
            is_lost = setting.partition(".")[0] in others and not _has(tree, path)
            if is_chosen and is_lost and earlier.partition("=")[2].strip() not in ("[]", "null"):
                raise ConfigError(f"{later} comes after {dropped} and drops it. Give one of them.")
    return tree


def _kind_above(changes: Tree, path: Sequence[str]) -> str | None:
    """The kind that changes choose for a section on a path, as strategy.kind=fsdp; None if none."""
    node: object = changes
    for depth, key in enumerate(path[:-1], start=1):
        node = node.get(key) if isinstance(node, dict) else None
        section = ".".join(path[:depth])
        if isinstance(node, str):
            return f"{section}={node}"
        if isinstance(node, dict) and "kind" in node:
            return f"{section}.kind={node['kind']}"
    return None


def _has(tree: Tree, path: Sequence[str]) -> bool:
    node: object = tree
    for key in path:
        if isinstance(node, list):
            node = {str(number): item for number, item in enumerate(node)}
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return True
