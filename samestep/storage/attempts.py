"""Access to object stores: the package for a URL, time-outs, retries, and error messages."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import fsspec

from samestep.addresses import shown
from samestep.errors import (
    MissingExtra,
    ObjectNotFoundError,
    SamestepError,
    StorageError,
    UnreachableError,
)
from samestep.storage.urls import Scheme, pending, scheme_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_SECONDS = 10
_READ_SECONDS = 60  # without receiving a byte
_CONNECTIONS = 32
_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each retry
# While a store that has answered before rejects the credentials: five minutes. Shorter than
# `hang_timeout`.
_PATIENCE = (*_DELAYS, *(16.0,) * 17)
_TRANSIENT_STATUS = {408, 425, 429}
_REJECTED = (401, 403)
_PREAMBLE = re.compile(r"An error occurred \(\w+\) when calling the \w+ operation(?: \([^)]*\))?: ")
# The last of these is raised by gcsfs.
_FORBIDDEN = re.compile(r"^\w*(Credential|SSOToken|TokenRetrieval|RefreshError)|^OSError Forbidden")
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}  # S3 answers these with 400
_PERMANENT_NAMES = re.compile(r"Validation|InvalidURL|Profile|Region|Certificate")
_answered: dict[str, str] = {}  # URL of the first successful read at each store
_renewed = {"at": -math.inf}  # when credentials were read anew, which takes up to seconds
_RENEW_SECONDS = 1.0


def attempt(action: str, url: str, operation: Callable[[fsspec.AbstractFileSystem, str], T]) -> T:
    """Calls `operation(file_system, path)` and retries transient failures.

    A store that has answered this process and then rejects its credentials (401, 403) is asked
    again for five minutes, with credentials that are read anew: they may be about to be renewed.
    If it accepts them for what it has shown before, it forbids only this object: an error at once.

    Args:
        action: a verb for messages, such as "read".

    Raises:
        ObjectNotFoundError: there is no such object, or no such bucket.
        UnreachableError: a transient failure remained after all retries.
        StorageError: a permanent failure.
        MissingExtra: the package for this URL scheme is not installed.
    """
    scheme, store = scheme_of(url), _store(url)
    delays, patience = iter(_DELAYS[: scheme.tries - 1]), iter(_PATIENCE)
    accepted = False
    request = object()
    pending[request] = url
    try:
        while True:
            try:
                result = operation(*_open(url))
            except SamestepError:
                raise
            except Exception as error:  # every store's package has its own exceptions
                failure = _Failure.of(error)
                delay = next(delays, None) if failure.transient else None
                if failure.status in _REJECTED and store in _answered and not accepted:
                    _forget_credentials(url)
                    accepted = _is_accepted(store)
                    delay = 0.0 if accepted else next(patience, None)
                if delay is None:
                    raise failure.explain(f"cannot {action} {shown(url)}", scheme) from error
                logger.log(
                    logging.DEBUG if accepted else logging.WARNING,
                    "cannot %s %s: %s; trying again in %g s",
                    action,
                    shown(url),
                    failure.reason,
                    delay,
                )
                time.sleep(delay)
            else:
                if action in ("read", "find", "list"):
                    _answered.setdefault(store, url)
                return result
    finally:
        del pending[request]


def _store(url: str) -> str:
    """Scheme and bucket, or scheme and host."""
    return "/".join(url.split("/")[:3])


def _is_accepted(store: str) -> bool:
    """Whether a store accepts the credentials for what it has shown before."""
    try:
        system, path = _open(_answered[store])
        system.info(path)
    except Exception as error:  # every store's package has its own exceptions
        return _Failure.of(error).status == 404
    return True


def _forget_credentials(url: str) -> None:
    """Makes the next request read files of credentials and fsspec's configuration again."""
    # No lock, which a fork could leave locked; two threads that do it at once do no harm.
    if time.monotonic() < _renewed["at"] + _RENEW_SECONDS:
        return
    _renewed["at"] = time.monotonic()
    with suppress(OSError, ValueError):
        fsspec.config.set_conf_files(fsspec.config.conf_dir, fsspec.config.conf)
    fsspec.get_filesystem_class(url.partition("://")[0]).clear_instance_cache()


