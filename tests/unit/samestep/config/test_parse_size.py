"""Sizes are read strictly, in both kinds of units."""

import pytest

from samestep.config import parse_size
from samestep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("1kB", 1000),
        ("1KB", 1000),
        ("500MB", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("2 GiB", 2 * 2**30),
        ("1KiB", 1024),
        ("3TB", 3 * 10**12),
        ("1PiB", 2**50),
    ],
)
def test_units_are_powers_of_1000_or_of_1024(text, size):
    assert parse_size(text, "limit") == size


@pytest.mark.parametrize(
    "text",
    ["", "1", "GB", "-1GB", "0GB", "0.1B", "1G", "1gb", "1e3MB", "1 000MB", "1GB 2MB", "1.GB"],
)
def test_other_texts_are_rejected_with_the_setting_and_the_value(text):
    with pytest.raises(ConfigError, match="limit must be a size such as") as caught:
        parse_size(text, "limit")
    assert repr(text) in str(caught.value)
