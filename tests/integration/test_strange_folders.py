"""Folders of strangers: nothing outside of them is read or written, and no code of theirs runs."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import boto3
import pytest
import torch
import yaml
from safetensors.torch import save_file

from data_pipeline.building.verify import verify
from data_pipeline.reading.dataset import Dataset
from samestep.cli import build_parser
from samestep.errors import CheckpointError, SamestepError
from samestep.storage import Digest, objects
from tests.conftest import Samestep
from tests.damage import KINDS, time_limit, with_unreadable_files
from trainer.checkpoint import files, integrity
from trainer.checkpoint.urls import Url
from trainer.inspect.audit.batches import Run
from trainer.monitoring.report import write_report
from trainer.training.weights.loading import load_config, load_weights

LOOKING = {
    "samestep report",
    "samestep watch",
    "samestep checkpoint ls",
    "samestep checkpoint verify",
    "samestep checkpoint gc",
    "samestep data verify",
    "samestep data inspect",
    "samestep data push",
    "samestep data export",
}
"""Commands that import no module which a folder names."""
MODULE = "strange_module.inner"
EXPLAINED = (SamestepError, IsADirectoryError, FileNotFoundError)
"""Errors that a command shows in one line."""


@pytest.fixture
def strange_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A run of which every kind is a module that lies in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])  # receives this folder
    (tmp_path / "strange_module").mkdir()
    (tmp_path / "strange_module" / "__init__.py").touch()
    (tmp_path / "strange_module" / "inner.py").write_text("raise SystemExit('the code ran')\n")
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for section in ("model", "objective", "optimizer", "strategy", "accelerator"):
        settings[section] = {"kind": MODULE}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    for step in (run / "checkpoints").glob("step-*"):
        meta = json.loads((step / "meta.json").read_text())
        meta["config"] = settings
        (step / "meta.json").write_text(json.dumps(meta))
        seal(step)
    yield run
    for name in [name for name in sys.modules if name.startswith("strange_module")]:
        del sys.modules[name]


def seal(step: Path, names: dict[str, Path] | None = None) -> None:
    """Writes a step's checksums anew, as its author would, with some files under other names."""
    own = {path.name: path for path in step.iterdir()}
    del own["checksums.json"], own["COMMITTED"]
    checksums = {}
    for name, path in {**own, **(names or {})}.items():
        with path.open("rb") as file:
            checksums[name] = dataclasses.asdict(Digest.of(file))
    content = json.dumps(checksums).encode()
    (step / "checksums.json").write_bytes(content)
    lease = (step / "COMMITTED").read_text()[64:]
    (step / "COMMITTED").write_text(hashlib.sha256(content).hexdigest() + lease)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _commands(inner)
    if parser.get_default("run"):
        yield parser


def test_commands_that_only_look_say_so() -> None:
    looking = {each.prog for each in _commands(build_parser()) if each.get_default("looks")}
    assert looking == LOOKING


def test_commands_that_only_look_import_no_module_of_a_run(
    strange_run: Path, samestep: Samestep, tmp_path: Path, dataset_folder: Path
) -> None:
    for arguments in (
        ("report", strange_run, "-o", tmp_path / "report.html"),
        ("watch", strange_run, "--once", "-o", tmp_path / "watch.html"),
        ("checkpoint", "ls", strange_run),
        ("checkpoint", "verify", strange_run),
        ("checkpoint", "gc", strange_run, "--dry-run"),
        ("data", "inspect", dataset_folder),
    ):
        result = samestep(*arguments)
        assert result.code == 0, result.err
        assert MODULE not in sys.modules


def test_commands_that_need_the_model_say_so_before_they_import_it(
    strange_run: Path, samestep: Samestep, tmp_path: Path
) -> None:
    for arguments in (
        ("fill", strange_run, "a [MASK]"),
        ("export", strange_run, tmp_path / "exported"),
        ("evaluate", strange_run),
        ("ledger", "step", strange_run, "3"),
        ("average", strange_run, tmp_path / "average", "--last", "2"),
        ("sync", strange_run),
    ):
        with pytest.raises(SystemExit, match="the code ran"):
            samestep(*arguments)


