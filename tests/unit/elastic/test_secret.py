"""The secret of a run: where it comes from, and who can read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from samestep.errors import ConfigError, StorageError
from trainer.checkpoint.urls import Url
from trainer.elastic import secret


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.ENVIRONMENT, raising=False)


def test_the_host_creates_it_and_the_others_wait(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    assert secret.read(folder, create=False) is None
    assert not folder.exists()
    before = os.umask(0)
    try:
        created = secret.read(folder, create=True)
    finally:
        os.umask(before)
    assert created is not None
    assert len(created) >= 32
    assert stat.S_IMODE((folder / secret.NAME).stat().st_mode) == 0o600
    assert os.listdir(folder) == [secret.NAME]
    assert secret.read(folder, create=False) == secret.read(folder, create=True) == created
    assert secret.read(tmp_path / "other", create=True) != created


def test_its_content_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def observed_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def observed_replace(source: Path, target: Path) -> None:
        assert synced == [source]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", observed_fsync)
    monkeypatch.setattr(os, "replace", observed_replace)
    assert secret.read(tmp_path, create=True) is not None
    assert synced[1:] == [tmp_path], "a name becomes durable with its folder"


def test_one_that_others_can_read_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run's folder, where the file system may know no modes, it is a warning."""
    created = secret.read(tmp_path, create=True)
    file = tmp_path / secret.NAME
    file.chmod(0o644)
    assert secret.read(tmp_path, create=False) == created
    assert "can be read by other users" in caplog.text
    monkeypatch.setenv(secret.ENVIRONMENT, str(file))
    with pytest.raises(ConfigError, match=r"which every user can read\. Change its mode to 600"):
        secret.read(tmp_path, create=False)
    file.chmod(0o440)  # as Kubernetes mounts it
    assert secret.read(tmp_path / "unused", create=True) == created
    assert not (tmp_path / "unused").exists()
    assert created is not None
    assert created.decode() not in caplog.text


def test_in_a_bucket(s3_folder: str) -> None:
    folder = Url(s3_folder)
    assert secret.read(folder, create=False) is None
    created = secret.read(folder, create=True)
    assert created is not None
    assert secret.read(folder, create=False) == secret.read(folder, create=True) == created


def test_files_that_hold_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    monkeypatch.setenv(secret.ENVIRONMENT, str(file))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        secret.read(tmp_path, create=True)
    file.write_text("password\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no secret of at least 32 bytes") as error:
        secret.read(tmp_path, create=True)
    assert "password" not in str(error.value)


@pytest.mark.parametrize("content", ["", "\n", 31 * "x"])
def test_an_empty_or_short_file_in_the_folder_is_no_secret(tmp_path: Path, content: str) -> None:
    """A power cut may have left it empty; everybody knows the empty key."""
    (tmp_path / secret.NAME).write_text(content)
    (tmp_path / secret.NAME).chmod(0o600)
    for create in (True, False):
        with pytest.raises(ConfigError, match=r"\.secret holds no secret of .* Remove it"):
            secret.read(tmp_path, create)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(64 * "x")
    (tmp_path / secret.NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="cannot read"):
        secret.read(tmp_path, create=True)
