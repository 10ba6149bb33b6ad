"""What tests of Cloud TPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.launch.tpu_control_plane import ControlPlane


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    plane = ControlPlane()
    yield plane
    plane.close()