def test_the_import_is_announced(strange_run: Path, samestep: Samestep) -> None:
    (strange_run.parent / "strange_module" / "inner.py").write_text("raise ImportError\n")
    result = samestep("fill", strange_run, "a [MASK]")
    assert f"importing the module {MODULE}, which" in result.err


@pytest.mark.parametrize("base", ["secret.yaml", ["secret.yaml"], "/dev/zero", "config.yaml"])
def test_a_stored_configuration_has_no_base(
    finished_run: Path, samestep: Samestep, tmp_path: Path, base: object
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "secret.yaml").write_text("token: SECRET\n")
    with (run / "config.yaml").open("a") as file:
        file.write(f"base: {json.dumps(base)}\n")
    for arguments in (
        ("report", run, "-o", tmp_path / "report.html"),
        ("checkpoint", "ls", run),
        ("ledger", "verify", run),
        ("evaluate", run),
    ):
        with time_limit(str(arguments)):
            result = samestep(*arguments)
        assert "SECRET" not in result.out + result.err
    assert result.code == 2
    assert "has base" in result.err
    assert "SECRET" not in (tmp_path / "report.html").read_text()


def test_a_stored_configuration_is_no_file_elsewhere_and_not_large(
    finished_run: Path, samestep: Samestep, tmp_path: Path
) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret.yaml"
    shutil.copytree(finished_run, run)
    settings = (run / "config.yaml").read_text()
    secret.write_text(f"{settings}token: SECRET\n")
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(secret)
    assert samestep("report", run, "-o", tmp_path / "report.html").code == 0
    assert "SECRET" not in (tmp_path / "report.html").read_text()
    result = samestep("checkpoint", "ls", run)
    assert result.code == 2
    assert "a link to a file elsewhere" in result.err
    (run / "config.yaml").unlink()
    (run / "config.yaml").write_text(settings + "#" * 2**20)
    result = samestep("checkpoint", "ls", run)
    assert result.code == 2
    assert "more than 1048576 bytes" in result.err


