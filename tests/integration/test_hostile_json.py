"""Stored JSON of each kind in hostile variants: it is read, or ends with an error of its file."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.building.units import Outcome
from data_pipeline.format import row_lines
from data_pipeline.format.manifest import Manifest
from launch import records
from launch.tpu.slice import FILE as SLICE
from launch.tpu.slice import Slice
from launch.tpu.supervisor import Memory
from samestep.errors import DataError, SamestepError
from samestep.stored_json import parse_json
from tests.hostile_json import variants
from trainer.checkpoint.files import seal
from trainer.checkpoint.history import read_record
from trainer.checkpoint.lock import Owner
from trainer.elastic.host import Records
from trainer.inference.candidates import read_probes
from trainer.inference.resumable import Resumable
from trainer.inspect.audit.batches import Run
from trainer.inspect.audit.verify import verify
from trainer.inspect.certify.run import read as read_certificate
from trainer.inspect.replay.diff import _recorded
from trainer.monitoring.jsonl import JsonlTracker, read_rows
from trainer.monitoring.report import Report, page
from trainer.monitoring.wandb import _read_note
from trainer.studies.finetune.suite import read_results
from trainer.studies.row_scores import read_row_score
from trainer.training.ledger import GENESIS, Ledger, chain
from trainer.training.observers.heartbeat import Beat
from trainer.training.weights.loading import load_weights
from trainer.vectors.corpus import Words

SEED = 50
Read = Callable[[Path], object]


def _attempts(document: str, count: int) -> Iterator[tuple[str, bytes]]:
    return variants(document, SEED, count)


def _survives(read: Callable[[], object], what: str) -> None:
    """Runs a reader, which may reject its file in a short sentence."""
    try:
        with suppress(SamestepError):
            read()
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def _report(folder: Path) -> str:
    report = Report([str(folder)])
    return page(report.names, report.data())


def _resumable(folder: Path) -> None:
    with (folder / "output").open("ab") as file:
        Resumable(file, folder / "output.progress", {"a": 1})


def _study(folder: Path) -> dict[str, Any]:
    job = {"name": "j", "stage": "train", "arms": "a", "folder": "j", "run": "run"}
    return {"question": "?", "slots": 2, "running": ["j"], "jobs": [job]}


_USAGE = {"seconds": 1.0, "cpu_seconds": 1.0, "device_joules": 0.0, "cpu_joules": None}
_RESULT = {"task": "t", "run": "r", "settings": {"lr": 0.1}, "seed": 1, "digest": "d"} | {
    "scores": {"accuracy": 0.5},
    "steps": 5,
    "seconds": 1.0,
    "learned": True,
}
_JOB = {"id": "1", "kind": "slurm", "name": "n", "output": "/o", "folder": "/f", "time": 1.0}
_BEAT = {"rank": 0, "node": "n", "pid": 1, "time": 1.0, "step": 1, "doing": "x"} | {
    "collective": "",
    "seconds": 1.0,
    "what": "",
    "patient": False,
}
_OUTCOME = {"build": "b", "digest": "d", "documents_in": 3, "rejected": [[0, 1, "short"]]} | {
    "shards": {"train": {"name": "a", "documents": 1, "tokens": 2, "bytes": 3, "sha256": "0" * 64}},
    "unknown": 0,
    "examples": {"train": {"concat": 3}},
}
_DIGESTS = {"step": 1, "time": 1.0, "batch": "b", "loss": 1.0, "norms": [1.0]} | {
    "gradients": {"a": "0"},
    "state": {"a": "0"},
}
_SLICE = {"name": "n", "project": "p", "zone": "z", "staging": "gs://b/s", "mark": "m"} | {
    "create": ["gcloud"],
    "stop_seconds": 1.0,
    "supervise": True,
    "poll_seconds": 1.0,
    "silence_seconds": 1.0,
}
_PREDICTION = {"label": "a", "prediction": "b", "probabilities": {"a": 0.5, "b": 0.5}}
_ROW = {"texts": ["a b"], "label": 1, "answers": [], "group": "", "spans": [[0, 1, 0]]}
_CERTIFICATE = {"digests": {"fp32": {"state": {"a": "0"}}}, "ranks": [{}]}

SMALL: dict[str, tuple[str, object, Read]] = {
    "study": ("study.json", _study(Path()), _report),
    "job": ("result.json", {"scores": {"a": 1.0}, "usage": _USAGE, "flops": 1.0}, _report),
    "suite": (
        "suite.json",
        {"slots": 1, "runs": [{**_RESULT, "folder": "f", "score": "accuracy"}]},
        _report,
    ),
    "results": ("results.jsonl", _RESULT, read_results),
    "results on the page": ("results.jsonl", _RESULT, _report),
    "predictions": (
        "rows.jsonl",
        _PREDICTION,
        lambda folder: read_row_score(folder / "rows.jsonl", "f1"),
    ),
    "outcome": ("0.json", _OUTCOME, lambda folder: Outcome.load(folder / "0.json")),
    "owner": (".owner", None, lambda folder: str(Owner.parse((folder / ".owner").read_bytes()))),
    "lease": (
        ".lease-00000001",
        {"step": 1, "of": 0, "names_after": 1, "token": "t"},
        lambda folder: read_record(folder, 1),
    ),
    "host": (
        ".host-00000001",
        {"host": "h", "port": 1, "renewals": 0, "token": "t"},
        lambda folder: Records(folder).newest(),
    ),
    "beat": ("beat", _BEAT, lambda folder: _parsed(folder / "beat", Beat)),
    "progress": (
        "output.progress",
        {"bytes": 0, "records": 0, "rows": 0, "made_of": {"a": 1}},
        _resumable,
    ),
    "probes": (
        "probes.jsonl",
        {"text": "a [MASK]", "candidates": ["b", "c"], "label": "b", "group": "g"},
        lambda folder: read_probes(str(folder / "probes.jsonl")),
    ),
    "words": ("words.json", [["a"], [1], [2]], lambda folder: Words.load(folder / "words.json")),
    "W&B's note": ("wandb.json", {"id": "a", "sent": 1}, _read_note),
    "certificate": (
        "c.json",
        _CERTIFICATE,
        lambda folder: read_certificate(folder / "c.json"),
    ),
    "digests": ("digests.jsonl", _DIGESTS, lambda folder: _recorded(str(folder))),
    "row of a task": ("row", _ROW, lambda folder: _row(folder / "row")),
    "slice": (SLICE, _SLICE, Slice.of),
    "supervisor": ("supervisor.json", asdict(Memory()), Memory.of),
    "jobs": ("samestep/jobs.jsonl", _JOB, lambda folder: records.newest_first()),
}


def _parsed(file: Path, schema: type[object]) -> None:
    try:
        parse_json(file.read_bytes(), schema)
    except ValueError as error:  # its caller counts the sender as silent
        raise DataError(str(error)) from error


def _row(file: Path) -> None:
    try:
        row_lines.load(file.read_bytes())
    except ValueError as error:  # its caller names the shard
        raise DataError(str(error)) from error


@pytest.mark.parametrize("name", SMALL)
def test_small_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file, content, read = SMALL[name]
    path = tmp_path / file
    if name == "job":
        (tmp_path / "study.json").write_text(json.dumps(_study(tmp_path)))
        path = tmp_path / "j" / file
    if name == "results on the page":
        (tmp_path / "suite.json").write_text(json.dumps(SMALL["suite"][1]))
    path.parent.mkdir(exist_ok=True)
    if name == "owner":
        content = asdict(Owner.this_process())
    path.write_text(json.dumps(content))
    read(tmp_path)  # the document itself is taken
    for what, variant in _attempts(json.dumps(content), 20):
        path.write_bytes(variant)
        _survives(lambda: read(tmp_path), f"{name}: {what}")
        if name in ("owner", "lease"):
            path.write_bytes(seal({"x": 1}) if variant == b"" else variant)
            _survives(lambda: read(tmp_path), f"{name}: {what}")


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns("step-00000008"))
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl", "alerts.jsonl"])
def test_a_bad_row_keeps_neither_a_training_nor_a_page(run: Path, name: str) -> None:
    logging.disable()
    path = run / name
    alert = {"step": 1, "time": 1.0, "level": "WARN", "title": "t", "text": "x"}
    lines = path.read_bytes().splitlines() if path.exists() else [json.dumps(alert).encode()] * 2
    for what, variant in _attempts(lines[0].decode(), 10):
        path.write_bytes(b"\n".join([variant, *lines[1:], b'{"torn']))
        _survives(lambda: _report(run), f"{name}: {what}")
        tracker = JsonlTracker(path, resume_step=12)
        tracker.log(13, {})
        tracker.close()
        steps = [row["step"] for row in read_rows(path)]
        # Neither the rows after the bad one are lost, nor the one behind the torn line.
        assert steps[-len(lines) :] == [*(json.loads(line)["step"] for line in lines[1:]), 13], what
    logging.disable(logging.NOTSET)


def test_the_rows_of_a_ledger(run: Path) -> None:
    logging.disable()
    path = run / "ledger.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    head, more = rows[-1]["head"], {"step": 12, "time": 1.0, "order": 0}
    rows += [
        {**more, "kind": "excluded", "examples": [[5, 9]], "reason": "nan"},
        {**more, "kind": "corrupt", "dataset": "d", "shard": "s", "first": 4},
        {**more, "kind": "lost", "before": "x"},
    ]
    for hostile in (0, 1, len(rows) - 3, len(rows) - 2, len(rows) - 1):
        for what, variant in _attempts(json.dumps(rows[hostile]), 4):
            path.write_bytes(_chained([*rows[:hostile], variant, *rows[hostile + 1 :]]))
            _survives(lambda: _report(run), what)
            ledger = Ledger()
            ledger.head = head
            _survives(lambda ledger=ledger: ledger.open(path, 12), what)
            ledger.close()
    logging.disable(logging.NOTSET)


def _chained(rows: list[Any]) -> bytes:
    """The lines of a ledger whose heads are right: a stranger can compute them, too."""
    head, lines = GENESIS, []
    for row in rows:
        if isinstance(row, bytes):
            try:
                row = {**json.loads(row)}
                head = chain(head, row)
            except (ValueError, TypeError, RecursionError):
                lines.append(row if isinstance(row, bytes) else b"x")
                continue
        else:
            head = chain(head, row)
        lines.append(json.dumps({**row, "head": head}).encode())
    return b"\n".join(lines) + b"\n"


def test_a_damaged_row_of_a_ledger_is_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / "ledger.jsonl"
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"first_step"', b'"first_stop"') + b"".join(others))
    verdict = verify(Run.open(str(run), []))
    assert any(problem.startswith("line 2 of ") for problem in verdict.problems)
    assert "first_step is missing" in caplog.text
    assert "ledger.jsonl, line 2: first_step is missing (1 in all)" in _report(run)


@pytest.mark.parametrize("name", ["meta.json", "checksums.json", "rank-00000.safetensors"])
def test_the_files_of_a_checkpoint(run: Path, name: str) -> None:
    step = run / "checkpoints" / "step-00000012"
    original = (step / name).read_bytes()
    document = original
    if name.endswith(".safetensors"):
        length = int.from_bytes(original[:8], "little")
        document = original[8 : 8 + length]
    for what, variant in _attempts(document.decode(), 15):
        content = variant
        if name.endswith(".safetensors"):
            body = original[8 + length :]
            content = len(variant).to_bytes(8, "little") + variant + body
        (step / name).write_bytes(content)
        if name != "checksums.json":
            _seal(step)
        else:
            (step / "COMMITTED").write_text(hashlib.sha256(content).hexdigest())
        _survives(lambda: load_weights(str(step)), f"{name}: {what}")


def _seal(step: Path) -> None:
    """Lists the files of a step with right checksums: a stranger can do that, too."""
    names = [path.name for path in step.iterdir()]
    listed = {}
    for name in sorted({*names} - {"checksums.json", "COMMITTED", "LEASE"}):
        content = (step / name).read_bytes()
        listed[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    checksums = json.dumps(listed).encode()
    (step / "checksums.json").write_bytes(checksums)
    (step / "COMMITTED").write_text(hashlib.sha256(checksums).hexdigest())


def test_a_manifest(dataset_folder: Path) -> None:
    tree = json.loads((dataset_folder / "manifest.json").read_text())
    del tree["checksum"]
    tree["settings"]["task"] = {"target": "classification", "labels": ["a", "b"]}

    def read(content: bytes) -> None:
        manifest = Manifest.parse(content, "manifest.json")
        str((manifest.digest, manifest.shards, manifest.task, manifest.token_dtype))

    for what, variant in _attempts(json.dumps(tree), 100):
        _survives(lambda content=variant: read(content), what)
