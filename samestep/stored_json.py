"""Stored JSON, messages and other programs' output, checked against a declared type while read.

Whatever was not written by this process may be damaged, or a stranger's. `parse_json` is the only
way in: a value has the declared type, a number fits into 64 bits, and anything else is a
`JsonError` that names the place, which callers turn into the error of their file.

A schema is a dataclass, a TypedDict, a scalar, a `Literal`, a union, `Any`, or a list, tuple or
dict of schemas. Keys that a schema does not know are ignored: a newer version may have written
them. Nothing is converted, but for lists that become tuples.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeAlias, TypeVar, Union

from samestep.errors import SamestepError
from samestep.untrusted import read_regular

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
Check: TypeAlias = Callable[[object], object]
"""Returns the decoded value, or raises a `JsonError`."""

MOST_BYTES = 2**27  # a large tokenizer.json has 2**25
MOST_LINE_BYTES = 2**26
_MOST_LEVELS = 100  # far from Python's own limit, which a later walk over the values could reach
_MOST_SHOWN = 8  # levels in a message
_LEAST, _MOST = -(2**63), 2**64 - 1
_MOST_DIGITS = 40  # of an untyped integer: tokenizers of Hugging Face have a length of 10**30

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 60


class JsonError(ValueError):
    """The content is no JSON, or not of its type; the message is the end of a sentence about it.

    Attributes:
        place: keys and numbers of items that lead to the wrong value.
        reason: what is wrong there, such as "is 'x', not an integer".
    """

    def __init__(self, reason: str, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(reason, place)
        self.reason, self.place = reason, place

    def __str__(self) -> str:
        text = ""
        for key in self.place[:_MOST_SHOWN]:
            if isinstance(key, str) and key.replace("-", "_").isidentifier():
                text += f".{key}" if text else key
            else:
                text += f"[{_shorten.repr(key)}]"
        return f"{text or 'it'} {self.reason}"

    def within(self, key: str | int) -> JsonError:
        """Returns the error as seen from the object or list that has the value as `key`."""
        return JsonError(self.reason, (key, *self.place))


@dataclass(frozen=True)
class Between:
    """Bounds of a number, as in `Annotated[int, Between(1, 100)]`; both are included."""

    low: int
    high: int = 2**63 - 1


Count: TypeAlias = Annotated[int, Between(0)]
"""A number of bytes, steps or tokens."""


@dataclass(frozen=True)
class Matching:
    """A regular expression that a whole text matches, as in `Annotated[str, Matching("[a-z]")]`."""

    pattern: str


Sha256: TypeAlias = Annotated[str, Matching("[0-9a-f]{64}")]
"""The digest of a file, in hexadecimal digits."""

Name: TypeAlias = Annotated[str, Matching(r"[^\x00-\x1f\x7f]{0,255}")]
"""A path that a file system takes: short, and without control characters."""

Seconds: TypeAlias = Annotated[float, Between(0, 2**40)]
"""A time since 1970, or a duration."""


class NonFinite:
    """Marks a number that may be NaN or infinite, as in `Measure`."""


Measure: TypeAlias = Annotated[float, NonFinite]
"""A number that a run measured, such as the loss of a step that diverged."""


class Unpaired:
    """Marks a value whose texts may have half of a surrogate pair, which JSON can spell."""


def parse_json(content: bytes | str, schema: TypeForm[T], limit: int = MOST_BYTES) -> T:
    """Decodes JSON as a declared type.

    Args:
        limit: largest size of the content, which is checked before anything is parsed.

    Raises:
        JsonError: the content is not JSON in UTF-8, a key is there twice, a value has another type
            or is out of range, or the content is too large or too deeply nested.
    """
    # First: parsing takes several times the memory of the text.
    if len(content) > limit:
        raise JsonError(f"has {len(content)} bytes, more than {limit}")
    try:
        # Editors of some systems write a byte-order mark.
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        value = _decoder.decode(text)
        return checked(value, schema)
    except JsonError:
        raise
    except UnicodeDecodeError as error:
        raise JsonError(f"is not UTF-8 text at byte {error.start}") from None
    except RecursionError:
        raise JsonError(f"is nested in more than {_MOST_LEVELS} levels") from None
    except json.JSONDecodeError as error:
        raise JsonError(f"is not JSON: {error}") from None
    except ValueError:  # from int(), which has a limit of its own
        raise JsonError("has an integer of thousands of digits") from None


def read_json(path: Path, schema: TypeForm[T], limit: int = MOST_BYTES) -> T:
    """Reads a regular file of at most `limit` bytes and parses it with `parse_json`.

    Raises:
        JsonError: as `parse_json`.
        OSError: the file cannot be read, is too large, or no regular file.
    """
    return parse_json(read_regular(path, limit), schema, limit)


@contextmanager
def damage_of(path: Path, error: type[SamestepError], fix: str) -> Iterator[None]:
    """Turns an error of reading a file into the caller's, which names the file and the reason.

    Args:
        path: of the file that is read in the block.
        error: type of the caller's error.
        fix: sentence on what to do.
    """
    try:
        yield
    except (OSError, JsonError) as reason:
        raise error(f"{path} is damaged: {reason}. {fix}") from reason


def checked(value: object, schema: TypeForm[T]) -> T:
    """Decodes a value that has already been parsed, such as a part of one, as a declared type.

    Raises:
        JsonError: it has another type, or is out of range.
    """
    return typing.cast(T, _checker(typing.cast(Any, schema))(value))


def finite(value: Any) -> Any:
    """Returns a tree to store as JSON, with null in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def read_lines(file: BinaryIO, limit: int = MOST_LINE_BYTES) -> Iterator[tuple[bytes, int, bool]]:
    """Yields lines, their ends in the file (bytes), and whether they end with a line feed.

    Args:
        limit: of a longer line, only this number of bytes is returned.
    """
    end = file.tell()
    while line := file.readline(limit):
        rest, end = line, end + len(line)
        # The rest of a line that is too long is read in parts and dropped.
        while not rest.endswith(b"\n") and (rest := file.readline(limit)):
            end += len(rest)
        yield line, end, rest.endswith(b"\n")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    # Parsers differ in which of two equal keys counts, so neither does.
    if len(found) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise JsonError(f"has the key {_shorten.repr(twice)} twice in one object")
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_unique)


