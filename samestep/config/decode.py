"""Decodes plain values into frozen dataclasses by their declared types; rejects what differs."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import traceback
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

_OURS = ("data_pipeline", "launch", "trainer")  # whose folders of kinds are in the settings


@dataclass(frozen=True)
class Kinds:
    """Marks a field whose schema is the `Config` of the module that its `kind` names in `package`.

    The field is `Annotated[Base, Kinds(package)]`. The base is for the type checker: what all
    modules' `Config` have in common. Decoding depends on `kind` alone. A dash in a kind is an
    underscore in the module's name, as in Hugging Face's "openai-gpt".
    """

    package: str

    def kind_of(self, config: object) -> str:
        """Returns the `kind` that decodes to this type of `config`."""
        module = type(config).__module__
        if module.startswith(f"{self.package}."):
            return module.removeprefix(f"{self.package}.")
        added = entry_points(group=self.package, value=module)
        return next((point.name for point in added), module)

    def available(self) -> list[str]:
        """Names of the package's modules, and of those that installed packages add.

        Nothing is imported. Another package adds a kind by an entry point in the group that has
        the name of this package.
        """
        folders = importlib.import_module(self.package).__path__
        own = [module.name for module in pkgutil.iter_modules(folders)]
        return sorted({*own, *entry_points(group=self.package).names})

    def schema(self, kind: object, path: str) -> type[Any]:
        """Returns the `Config` class of a kind.

        Raises:
            ConfigError: the kind is missing, or names no module with a `Config`.
        """
        if not isinstance(kind, str) or not kind:
            raise ConfigError(
                f"{path}.kind must name one of: {', '.join(self.available())}; it is {kind!r}"
            )
        if not all(kind.split(".")):
            raise ConfigError(
                f"{path}.kind must name a module, as my_package.my_module; it is {kind!r}"
            )
        # A dotted kind is a user's own module, installed or in the working folder.
        if "." in kind:
            from samestep.config import own_modules

            own_modules.announce(kind, path)
            own_modules.make_importable(os.getcwd())
        name = kind if "." in kind else f"{self.package}.{kind.replace('-', '_')}"
        if "." not in kind and find_spec(name) is None:
            added = entry_points(group=self.package)
            name = added[kind].value if kind in added.names else name
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Is the module itself missing (or a parent), or one that it imports?
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                if "." not in kind:
                    raise
                raise ConfigError(
                    f"{path}.kind: {kind} imports {error.name}, which is not installed. "
                    "Install it, or correct the import."
                ) from error
            if "." in kind:
                absent = own_modules.absent(kind, self.available())
                raise ConfigError(f"{path}.kind: {absent}") from error
            from samestep.config.synonyms import suggest

            raise ConfigError(
                f"{path}.kind: no module for {kind!r}; {suggest(kind, self.available())}"
            ) from error
        except Exception as error:
            if "." not in kind:
                raise
            raise ConfigError(
                f"{path}.kind: {kind} cannot be imported: {type(error).__name__}: {error} "
                f"({_place_of(error)})"
            ) from error
        schema: object = vars(module).get("Config")
        if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
            raise ConfigError(
                f"{path}.kind: the module {name} defines no dataclass Config. Add one."
            )
        return schema


def kind_name(config: object) -> str:
    """The name of a configuration's kind, as settings have it.

    That is the name of our module, such as "bert"; of an installed package's entry point; or of a
    user's own module, with dots.
    """
    module = type(config).__module__
    if module.partition(".")[0] in _OURS:
        return module.rpartition(".")[2]
    return next((point.name for point in entry_points(value=module)), module)


def _place_of(error: Exception) -> str:
    """File and line where an exception was raised."""
    if isinstance(error, SyntaxError):  # raised by the parser, which is not in that file
        return f"{error.filename}, line {error.lineno}"
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{last.filename}, line {last.lineno}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


class _Mismatch(ConfigError):
    """A value does not have the type of its key."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        super().__init__(f"{path} must be {expected}, not {value!r}")
        self.path, self.expected = path, expected


def decode(schema: TypeForm[T], value: object, path: str = "") -> T:
    """Decodes a value as a declared type: dataclass, scalar, Literal, tuple, dict, union or Kinds.

    Args:
        path: dotted key of the value, for messages.

    Raises:
        ConfigError: names the key, the value and what was expected.
    """
    try:
        return typing.cast(T, _decode(schema, value, path))
    except _UnknownKey as error:
        from samestep.config.synonyms import place

        fix = place(schema, error.path, error.key, error.known)
        raise ConfigError(f"{error}; {fix}") from None


