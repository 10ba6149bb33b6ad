"""Addresses of objects: which path is one, what each kind of store can do, and waiting requests.

What talks to a store (`objects`, `keeper`, `hub`) is imported where an address is opened.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.addresses import ELSEWHERE, has_userinfo, shown
from samestep.errors import ConfigError

pending: dict[object, str] = {}
"""The URL of each request that a thread of this process is waiting for, oldest first."""

PARALLEL_REQUESTS = 8
"""An object store answers eight requests in about the time of one."""

KEEPER = "SAMESTEP_KEEPER"
"""Environment variable with the address of the keeper on a worker's machine."""


@dataclass(frozen=True)
class Scheme:
    """A kind of store."""

    package: str
    extra: str
    writable: bool
    access: str  # how a user gains access
    tries: int = 6  # attempts at one operation


_S3 = Scheme("s3fs", "s3", True, "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
# gcsfs retries for about a minute by itself, huggingface_hub six times.
_GCS = Scheme(
    "gcsfs",
    "gcs",
    True,
    "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    tries=2,
)
_HTTP = Scheme(
    "aiohttp", "http", False, "use a URL that needs no log-in, or a signed one that has not expired"
)
_HUB = Scheme("huggingface_hub", "hf", False, "set HF_TOKEN, or run `hf auth login`", tries=2)
# keeper:// is internal, see samestep.storage.keeper: users cannot write such a URL in a setting.
_KEEPER = Scheme("fsspec", "", True, "", tries=1)
_SCHEMES = {"s3": _S3, "gs": _GCS, "http": _HTTP, "https": _HTTP, "hf": _HUB}


def is_url(path: str) -> bool:
    """Whether `path` is the URL of an object or of a folder of objects, not a local file.

    Raises:
        ConfigError: the URL has an unsupported scheme, or a password.
    """
    scheme, separator, _ = path.partition("://")
    if separator and scheme not in _SCHEMES:
        raise ConfigError(
            f"{shown(path)!r} has an unsupported scheme. Use {', '.join(_SCHEMES)}, or a path."
        )
    if has_userinfo(path):
        raise ConfigError(f"{shown(path)} has a user name or password in it. {ELSEWHERE}")
    return bool(separator)


def is_writable(url: str) -> bool:
    """Whether objects with this URL scheme can be written."""
    return scheme_of(url).writable


def is_keeper_url(url: str) -> bool:
    """Whether a URL is served by keepers, which answer as fast as a local disk."""
    return url.startswith("keeper:")


def is_hub_path(path: str) -> bool:
    """Whether `path` names a repository of the Hub rather than a folder."""
    return path.startswith("hf://")


def scheme_of(url: str) -> Scheme:
    """The kind of store of a URL."""
    return _SCHEMES.get(url.partition("://")[0], _KEEPER)


def under_way() -> list[str]:
    """URLs of the requests that threads of this process are waiting for, oldest first."""
    return [shown(url) for url in list(pending.values())]
