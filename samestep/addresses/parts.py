"""Parses the addresses in a text, as far as credentials may be in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import unquote, urlsplit

# The costs of all patterns and loops here grow with the length of the text alone: a stranger's file
# or a message of a megabyte must not take minutes.
_MOST_SCHEME = 40  # characters
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*\Z")
_SPACE = re.compile(r"\s")
_ENDS_AUTHORITY = re.compile(r"[/?#\s\\]")
# Characters that are more likely to follow an address in a sentence than to end it.
_PUNCTUATION = "'\")]}>`,.:;!?*"
_SEPARATOR = re.compile(r"[?&#;]|%(?:25)*(?:3F|26|23|3B)", re.IGNORECASE)
_PARAMETER = re.compile(r"([^/\s=&?#;%]+)(?:=|%(?:25)*3D)([^\s&#]{0,64})", re.IGNORECASE)
_SECRET_PARTS = (
    "accesskey",
    "apikey",
    "credential",
    "jwt",
    "passphrase",
    "password",
    "passwd",
    "secret",
    "signature",
    "token",
)
_SECRET_NAMES = {"auth", "authorization", "key", "pass", "pwd", "sas", "sig"}
_HARMLESS = re.compile(r"tokeniz|maxtokens|numtokens", re.IGNORECASE)

_IMAGES = ("docker", "oras")  # IMAGE:TAG@sha256:DIGEST

REFERENCE = "$"
"""Stands for a shell's reference, such as $TOKEN, in a line that is searched for credentials."""

SECRET_PARTS, SECRET_NAMES = _SECRET_PARTS, frozenset(_SECRET_NAMES)
"""Parts of names of secrets, and whole names: in lower case, without separators."""


@dataclass(frozen=True)
class _Address:
    """An address in a text.

    Attributes:
        start: where it begins in the text.
        host: where the host begins, after the userinfo.
        query: where the query begins, or another part that parameters are in.
        end: where all of it ends. The text between the host and the query is without secrets.
        userinfo: user name and password; empty if there are none.
        parameters: names and values in the query and fragment.
    """

    start: int
    host: int
    query: int
    end: int
    userinfo: str
    parameters: tuple[tuple[str, str], ...]


def addresses(text: str) -> Iterator[_Address]:
    """Finds the addresses in a text."""
    starts = list(_schemes(text))
    for (start, after_scheme), (following, _) in pairwise([*starts, (len(text), 0)]):
        line_end = text.find("\n", after_scheme, following)
        limit = following if line_end < 0 else line_end
        yield _parse(text, start, after_scheme, limit)


def _schemes(text: str) -> Iterator[tuple[int, int]]:
    """Yields where each scheme begins, and where its :// ends."""
    end, at = 0, text.find("://")
    while at >= 0:
        begin = max(end, at - _MOST_SCHEME)
        if scheme := _SCHEME.search(text[begin:at]):
            yield begin + scheme.start(), at + 3
        end, at = at + 3, text.find("://", at + 3)


def _parse(text: str, start: int, after_scheme: int, limit: int) -> _Address:
    """Parses the address at `start`, of which `limit` is the latest possible end."""
    scheme = text[start : after_scheme - 3].lower()
    stop = _ENDS_AUTHORITY.search(text, after_scheme, limit)
    authority_end = stop.start() if stop else limit
    host = after_scheme + text[after_scheme:authority_end].rfind("@") + 1
    # A password may hold what it must not: s3://KEY:SEC/RET@bucket leaves no valid port, and of
    # https://USER:PASS@WO?RD@host a parser takes WO for the host. Nothing up to the last @ is kept.
    last_at = -1
    if not _is_host(text[host:authority_end].rstrip(_PUNCTUATION)):
        last_at = text.rfind("@", after_scheme, limit)
    elif ":" in text[after_scheme:host] and scheme not in _IMAGES:
        last_at = text.rfind("@", after_scheme, _end_of_word(text, after_scheme, limit))
    if last_at >= host:
        host = last_at + 1
        stop = _ENDS_AUTHORITY.search(text, host, limit)
        authority_end = stop.start() if stop else limit
    userinfo = text[after_scheme : max(after_scheme, host - 1)]
    # hf://NAME@REVISION and docker://IMAGE@sha256:DIGEST have no userinfo.
    is_name = scheme == "hf" and ":" not in userinfo
    if is_name or text.startswith("sha256:", host):
        host, userinfo = after_scheme, ""
    query, parameters = limit, []
    separators = list(_SEPARATOR.finditer(text, authority_end, limit))
    for separator in separators:
        if parameter := _PARAMETER.match(text, separator.end(), limit):
            query = min(query, separator.start())
            parameters.append((unquote(parameter[1]), parameter[2]))
    end = query
    if parameters or scheme.startswith("http"):
        # In other schemes, `?` may also be a pattern's wildcard.
        begins = [each.start() for each in separators if each.group() == "?"]
        if scheme.startswith("http") and begins and _follows(text, begins[0], limit):
            query = min(query, begins[0])
        last = [each.start() for each in separators if _PARAMETER.match(text, each.end(), limit)]
        end = max(query, _end_of_word(text, max([query, *last]), limit))
    return _Address(start, host, query, end, userinfo, tuple(parameters))


def _is_host(authority: str) -> bool:
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port  # raises unless it is a number
    except ValueError:
        return False
    return True


def _follows(text: str, question_mark: int, limit: int) -> bool:
    """Whether a query follows a question mark, rather than the end of a sentence."""
    word = text[question_mark : _end_of_word(text, question_mark, limit)]
    return bool(word.strip(_PUNCTUATION))


def _end_of_word(text: str, start: int, limit: int) -> int:
    space = _SPACE.search(text, start, limit)
    word = text[start : space.start() if space else limit]
    return start + len(word.rstrip(_PUNCTUATION))


def has_password(address: _Address, text: str) -> bool:
    """Whether an address in the text has a user name or password before its host."""
    if not address.userinfo:
        return False
    scheme = text[address.start : text.index("://", address.start)].lower()
    user, colon, password = address.userinfo.partition(":")
    if not colon and scheme.endswith("ssh"):  # ssh://git@github.com: keys prove who it is
        return False
    return (password or user) != REFERENCE


def is_secret(parameter: tuple[str, str]) -> bool:
    """Whether a parameter, name and value, is a signature or token."""
    name, value = parameter
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if _HARMLESS.search(plain) or value.strip(_PUNCTUATION) in ("", REFERENCE):
        return False
    return plain in _SECRET_NAMES or any(part in plain for part in _SECRET_PARTS)
