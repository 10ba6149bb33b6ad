"""Addresses (SCHEME://...) in settings and messages: the credentials in them, and how to show them.

An address may hold a user name and password (userinfo) before its host, and a signature or a token
in its query. Neither belongs into a file or a message.
"""

from __future__ import annotations

ELSEWHERE = (
    "Leave it out, and put it where the store's own tools look for it: an environment variable, "
    "~/.aws, ~/.netrc (docs/object_stores.md)."
)
"""Where a credential belongs that was found in an address; the end of an error message."""


def shown(text: str) -> str:
    """An address, or a text with addresses, without userinfo and queries."""
    if "://" not in text:
        return text
    from samestep.addresses.parts import addresses

    kept, done = [], 0
    for address in addresses(text):
        scheme_end = text.index("://", address.start) + 3
        kept += [text[done:scheme_end], text[address.host : address.query]]
        done = address.end
    return "".join([*kept, text[done:]])


def credential_in(text: str) -> str | None:
    """Names the kind of the first credential in the addresses of a text; None if there is none."""
    if "://" not in text:
        return None
    from samestep.addresses.parts import addresses, has_password, is_secret

    for address in addresses(text):
        if has_password(address, text):
            return "a user name or password"
        if any(map(is_secret, address.parameters)):
            return "a signature or token"
    return None


def has_userinfo(text: str) -> bool:
    """Whether an address in the text has a user name or password before its host."""
    if "://" not in text:
        return False
    from samestep.addresses.parts import addresses, has_password

    return any(has_password(address, text) for address in addresses(text))
