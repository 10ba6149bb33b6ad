"""Environments that differ from a developer's: of other launchers, users and terminals."""

from __future__ import annotations

import io
import pwd
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from data_pipeline.reading.cache import default_folder
from data_pipeline.reading.config import Config as DataConfig
from launch.records import state_folder
from samestep import cli, environment
from samestep.errors import ConfigError, LaunchError
from trainer.inspect import cli as inspect

COMPLETE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMPLETE:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, None), ({"WORLD_SIZE": "1"}, None), ({"RANK": ""}, None), (COMPLETE, 1)],
)
def test_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int | None
) -> None:
    set_all(monkeypatch, **variables)
    assert environment.launcher_rank() == rank


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "has RANK of a launcher, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4"}, "has WORLD_SIZE of a launcher, but not RANK, MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR, MASTER_PORT. Unset RANK and"),
        ({**COMPLETE, "RANK": "2"}, "RANK in the environment is 2 and WORLD_SIZE is 2"),
        ({**COMPLETE, "RANK": "one"}, "RANK in the environment is 'one'. Use a whole number"),
        ({**COMPLETE, "WORLD_SIZE": "2.0"}, "WORLD_SIZE in the environment is '2.0'"),
        ({**COMPLETE, "MASTER_PORT": "http"}, "MASTER_PORT in the environment is 'http'"),
    ],
)
def test_leftovers_of_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    set_all(monkeypatch, **variables)
    with pytest.raises(LaunchError, match=message):
        environment.launcher_rank()


def test_commands_that_do_not_train_ignore_leftovers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], experiment_file: str
) -> None:
    set_all(monkeypatch, RANK="three")
    assert cli.main(["config", experiment_file]) == 0
    assert "seed: 0" in capsys.readouterr().out
    assert cli.main(["train", experiment_file]) == 1
    assert "RANK of a launcher, but not WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "threads"), [(None, 6), ("", 6), (" ", 6), ("4", 4), ("4,2", 4), ("8, 2", 8)]
)
def test_omp_threads(monkeypatch: pytest.MonkeyPatch, value: str | None, threads: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert environment.omp_threads(6) == threads


@pytest.mark.parametrize("value", ["many", "0", "-1", "a,2"])
def test_wrong_omp_threads(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(LaunchError, match=f"OMP_NUM_THREADS in the environment is '{value}'"):
        environment.omp_threads(6)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry among the users, as in many containers."""

    def unknown(_: object) -> NoReturn:
        raise KeyError("no such user")

    for name in ("HOME", "XDG_STATE_HOME", "SAMESTEP_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, dataset_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"this user has none. Set SAMESTEP_CACHE, or HOME"):
        default_folder()
    with pytest.raises(ConfigError, match="Set XDG_STATE_HOME, or HOME"):
        state_folder()
    with pytest.raises(ConfigError, match=r"~/cache is in the home folder.* Set data.cache"):
        DataConfig(path="https://localhost/data", cache="~/cache").open()
    assert DataConfig(path=str(dataset_folder)).open().name == str(dataset_folder)
    monkeypatch.setenv("SAMESTEP_CACHE", "/cache")
    assert default_folder() == Path("/cache")


@pytest.mark.usefixtures("homeless")
def test_a_library_that_needs_a_home_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], experiment_file: str
) -> None:
    monkeypatch.setattr(inspect, "_config", lambda args: Path("~").expanduser())
    assert cli.main(["config", experiment_file]) == 2
    assert "this user has no home folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("latin-1", "# -> ... é \\u65e5 \\udcff \\U0001f600"),
        ("ascii", "# -> ... \\xe9 \\u65e5 \\udcff \\U0001f600"),
        ("utf-8", "█ → … é 日 \\udcff 😀"),
    ],
)
def test_any_text_can_be_written(
    monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    environment.prepare_streams()
    sys.stdout.write("█ → … é 日 \udcff 😀")
    sys.stdout.flush()
    assert written.getvalue().decode(encoding) == expected


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_pages_of_a_dataset_on_an_old_terminal(
    monkeypatch: pytest.MonkeyPatch, dataset_folder: Path, experiment_file: str, encoding: str
) -> None:
    show = ("show", str(dataset_folder), "--objective", experiment_file, "--count", "1")
    for arguments, sign in ((("inspect", str(dataset_folder)), "####"), (show, "->")):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert cli.main(["data", *arguments]) == 0
        sys.stdout.flush()
        assert sign in written.getvalue().decode(encoding)