@cache
def _checker(schema: Any) -> Check:
    """Returns the function that checks and decodes a value of a type."""
    origin, arguments = typing.get_origin(schema), typing.get_args(schema)
    if schema in (Any, object):
        return _untyped
    if schema in _SCALARS:
        return _scalar(schema)
    if origin is Annotated:
        return _annotated(*arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin in (dict, Mapping):
        return _mapping(_checker(arguments[1]))
    if origin in (list, Sequence):
        return _list(_checker(arguments[0]), list)
    if origin is tuple and arguments[-1] is ...:
        return _list(_checker(arguments[0]), tuple)
    if origin is tuple:
        return _fixed_list([_checker(item) for item in arguments])
    if typing.is_typeddict(schema):
        return _typed_dict(schema)
    assert dataclasses.is_dataclass(schema), schema
    return _dataclass(schema)


_SCALARS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "null",
}


def _wrong(value: object, expected: str) -> JsonError:
    return JsonError(f"is {_shorten.repr(value)}, not {expected}")


def _untyped(value: object, levels: int = _MOST_LEVELS, unpaired: bool = False) -> object:
    """Checks only what no later code is prepared for: depth, huge integers, broken Unicode."""
    if isinstance(value, str):
        return value if unpaired else _text(value)
    if type(value) is int and len(str(value)) > _MOST_DIGITS:
        raise JsonError(f"is an integer of {len(str(value))} digits")
    if isinstance(value, dict | list):
        if not levels:
            raise JsonError(f"is nested in more than {_MOST_LEVELS} levels")
        # Keys are texts like others.
        if isinstance(value, dict):
            _untyped(list(value), 1, unpaired)
        key: str | int = 0
        items: Iterable[tuple[str | int, object]]
        items = value.items() if isinstance(value, dict) else enumerate(value)
        try:
            for key, item in items:  # noqa: B007
                # A file of vectors has millions of numbers, of which nothing can be wrong.
                if type(item) is not float:
                    _untyped(item, levels - 1, unpaired)
        except JsonError as error:
            raise error.within(key) from None
    return value


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can store
            raise JsonError(f"is {_shorten.repr(value)}, which is not valid Unicode") from None
    return value


def _scalar(schema: type[object]) -> Check:
    expected = _SCALARS[schema]

    def check(value: object) -> object:
        kind = type(value)  # not isinstance(): True would be an integer
        if kind is str and schema is str:
            return _text(typing.cast(str, value))
        # JSON writes 1.0 as 1 in some programs.
        if kind is int and schema in (int, float):
            if not _LEAST <= typing.cast(int, value) <= _MOST:
                raise JsonError("is an integer of more than 64 bits")
            return value
        if kind is not schema:
            raise _wrong(value, expected)
        if kind is float and not _is_finite(value):
            raise _wrong(value, "a finite number")
        return value

    return check


