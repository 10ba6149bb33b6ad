"""Amounts of data as people write them: "1GB", "512 MiB"."""

from __future__ import annotations

import re

from samestep.errors import ConfigError

DEFAULT_CACHE = "100GB"
"""Maximum size of the cache of downloaded shards."""

_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGTP])(i?))?B")


def parse_size(text: str, name: str) -> int:
    """Converts a size to bytes: kB, MB, GB, ... are powers of 1000, KiB, MiB, ... of 1024.

    Args:
        name: setting of this value, for the message.

    Raises:
        ConfigError: the text is no size, or it is less than a byte.
    """
    size = 0
    if match := _PATTERN.fullmatch(text.strip()):
        number, prefix, binary = match.groups()
        power = " KMGTP".index(prefix.upper()) if prefix else 0
        size = int(float(number) * (1024 if binary else 1000) ** power)
    if size < 1:
        raise ConfigError(f"{name} must be a size such as 500MB, 1.5GB or 2GiB, not {text!r}")
    return size
