"""Amounts of data as people write them: "1GB", "512 MiB"."""

from __future__ import annotations

import re

from trainer.errors import ConfigError

_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGTP]i?)?B")
_PREFIXES = " KMGTP"


def parse_size(text: str, name: str) -> int:
    """Bytes in a size: a number and a unit, with prefixes of 1000 (kB, MB, GB, ...) or of 1024 (KiB, MiB, GiB, ...).

    Args:
        text: the size.
        name: the setting it is the value of, for the message.

    Raises:
        ConfigError: it is no size, or less than a byte.
    """
    match = _PATTERN.fullmatch(text.strip())
    size = 0
    if match:
        number, prefix = match[1], match[2] or " "
        size = int(
            float(number)
            * (1024 if prefix.endswith("i") else 1000) ** _PREFIXES.index(prefix[0].upper())
        )
    if size < 1:
        raise ConfigError(f"{name} must be a size such as 500MB, 1.5GB or 2GiB, not {text!r}")
    return size
