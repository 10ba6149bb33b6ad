"""Decodes a tree of plain values into frozen dataclasses, by their declared types, refusing what does not fit."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from trainer.config import renamed
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


@dataclass(frozen=True)
class Kinds:
    """Marks a field whose schema is the `Config` of the module that its `kind` names, inside `package`.

    The field is `Annotated[Protocol, Kinds(package)]`. The protocol is for the type checker: what all
    modules' `Config` have in common. Decoding depends on `kind` alone.

    A dash in a kind is an underscore in the module's name, as in Hugging Face's "openai-gpt".
    """

    package: str

    def module_name(self, kind: str) -> str:
        return kind if "." in kind else f"{self.package}.{kind.replace('-', '_')}"

    def kind_of(self, config: object) -> str:
        """The inverse: the `kind` under which `config` was, or would be, decoded."""
        return type(config).__module__.removeprefix(f"{self.package}.")

    def available(self) -> list[str]:
        """Names of the package's modules that define a `Config`; those whose packages are missing count too."""
        names = []
        for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
            try:
                found = hasattr(importlib.import_module(f"{self.package}.{module.name}"), "Config")
            except ImportError:
                found = True
            if found:
                names.append(module.name)
        return sorted(names)

    def schema(self, kind: object, path: str) -> type[Any]:
        """The `Config` class of a kind.

        Raises:
            ConfigError: the kind is missing, or names no module with a `Config`.
        """
        if not isinstance(kind, str) or not kind:
            raise ConfigError(
                f"{path}.kind must name one of: {', '.join(self.available())}; it is {kind!r}"
            )
        name = self.module_name(kind)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            raise ConfigError(
                f"{path}.kind: no module for {kind!r}; {_suggest(kind, self.available())}"
            ) from error
        schema: object = vars(module).get("Config")
        if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
            raise ConfigError(f"{path}.kind: the module {name} has no dataclass named Config")
        return schema


def _suggest(word: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(names)}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


class _Mismatch(ConfigError):
    """A value is not of the type that its key takes."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        super().__init__(f"{path} must be {expected}, not {value!r}")
        self.path, self.expected = path, expected


def decode(schema: TypeForm[T], value: object, path: str = "") -> T:
    """Decodes `value` as the declared type `schema`: a dataclass, a scalar, Literal, tuple, dict, union or Kinds.

    Raises:
        ConfigError: naming the key, the value and what was expected.
    """
    return typing.cast(T, _decode(schema, value, path))


def _decode(schema: object, value: object, path: str) -> object:
    origin, arguments = typing.get_origin(schema), typing.get_args(schema)
    if origin is Annotated:
        kinds = next((a for a in arguments[1:] if isinstance(a, Kinds)), None)
        return _decode_kind(kinds, value, path) if kinds else _decode(arguments[0], value, path)
    if isinstance(schema, type) and dataclasses.is_dataclass(schema):
        return _decode_dataclass(schema, value, path)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, path)
    if origin is Literal:
        if value not in arguments or type(value) not in {type(a) for a in arguments}:
            if (name := renamed.new_name(path, value)) is not None:
                raise ConfigError(
                    f"{path} is {value!r}, which is now called {name!r}; set {path}={name}"
                )
            raise _Mismatch(
                path, value, "one of " * (len(arguments) > 1) + ", ".join(str(a) for a in arguments)
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _Mismatch(path, value, "a list")
        return tuple(_decode(arguments[0], item, _join(path, i)) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _Mismatch(path, value, "a section of key: value lines")
        return {
            _decode(arguments[0], k, path): _decode(arguments[1], v, _join(path, k))
            for k, v in value.items()
        }
    return _decode_scalar(schema, value, path)


def _decode_scalar(schema: object, value: object, path: str) -> object:
    if schema is type(None) and value is None:
        return None
    if schema is bool and isinstance(value, bool):
        return value
    if schema is str and isinstance(value, str):
        return value
    if schema in (int, float) and not isinstance(value, bool):
        try:  # PyYAML reads 1e-4 as a string, and 1e6 is a natural way to write an integer
            number = float(value) if isinstance(value, (str, typing.SupportsFloat)) else None
        except (TypeError, ValueError):
            number = None
        if schema is float and number is not None:
            return number
        if isinstance(value, int):
            return value
        if number is not None and number.is_integer():
            return int(number)
    expected: dict[object, str] = {
        bool: "true or false",
        str: "text",
        int: "a whole number",
        float: "a number",
    }
    raise _Mismatch(path, value, expected.get(schema, str(schema)))


def _decode_union(choices: tuple[object, ...], value: object, path: str) -> object:
    if value is None and type(None) in choices:
        return None
    errors: list[ConfigError] = []
    for choice in choices:
        if choice is not type(None):
            try:
                return _decode(choice, value, path)
            except ConfigError as error:
                errors.append(error)
    expected = [
        error.expected for error in errors if isinstance(error, _Mismatch) and error.path == path
    ]
    raise (
        _Mismatch(path, value, " or ".join(expected)) if len(expected) == len(errors) else errors[0]
    )


def _decode_kind(kinds: Kinds, value: object, path: str) -> object:
    if isinstance(value, str):  # `strategy: ddp` is short for `strategy: {kind: ddp}`
        value = {"kind": value}
    if not isinstance(value, dict):
        raise _Mismatch(path, value, "a section with a `kind`")
    rest = {key: item for key, item in value.items() if key != "kind"}
    return _decode_dataclass(kinds.schema(value.get("kind"), path), rest, path)


def _decode_dataclass(schema: type[object], value: object, path: str) -> object:
    assert dataclasses.is_dataclass(schema)
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise _Mismatch(path or "the configuration", value, "a section of key: value lines")
    hints = typing.get_type_hints(schema, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key in value:
        if key not in fields:
            raise ConfigError(
                f"{_join(path, key)} is not a known key; {_suggest(str(key), fields)}"
            )
    arguments = {key: _decode(hints[key], item, _join(path, key)) for key, item in value.items()}
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in arguments:
            kinds = kinds_of(hints[name])
            choices = f" with a kind out of: {', '.join(kinds.available())}" if kinds else ""
            raise ConfigError(f"{_join(path, name)} is required{choices}")
    try:
        return schema(**arguments)
    except ConfigError as error:  # a check in __post_init__: say which section it is about
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def kinds_of(hint: object) -> Kinds | None:
    """The Kinds mark of a field's type, also where it is one of `X | None`."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is Annotated:
            return next((a for a in typing.get_args(part)[1:] if isinstance(a, Kinds)), None)
    return None