def _decode(schema: object, value: object, path: str) -> object:
    # `X | None` is a union; `Annotated[Base, Kinds(package)]` has the origin Annotated.
    origin, arguments = typing.get_origin(schema), typing.get_args(schema)
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, path)
    if origin is Annotated:
        return _decode_kind(kinds_of(schema), value, path)
    if schema is Any:
        return value
    if isinstance(schema, type) and dataclasses.is_dataclass(schema):
        return _decode_dataclass(schema, value, path)
    if origin is Literal:
        return _decode_literal(arguments, value, path)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _Mismatch(path, value, "a list")
        return tuple(_decode(arguments[0], item, _join(path, i)) for i, item in enumerate(value))
    if origin is dict:
        keys, items = arguments
        return {
            _decode(keys, key, path): _decode(items, item, _join(path, key))
            for key, item in _section(value, path).items()
        }
    return _decode_scalar(schema, value, path)


class _UnknownKey(ConfigError):
    """A key that its section does not have."""

    def __init__(self, path: str, key: str, known: Iterable[str]) -> None:
        super().__init__(f"{_join(path, key)} is not a known key")
        self.path, self.key, self.known = path, key, known


def _section(value: object, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Mismatch(path, value, "a section of key: value lines")
    for key, item in value.items():
        # YAML reads {lr:2e-5} as the key "lr:2e-5" without a value.
        if item is None and ":" in str(key):
            before, after = str(key).split(":", 1)
            raise ConfigError(f"{_join(path, key)} has no value. Write a space: {before}: {after}")
    return value


def _decode_literal(choices: tuple[object, ...], value: object, path: str) -> object:
    # By type as well, since True == 1.
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return value
    from samestep.config import renamed

    if (name := renamed.new_name(path, value)) is not None:
        raise ConfigError(f"{path} is {value!r}, which is now called {name!r}; set {path}={name}")
    one_of = "one of " if len(choices) > 1 else ""
    raise _Mismatch(path, value, one_of + ", ".join(map(str, choices)))


def _decode_scalar(schema: object, value: object, path: str) -> object:
    if schema in (bool, str) and type(value) is schema:
        return value
    # bool is a subclass of int, but `steps: true` is an error.
    if schema in (int, float) and not isinstance(value, bool):
        if schema is int and isinstance(value, int):
            return value
        # YAML reads 1e-4 as a string, and 1e6 is a natural way to write an integer.
        try:
            number = float(value) if isinstance(value, (int, float, str)) else None
        except ValueError:
            number = None
        if number is not None and schema is float:
            return number
        if number is not None and number.is_integer():
            return int(number)
    expected: dict[object, str] = {
        bool: "true or false",
        str: "text",
        int: "a whole number",
        float: "a number",
    }
    raise _Mismatch(path, value, expected[schema])


def _decode_union(choices: tuple[object, ...], value: object, path: str) -> object:
    """Decodes as the first choice that accepts the value."""
    if value is None and type(None) in choices:
        return None
    errors: list[ConfigError] = []
    for choice in choices:
        if choice is not type(None):
            try:
                return _decode(choice, value, path)
            except ConfigError as error:
                errors.append(error)
    # An error inside of the value says more than a list of all that the value could be.
    expected = []
    for found in errors:
        if not isinstance(found, _Mismatch) or found.path != path:
            raise found
        expected.append(found.expected)
    raise _Mismatch(path, value, " or ".join(expected))


def _decode_kind(kinds: Kinds | None, value: object, path: str) -> object:
    assert kinds is not None
    if isinstance(value, str):  # `strategy: ddp` is short for `strategy: {kind: ddp}`
        value = {"kind": value}
    if not isinstance(value, dict):
        raise _Mismatch(path, value, "a section with a `kind`")
    rest = {key: item for key, item in value.items() if key != "kind"}
    return _decode_dataclass(kinds.schema(value.get("kind"), path), rest, path)


def _decode_dataclass(schema: type[object], value: object, path: str) -> object:
    assert dataclasses.is_dataclass(schema)
    section = {} if value is None else _section(value, path or "the configuration")
    # Annotations are strings in modules with postponed evaluation; this resolves them.
    hints = typing.get_type_hints(schema, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key in section:
        if key not in fields:
            raise _UnknownKey(path, str(key), fields)
    # Unknown keys are reported first: a misspelled key is also a missing one.
    arguments = {key: _decode(hints[key], item, _join(path, key)) for key, item in section.items()}
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            kinds = kinds_of(hints[name])
            choices = f" with a kind out of: {', '.join(kinds.available())}" if kinds else ""
            raise ConfigError(f"{_join(path, name)} is required{choices}")
    try:
        return schema(**arguments)
    except ConfigError as error:  # a check in __post_init__, which does not know its section
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def kinds_of(hint: object) -> Kinds | None:
    """Returns the Kinds mark of a field's type, which may be `X | None`."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is Annotated:
            return next(mark for mark in typing.get_args(part)[1:] if isinstance(mark, Kinds))
    return None
