"""Talking to stores: which packages know them, how long to wait, what to try again, and what to say in the end."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol, TypedDict, TypeVar, overload

import fsspec

from trainer.errors import (
    ConfigError,
    MissingExtra,
    ObjectNotFoundError,
    SamestepError,
    StorageError,
    UnreachableError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = 10
_READ_SECONDS = 60  # without a byte
_CONNECTIONS = 32
_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try
_TRANSIENT_STATUS = {408, 425, 429}
_PREAMBLE = re.compile(r"An error occurred \(\w+\) when calling the \w+ operation(?: \([^)]*\))?: ")
_FORBIDDEN = re.compile(r"^\w*Credential|^OSError Forbidden")  # the latter is gcsfs's own
_PERMANENT_NAMES = re.compile(r"Validation|InvalidURL|Profile|Region|Certificate")
_under_way: dict[object, str] = {}


class Info(TypedDict):
    """What a file system says of a name."""

    name: str
    size: int
    type: Literal["file", "directory"]


class File(Protocol):
    """An object that fsspec has opened; written ones appear when they are closed.

    Attributes:
        size: in bytes; None where it is not known before it has been read.
    """

    size: int | None
    closed: bool

    def read(self, length: int, /) -> bytes: ...
    def write(self, content: bytes | memoryview, /) -> object: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def discard(self) -> None: ...
    def close(self) -> None: ...


class FileSystem(Protocol):
    """The part of fsspec's `AbstractFileSystem` that is used here."""

    def info(self, path: str) -> Info: ...
    def ls(self, path: str, *, detail: Literal[False]) -> list[str]: ...
    def glob(self, path: str, *, detail: Literal[True]) -> dict[str, Info]: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def get_file(self, path: str, file: BinaryIO, /) -> None: ...
    def rm_file(self, path: str) -> None: ...
    def rm(self, path: str, *, recursive: bool) -> None: ...
    @overload
    def open(self, path: str, mode: Literal["rb"], *, cache_type: Literal["none"]) -> File: ...
    @overload
    def open(self, path: str, mode: Literal["wb"], *, block_size: int) -> File: ...
    def unstrip_protocol(self, path: str) -> str: ...


@dataclass(frozen=True)
class _Scheme:
    package: str
    extra: str
    writable: bool
    access: str  # what gives access
    tries: int = 6  # of an operation