@pytest.mark.parametrize(
    "name", ["../step-00000008/rank-00000.safetensors", "/dev/zero", "COMMITTED", "a\nb", "con"]
)
def test_checksums_name_files_of_their_step_only(
    finished_run: Path, tmp_path: Path, name: str
) -> None:
    """With the right hash, tensors of another run would be loaded and exported."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    step = run / "checkpoints" / "step-00000012"
    file = step / (name if name.startswith("..") else "meta.json")
    (step / "rank-00000.safetensors").unlink()
    seal(step, {name: file})
    with time_limit(name), pytest.raises(CheckpointError, match="names the file"):
        integrity.read_checksums(step)
    with time_limit(name), pytest.raises(CheckpointError):
        load_weights(step)


def test_tensors_are_not_behind_a_link(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    step = run / "checkpoints" / "step-00000012"
    other = finished_run / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    (step / "rank-00000.safetensors").unlink()
    (step / "rank-00000.safetensors").symlink_to(other)
    seal(step)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_weights(step)


def test_the_lock_of_a_folder_is_no_other_file(
    finished_run: Path, samestep: Samestep, tmp_path: Path
) -> None:
    """Opening it for writing would empty the file behind a link, and wait at a FIFO."""
    run, precious = tmp_path / "run", tmp_path / "precious"
    shutil.copytree(finished_run, run)
    precious.write_text("precious")
    for make in (lambda path: path.symlink_to(precious), KINDS[0]):
        (run / "checkpoints" / ".lock").unlink(missing_ok=True)
        make(run / "checkpoints" / ".lock")
        with time_limit("gc"):
            result = samestep("checkpoint", "gc", run)
        assert result.code == 1
        assert "cannot be locked" in result.err
    assert precious.read_text() == "precious"


def _dataset(folder: Path) -> None:
    verify(folder)
    dataset = Dataset.open(folder)
    for shard in dataset.manifest.shards:
        dataset.open_shard(shard, verify=True)


def _run(folder: Path) -> None:
    write_report([str(folder)], folder.parent / "report.html")
    Run.open(str(folder), [])


def _checkpoint(folder: Path) -> None:
    _weights(folder)
    integrity.check_content(folder / "checkpoints" / "step-00000012")


def _weights(folder: Path) -> None:
    weights = load_weights(folder)
    weights.load_tokenizer()
    list(weights.tensors.items())


@pytest.mark.parametrize("read", [_dataset, _run, _weights, _checkpoint])
def test_no_file_of_a_folder_blocks_or_has_no_end(
    read: Callable[[Path], None],
    finished_run: Path,
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    folder = tmp_path / "folder"
    if read is _dataset:
        shutil.copytree(dataset_folder, folder)
    elif read is not _weights:
        others = "checkpoints" if read is _run else "step-00000008"
        shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns(others))
    else:
        assert samestep("export", finished_run, folder).code == 0
    tried = 0
    for description in with_unreadable_files(folder):
        tried += 1
        with time_limit(description), suppress(*EXPLAINED):
            read(folder)
    assert tried >= 20


def _adapter(folder: Path, base: object) -> Path:
    """Writes a folder of the `peft` library that names a base."""
    folder.mkdir()
    content = {"peft_type": "LORA", "base_model_name_or_path": base, "r": 1, "lora_alpha": 1}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_leads_to_no_code_and_no_address(
    strange_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("samestep.storage.attempts._open", asked.append)
    bases = {
        "samestep export": (strange_run, strange_run / "checkpoints" / "step-00000012", "adapter"),
        "names no model": (
            "http://localhost:1/x",
            "s3://bucket/x",
            "hf://../x",
            "../x",
            "file:///x",
        ),
        "does not say": ("", None, 5, ["x"], "a\0b"),
    }
    for message, names in bases.items():
        for base in names:
            folder = _adapter(tmp_path / "adapter", str(base) if isinstance(base, Path) else base)
            for load in (load_weights, load_config):
                with pytest.raises(SamestepError, match=message):
                    load(folder)
            shutil.rmtree(folder)
    assert not asked
    assert MODULE not in sys.modules


def test_an_adapter_of_a_folder_of_hugging_face(
    finished_run: Path, samestep: Samestep, tmp_path: Path
) -> None:
    assert samestep("export", finished_run, tmp_path / "base").code == 0
    # Its base is read; the adapter itself has no tensors of LoRA.
    with pytest.raises(CheckpointError, match="has no lora_A"):
        load_weights(_adapter(tmp_path / "adapter", str(tmp_path / "base")))


def test_keys_of_a_bucket_do_not_lead_out_of_the_folder(
    s3_folder: str, samestep: Samestep, tmp_path: Path
) -> None:
    bucket, _, prefix = s3_folder.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    keys = ("corpus/a.jsonl", "corpus/../../../../home/.bashrc", "corpus/x/../../../b.jsonl")
    for key in keys:
        client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b'{"text": "a"}\n')
    recipe = tmp_path / "work" / "data.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        f'source: {{kind: jsonl, paths: ["{s3_folder}/corpus/**"]}}\n'
        f"tokenizer: {{path: {tmp_path / 'tokenizer'}}}\noutput: {tmp_path / 'dataset'}\n"
    )
    result = samestep("fetch", recipe, "--to", tmp_path / "work" / "raw")
    assert result.code == 1
    assert "leads out of the folder" in result.err
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - {recipe}
    assert all(path.is_relative_to(tmp_path / "work" / "raw") for path in written)


@pytest.mark.parametrize("name", ["..", "../x", "/x", "a\nb", "nul", ""])
def test_a_folder_of_a_store_is_copied_into_its_folder_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "names", lambda url: [name])
    monkeypatch.setattr(objects, "read", lambda url: b"{}")
    with pytest.raises(CheckpointError, match="cannot hold a file named"):
        files.copy_folder(Url("s3://bucket/tokenizer"), tmp_path / "copy")
    assert not list(tmp_path.rglob("*"))
