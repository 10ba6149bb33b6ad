"""No credential of an address is stored or shown: in settings, messages, logs and reports."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from samestep import log, storage
from samestep.addresses import credential_in, has_userinfo, shown
from samestep.config import dump, read_tree
from samestep.errors import ConfigError
from tests.addresses import AROUND, WITHOUT, with_credentials
from trainer.monitoring import report

SETTINGS = (
    "data.path",
    "init_from",
    "checkpoint.folder",
    "tokenizer.path",
    "output",
    "tracking.wandb.base_url",
    "some.notes",
)


def test_no_text_shows_a_credential() -> None:
    for address in with_credentials(1000):
        assert credential_in(address.text), address
        for around in AROUND:
            text = around.format(address.text)
            assert address.secret not in shown(text), text


def test_several_addresses_of_a_text_on_several_lines() -> None:
    addresses = list(with_credentials(600, seed=1))
    for number in range(0, len(addresses), 3):
        three = addresses[number : number + 3]
        text = "copied {}, then {}\nbut not {}: refused".format(*(each.text for each in three))
        assert not any(each.secret in shown(text) for each in three), text
        assert shown(text).startswith("copied ")


@pytest.mark.parametrize(
    "part",
    ["a", "a://", "http://h/?", "%3Fa%3Db", "?a=b;", "http://u:p@h/?sig=x ", "s3://@", "hf://a@b;"],
)
def test_a_long_text_of_a_stranger_does_not_take_minutes(part: str) -> None:
    text = f"http://h/{part * (2**18 // len(part))} ://"
    began = time.process_time()
    shown(text)
    credential_in(text)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("text", WITHOUT)
def test_addresses_without_credentials(text: str) -> None:
    assert credential_in(text) is None
    assert shown(f"'{text}' is odd, twice") == f"'{shown(text)}' is odd, twice"
    if "page=2" not in text and "+ssh" not in text:
        assert shown(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://KEY:SEC/RET@bucket/x: no", "s3://bucket/x: no"),
        ("'https://h/a(1).jsonl?name=a(1)&sig=x': bad", "'https://h/a(1).jsonl': bad"),
        ("https://u:p@[::1]:80/x?a b&sig=x, then https://b/c?", "https://[::1]:80/x, then https://b/c?"),
        ("(https://h/x?x)", "(https://h/x)"),
        ("https://h/a%253Fsig%253Dx", "https://h/a"),
    ],
)  # fmt: skip
def test_what_remains_is_of_use(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: 1\n")
    for number, address in enumerate(with_credentials(84, seed=2)):
        key = SETTINGS[number % len(SETTINGS)]
        value = ({"paths": [address.text]}, [{"path": address.text}], address.text)[number % 3]
        override = f"{key}={json.dumps(value)}"
        with pytest.raises(ConfigError, match=f"{key}.*: the address has a ") as refusal:
            read_tree(tmp_path / "base.yaml", [override])
        assert address.secret not in str(refusal.value)
        tree: object = value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree))
        with pytest.raises(ConfigError, match="the address has a ") as refusal:
            read_tree(tmp_path / "file.yaml")
        assert address.secret not in str(refusal.value)


def test_only_the_sources_of_a_dataset_may_be_signed(tmp_path: Path) -> None:
    signed = "https://host/a.jsonl?X-Amz-Signature=5ec7e7"
    (tmp_path / "data.yaml").write_text(f"source: {{kind: jsonl, paths: ['{signed}']}}\n")
    assert read_tree(tmp_path / "data.yaml")["source"]["paths"] == [signed]
    for override in (f"tokenizer.path='{signed}'", "source.paths=['https://me:5ec7e7@host/a']"):
        with pytest.raises(ConfigError, match=r"Leave it out, and put it where .*netrc") as refusal:
            read_tree(tmp_path / "data.yaml", [override])
        assert "5ec7e7" not in str(refusal.value)


def test_an_error_of_yaml_quotes_no_credential(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("path: https://me:5ec7e7@host/x: y\n")
    with pytest.raises(ConfigError, match=r"is not valid YAML: .*line 1") as refusal:
        read_tree(tmp_path / "x.yaml")
    assert "5ec7e7" not in str(refusal.value)


@dataclass(frozen=True)
class Settings:
    data: dict[str, str] = field(default_factory=dict)


def test_no_program_writes_one_into_a_configuration() -> None:
    with pytest.raises(ConfigError, match=r"data\.path: the address has a user name"):
        dump(Settings({"path": "https://me:5ec7e7@host/x"}))


def test_addresses_of_commands_are_refused() -> None:
    for address in with_credentials(500, seed=3):
        if has_userinfo(address.text):
            with pytest.raises(ConfigError) as refusal:
                storage.is_url(address.text)
            assert address.secret not in str(refusal.value)


def test_logs_and_their_tracebacks_hold_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(log.FILES, str(tmp_path))
    root, addresses = logging.getLogger(), list(with_credentials(200, seed=4))
    before = root.handlers[:], root.level
    try:
        log.set_up(rank=0)
        for address in addresses:
            try:
                raise OSError(f"cannot read {address.text}")
            except OSError as error:
                root.warning("%s failed: %s", address.text, error, exc_info=True)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    text = capsys.readouterr().err + (tmp_path / "rank-00000.log").read_text()
    assert text.count("Traceback") == 2 * len(addresses)
    assert not [address for address in addresses if address.secret in text]


def test_the_report_of_an_old_run_shows_none() -> None:
    config = {"data": {"path": "https://me:5ec7e7@host/x"}, "list": ["https://host/x?sig=5ec7e7"]}
    rows = report._settings([config])
    assert [row["values"] for row in rows] == [["https://host/x"], ['["https://host/x"]']]