_S3 = _Scheme("s3fs", "s3", True, "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
_GOOGLE_ACCESS = (
    "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
)
_GCS = _Scheme(
    "gcsfs", "gcs", True, _GOOGLE_ACCESS, tries=2
)  # its package itself tries for a minute
_HTTP = _Scheme(
    "aiohttp",
    "http",
    False,
    "use an address that needs no log-in, or a signed one that has not expired",
)
_HUB = _Scheme(
    "huggingface_hub", "hf", False, "set HF_TOKEN, or run `hf auth login`", tries=2
)  # six times by itself
_KEEPER = _Scheme("fsspec", "", True, "", tries=1)  # not for users; see trainer.storage.kept
_SCHEMES = {"s3": _S3, "gs": _GCS, "http": _HTTP, "https": _HTTP, "hf": _HUB}


def is_url(path: str) -> bool:
    """Whether `path` is the address of an object or of a folder of objects, rather than of a local file.

    Raises:
        ConfigError: it is an address of an unknown kind.
    """
    scheme, separator, _ = path.partition("://")
    if separator and scheme not in _SCHEMES:
        raise ConfigError(
            f"{shown(path)!r} is of an unknown kind; use {', '.join(_SCHEMES)}, or a path"
        )
    return bool(separator)


def is_writable(url: str) -> bool:
    """Whether objects of this kind of address can be written at all."""
    return _scheme(url).writable


def shown(text: str) -> str:
    """An address, or a text with addresses, without passwords and the signatures in queries."""
    text = re.sub(r"(?<!\bhf)://[^/\s]*@", "://", text)  # hf://NAME@REVISION has none
    return re.sub(r"\?[^\s'\")=]*=[^\s'\")]*", "", text)  # but a pattern keeps its "?"


def attempt(action: str, url: str, operation: Callable[[FileSystem, str], T]) -> T:
    """Calls `operation(file system, path in it)`, and again after failures that pass.

    Raises:
        ObjectNotFoundError: there is no such object, or no such bucket.
        UnreachableError: the failure might pass, but has not in all the tries.
        StorageError: another failure.
        MissingExtra: the package for this kind of address is not installed.
    """
    with _noted(url):
        for delay in (*_DELAYS[: _scheme(url).tries - 1], None):
            try:
                return operation(*_open(url))
            except SamestepError:
                raise
            except Exception as error:  # each store's package has exceptions of its own
                failure = _Failure.of(error)
                if delay is None or not failure.transient:
                    raise failure.explained(
                        f"cannot {action} {shown(url)}", _scheme(url)
                    ) from error
                logger.warning(
                    "cannot %s %s: %s; trying again in %g s",
                    action,
                    shown(url),
                    failure.reason,
                    delay,
                )
                time.sleep(delay)
    raise AssertionError("the last try returns or raises")


def under_way() -> list[str]:
    """The addresses that threads of this process are talking to stores about now, the oldest first."""
    return [shown(url) for url in list(_under_way.values())]


@contextmanager
def _noted(url: str) -> Iterator[None]:
    key = object()
    _under_way[key] = url
    try:
        yield
    finally:
        del _under_way[key]


@dataclass(frozen=True)
class _Failure:
    """What a store's package raised."""

    reason: str
    transient: bool
    status: int | None  # of HTTP, or what amounts to it

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        timed_out = isinstance(error, TimeoutError)  # to which S3 may give the status 400
        while type(error).__module__ == "builtins" and error.__cause__ is not None:
            error = error.__cause__  # of which fsspec has made, for example, a FileNotFoundError
        status = _http_status(error)
        if status is None and isinstance(error, FileNotFoundError):
            status = 404
        if status is None and (
            isinstance(error, PermissionError)
            or _FORBIDDEN.search(f"{type(error).__name__} {error}")
        ):
            status = 403
        reason = getattr(error, "strerror", None) or getattr(error, "message", None)
        reason = (
            shown(reason or _PREAMBLE.sub("", str(error).strip().partition("\n")[0]))
            or type(error).__name__
        )
        if status == 404 and " " not in reason:  # only the path
            reason = "it does not exist"
        return cls(reason, timed_out or _is_transient(error, status), status)

    def explained(self, failed: str, scheme: _Scheme) -> StorageError:
        if self.status == 404:
            return ObjectNotFoundError(
                f"{failed}: {self.reason}; check the bucket and the name, or the address"
            )
        if self.status in (401, 403):
            fix = f"check the name and who may read and write there; {scheme.access}"
            return StorageError(f"{failed}: {self.reason}; {fix}")
        if self.transient:
            return UnreachableError(f"{failed}: {self.reason}; check the network and the endpoint")
        return StorageError(f"{failed}: {self.reason}; check the address and the endpoint")


def _is_transient(error: BaseException, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in _TRANSIENT_STATUS
    if isinstance(error, OSError | EOFError):
        return not isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError)
    return type(error).__module__ != "builtins" and not _PERMANENT_NAMES.search(
        type(error).__name__
    )


def _http_status(error: BaseException) -> int | None:
    """The status of the response that an exception is about, where its package keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")  # botocore
    elif response is not None:
        status = getattr(response, "status_code", None)  # httpx, requests
    else:
        status = getattr(error, "status", None) or getattr(error, "code", None)  # aiohttp; gcsfs
    return status if isinstance(status, int) and status >= 400 else None


def _open(url: str) -> tuple[FileSystem, str]:
    """The file system of an address, and the path in it. fsspec keeps one per process, and knows about forks."""
    scheme = url.partition("://")[0]
    try:
        system = fsspec.filesystem(scheme, **_options(scheme))
    except ImportError:
        raise MissingExtra(_SCHEMES[scheme].package, _SCHEMES[scheme].extra, shown(url)) from None
    if scheme == "s3":
        system.retries = 1  # botocore retries requests, we retry operations; in between only multiplies the waiting
    return system, system._strip_protocol(url)


def _options(scheme: str) -> dict[str, object]:
    """Time-outs, and what the user's own fsspec configuration says."""
    options: dict[str, object] = {}
    if scheme == "s3":
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        options = {
            "config_kwargs": {**limits, "max_pool_connections": _CONNECTIONS},
            "use_listings_cache": False,
        }
    elif scheme in ("gs", "http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
        )
        if scheme == "gs":
            options = {"requests_timeout": timeout, "use_listings_cache": False}
        else:
            headers = {
                "Accept-Encoding": "identity"
            }  # ranges and sizes are of the content as it is stored
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True, "headers": headers}}
    chosen = fsspec.config.conf.get(scheme, {})
    return {
        name: {**value, **chosen[name]}
        if isinstance(value, dict) and name in chosen
        else chosen.get(name, value)
        for name, value in options.items()
    }


def _scheme(url: str) -> _Scheme:
    return _SCHEMES.get(url.partition("://")[0], _KEEPER)