def credentials_renewed() -> float:
    """When credentials were last read anew, by the monotonic clock."""
    return _renewed["at"]


@dataclass(frozen=True)
class _Failure:
    """An exception of a store's package.

    Attributes:
        status: the HTTP status code, or its equivalent.
    """

    reason: str
    transient: bool
    status: int | None

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        # Read the type before unwrapping: S3 may give a time-out the status 400.
        timed_out = isinstance(error, TimeoutError)
        error = _unwrapped(error)
        kind = type(error).__name__
        status = _http_status(error)
        if status is None and isinstance(error, FileNotFoundError):
            status = 404
        if _error_code(error) in _EXPIRED or (
            status is None
            and (isinstance(error, PermissionError) or _FORBIDDEN.search(f"{kind} {error}"))
        ):
            status = 403
        reason = getattr(error, "strerror", None) or getattr(error, "message", None)
        if not reason:
            reason = _PREAMBLE.sub("", str(error).strip().partition("\n")[0])
        reason = shown(reason) or kind
        if status == 404 and " " not in reason:  # only the path
            reason = "it does not exist"
        return cls(reason, timed_out or _is_transient(error, status), status)

    def explain(self, failed: str, scheme: Scheme) -> StorageError:
        message = f"{failed}: {self.reason}"
        if self.status == 404:
            return ObjectNotFoundError(
                f"{message}; check the bucket and the name of the object, or the URL"
            )
        if self.status in _REJECTED:
            return StorageError(
                f"{message}; check the name and who may read and write there; {scheme.access}"
            )
        if self.transient:
            return UnreachableError(f"{message}; check the network and the endpoint")
        return StorageError(f"{message}; check the URL and the endpoint")


def _is_transient(error: BaseException, status: int | None) -> bool:
    if status is not None:
        return status >= 500 or status in _TRANSIENT_STATUS
    if isinstance(error, OSError | EOFError):
        return not isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError)
    kind = type(error)
    return kind.__module__ != "builtins" and not _PERMANENT_NAMES.search(kind.__name__)


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status with which a store has answered, if it has."""
    return _http_status(_unwrapped(error))


def _unwrapped(error: BaseException) -> BaseException:
    # fsspec wraps a store's exception, for example in a FileNotFoundError.
    while type(error).__module__ == "builtins" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _http_status(error: BaseException) -> int | None:
    """Reads the HTTP status from wherever the exception's package keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif response is not None:  # httpx, requests
        status = getattr(response, "status_code", None)
    else:  # aiohttp, gcsfs
        status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) and status >= 400 else None


def _error_code(error: BaseException) -> str | None:
    """S3's name of an error."""
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns a URL's file system and its path there.

    fsspec caches file systems per process, and makes new ones after a fork.
    """
    scheme = url.partition("://")[0]
    try:
        system = fsspec.filesystem(scheme, **_options(scheme))
    except ImportError:
        raise MissingExtra(scheme_of(url).package, scheme_of(url).extra, shown(url)) from None
    if scheme == "s3":
        # botocore retries requests and `attempt` retries operations. A third loop in between
        # would only multiply the waiting.
        system.retries = 1
    return system, system._strip_protocol(url)


def _options(scheme: str) -> dict[str, object]:
    """Time-outs and connection limits; the user's own fsspec configuration takes precedence."""
    options: dict[str, object] = {}
    if scheme == "s3":
        options = {
            "config_kwargs": {
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _READ_SECONDS,
                "max_pool_connections": _CONNECTIONS,
            },
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
            # Without compression in transit, ranges and sizes refer to the stored content.
            headers = {"Accept-Encoding": "identity"}
            options = {"client_kwargs": {"timeout": timeout, "trust_env": True, "headers": headers}}
    # fsspec would let our options override the user's, so merge them here the other way round.
    chosen = fsspec.config.conf.get(scheme, {})
    for name, value in options.items():
        if name in chosen:
            section = value if isinstance(value, dict) else None
            options[name] = chosen[name] if section is None else {**section, **chosen[name]}
    return options