def _is_finite(value: object) -> bool:
    # NaN and infinity minus themselves are NaN.
    return value - value == 0  # type: ignore[operator,no-any-return]


def _annotated(schema: object, *marks: object) -> Check:
    check = _checker(schema)

    def measure(value: object) -> object:
        return value if type(value) is float else check(value)

    if NonFinite in marks:
        return measure
    if Unpaired in marks:
        return partial(_untyped, unpaired=True)
    for mark in marks:
        if isinstance(mark, Matching):
            return _matching(re.compile(mark.pattern))
        if isinstance(mark, Between):
            return _between(schema, mark)
    return check


def _matching(pattern: re.Pattern[str]) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _wrong(value, f"a text like {pattern.pattern}")
        return value

    return check


def _between(schema: object, bounds: Between) -> Check:
    check = _checker(schema)
    low, high, kind = bounds.low, bounds.high, _SCALARS[schema]

    def bounded(value: object) -> object:
        found: Any = check(value)
        if not low <= found <= high:
            raise _wrong(value, f"{kind} from {low} to {high}")
        return found

    return bounded


def _literal(choices: tuple[object, ...]) -> Check:
    def check(value: object) -> object:
        # By type as well, since True == 1.
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        raise _wrong(value, " or ".join(map(repr, choices)))

    return check


def _union(choices: tuple[object, ...]) -> Check:
    checks = [_checker(choice) for choice in choices]

    def check(value: object) -> object:
        errors = []
        for choice in checks:
            try:
                return choice(value)
            except JsonError as error:
                errors.append(error)
        # An error inside of the value says more than a list of all that the value could be.
        expected = []
        for found in errors:
            _, is_mismatch, kind = found.reason.partition(", not ")
            if found.place or not is_mismatch:
                raise found
            expected.append(kind)
        raise _wrong(value, " or ".join(expected))

    return check


def _mapping(item: Check) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, dict):
            raise _wrong(value, "an object")
        found, key = {}, ""
        try:
            for key, each in value.items():
                found[_text(key)] = item(each)
        except JsonError as error:
            raise error.within(key) from None
        return found

    return check


def _list(item: Check, kind: type[list[object]] | type[tuple[object, ...]]) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, list):
            raise _wrong(value, "a list")
        found: list[object] = []
        try:
            for each in value:
                found.append(item(each))
        except JsonError as error:
            raise error.within(len(found)) from None
        return kind(found)

    return check


def _fixed_list(items: list[Check]) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, list) or len(value) != len(items):
            raise _wrong(value, f"a list of {len(items)}")
        found: list[object] = []
        try:
            for item, each in zip(items, value, strict=True):
                found.append(item(each))
        except JsonError as error:
            raise error.within(len(found)) from None
        return tuple(found)

    return check


def _object(value: object, fields: dict[str, Check], required: set[str]) -> dict[str, object]:
    """Returns the known fields of an object, decoded."""
    if not isinstance(value, dict):
        raise _wrong(value, "an object")
    for name in sorted(required - value.keys()):
        raise JsonError("is missing", (name,))
    found, name = {}, ""
    try:
        for name, check in fields.items():
            if name in value:
                found[name] = check(value[name])
    except JsonError as error:
        raise error.within(name) from None
    return found


def _typed_dict(schema: Any) -> Check:
    fields: dict[str, Check] = {}
    required = set()
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        mark = typing.get_origin(hint)
        is_marked = mark in (typing.Required, typing.NotRequired)
        fields[name] = _checker(typing.get_args(hint)[0] if is_marked else hint)
        # Marks in postponed annotations are not in `__required_keys__`, but bases are.
        if mark is typing.Required or (name in schema.__required_keys__ and not is_marked):
            required.add(name)

    def check(value: object) -> object:
        found = _object(value, fields, required)
        # Other keys stay, checked as far as nobody knows their types.
        return {**typing.cast("dict[str, object]", _untyped(value)), **found}

    return check


def _dataclass(schema: Any) -> Check:
    hints = typing.get_type_hints(schema, include_extras=True)
    stored = [field for field in dataclasses.fields(schema) if field.init]
    fields = {field.name: _checker(hints[field.name]) for field in stored}
    required = {
        field.name
        for field in stored
        if field.default is field.default_factory is dataclasses.MISSING
    }

    def check(value: object) -> object:
        found = _object(value, fields, required)
        try:
            return schema(**found)
        except (ValueError, SamestepError) as error:  # from a check in __post_init__
            raise JsonError(f"is wrong: {error}") from error

    return check
