"""Settings of generation for `samestep evaluate RUN --generate`."""

from __future__ import annotations

from typing import Any, cast

import pytest

from samestep.errors import ConfigError
from trainer.inference.scores import evaluate


def test_a_setting_that_a_later_one_drops_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"search=beam comes after search.beams and drops it"):
        evaluate(cast(Any, None), None, ["search.beams=4", "search=beam"], [])
