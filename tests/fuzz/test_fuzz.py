from pathlib import Path

import pytest

from tests.fuzz import trial
from tests.fuzz.mutations import named
from tests.fuzz.run import TARGETS
from tests.fuzz.trial import Target

_EXAMPLES = 20  # with the same seed each time; `make fuzz` tries others


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_readers_return_or_raise_an_error_of_samestep(name: str, tmp_path: Path):
    outcome = trial.run(TARGETS[name], _EXAMPLES, tmp_path / "fuzz")
    assert outcome.tried >= _EXAMPLES // 2
    assert not outcome.failures
    # The first example is a file without a change. A channel ends when its peer does.
    assert outcome.accepted or name == "channel"


def _raises(_folder: Path) -> object:
    raise KeyError("x")


def _allocates(_folder: Path) -> object:
    return b"x" * 2**29


def _leaves(folder: Path) -> object:
    return (folder.parent.parent / "elsewhere").write_text("x")


@pytest.mark.parametrize(
    ("read", "what"),
    [(_raises, "KeyError at"), (_allocates, "it takes 5"), (_leaves, "Breach at")],
)
def test_the_harness_notices(read, what: str, tmp_path: Path):
    from hypothesis import strategies as st

    target = Target("x", lambda: named("a", st.just(b"")), read)
    (failure,) = trial.run(target, 1, tmp_path / "fuzz").failures
    assert failure.startswith(what)
    assert not (tmp_path / "elsewhere").exists()
