"""What tests of several packages share.

A small real dataset, an experiment on it, and the `samestep` command.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import numpy as np
import pytest

from samestep.cli import main
from tests.faulty_proxy import FaultyProxy, faulty_proxy
from tests.integration.commands import SAMESTEP, UNFORKED, Process, Result, Samestep, Start
from tests.processes import FastSpawn

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a shell; commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB_SIZE = 600
UNTIL = "SAMESTEP_TEST_UNTIL"
"""Environment variable, seconds since 1970: tests that would start later are skipped."""
NO_TIME = f"no time left ({UNTIL})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With little time, the files of long tests are run in another order each time."""
    if until := os.environ.get(UNTIL):
        items.sort(
            key=lambda item: (
                zlib.crc32(f"{until} {item.path.name}".encode())
                if item.get_closest_marker("long")
                else 0
            )
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if late := sum(NO_TIME in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"skipped: {late}, {NO_TIME}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def quicker() -> Iterator[None]:
    """Builds take their workers from the tests' fork server, and the same YAML is parsed once.

    Commands that run in an interpreter of their own spawn their workers and parse what they read.
    """
    from data_pipeline.building import pool
    from samestep.config import tree

    parse, parsed = tree._parse, dict[tuple[str, str], bytes]()

    def parse_once(text: str, where: str) -> object:
        if (text, where) not in parsed:
            parsed[text, where] = pickle.dumps(parse(text, where))
        return pickle.loads(parsed[text, where])  # noqa: S301 what was dumped above

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_parse", parse_once)
        patch.setattr(pool, "multiprocessing", FastSpawn())
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """Models are initialized alike in each run of the tests, in any order and number of workers."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def forget_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test has written and imported would shadow those of another test."""
    before = set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        # Not by getattr: TensorBoard has a module that answers any name with a number.
        values = getattr(sys.modules[name], "__dict__", {})
        places = (values.get("__file__"), *values.get("__path__", ()))
        if any(place and place.startswith(temporary) for place in places):
            del sys.modules[name]


def make_dataset(
    folder: Path,
    algorithm: Literal["wordpiece", "unigram"] = "wordpiece",
    vocabulary: int = VOCAB_SIZE,
) -> Path:
    """About 1,300 paragraphs of English in 5 train shards and 1 held-out shard, WordPiece tokens,
    with sentences.

    A `unigram` tokenizer has 100 sentinels besides.
    """
    from data_pipeline.format.manifest import ShardInfo
    from data_pipeline.format.writing import write_shard
    from data_pipeline.tokenizers.sentences import split, splitter_version
    from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
    from tests.datasets import save_manifest

    folder.mkdir()
    paragraphs = [p for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()][
        ::2
    ]
    tokenizer = TokenizerConfig("", algorithm, vocabulary, lowercase=True).train(paragraphs[:400])
    tokenizer.save(folder / "tokenizer")
    documents = tokenizer.encode_batch(paragraphs)
    sizes = [
        [len(part) for part in tokenizer.encode_batch(split(text, "rules"))] for text in paragraphs
    ]
    sentences = [np.cumsum([0, *size[:-1]]) for size in sizes]
    origin = np.array([(0, line) for line in range(len(documents))], dtype=np.uint32)
    dtype = np.dtype(np.uint16)

    def write(name: str, chosen: slice) -> ShardInfo:
        return write_shard(
            folder / name, documents[chosen], origin[chosen], dtype, sentences[chosen]
        )

    train = tuple(write(f"train-{i:06d}.tar", slice(1 + i, None, 6)) for i in range(5))
    heldout = (write("heldout-000000.tar", slice(None, None, 60)),)
    settings = {"sentences": splitter_version("rules")}
    splits = {"train": train, "heldout": heldout}
    save_manifest(folder, "topics", len(documents), splits, settings)
    return folder


def write_experiment(dataset: Path, path: Path) -> str:
    """A run that takes a second: a BERT of 2 layers of 32. Give it output=FOLDER."""
    path.write_text(
        f"""
output: set-by-the-test
accelerator: cpu
data: {{path: {dataset}, sequence_length: 32, packing: best_fit, lanes: 16}}
model: {{kind: bert, vocab_size: {VOCAB_SIZE}, layers: 2, width: 32, heads: 2, ffn_width: 64, max_positions: 32,
  dropout: 0.1, attention_dropout: 0.0}}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-3}}
schedule: {{warmup_steps: 4}}
training: {{steps: 12, global_batch_size: 10, micro_batch_size: 4, log_every: 1, collective_timeout: 60}}
checkpoint: {{every: 1000}}
"""  # noqa: E501
    )
    return str(path)


def pytest_configure() -> None:
    # Under nohup, which tests of the signal would inherit.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="session")
def experiment_file(dataset_folder: Path) -> str:
    return write_experiment(dataset_folder, dataset_folder.parent / "experiment.yaml")


def write_t5_experiment(dataset: Path, path: Path) -> str:
    """A run that takes two seconds: a T5 v1.1 of 2 + 2 layers of 32, with Adafactor.

    Give it output=FOLDER.
    """
    path.write_text(
        f"""
output: set-by-the-test
accelerator: cpu
data: {{path: {dataset}, sequence_length: 64, packing: best_fit, lanes: 16}}
model: {{kind: t5, vocab_size: 700, layers: 2, width: 32, heads: 2, head_width: 16, ffn_width: 64, dropout: 0.1,
  attention_dropout: 0.0, tied: false, activation: geglu_tanh}}
objective: {{kind: span_corruption, z_loss: 1e-4}}
optimizer: {{kind: adafactor, lr: 1e-2, min_dim_size_to_factor: 16}}
schedule: {{decay: inverse_sqrt, decay_start: 4}}
training: {{steps: 12, global_batch_size: 10, micro_batch_size: 4, max_grad_norm: null, log_every: 1,
  collective_timeout: 60}}
checkpoint: {{every: 1000}}
"""  # noqa: E501
    )
    return str(path)


@pytest.fixture(scope="session")
def t5_experiment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Span corruption, on a dataset with a SentencePiece tokenizer."""
    folder = tmp_path_factory.mktemp("t5")
    return write_t5_experiment(
        make_dataset(folder / "dataset", "unigram"), folder / "experiment.yaml"
    )


@pytest.fixture(scope="session")
def parts(dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shards of the dataset as three datasets of one tokenizer.

    The first has all held-out documents.
    """
    from data_pipeline.format.manifest import Manifest

    parent, whole, made = tmp_path_factory.mktemp("parts"), Manifest.load(dataset_folder), {}
    for name, chosen in (("a", slice(0, 2)), ("b", slice(2, 3)), ("c", slice(3, 5))):
        made[name] = parent / name
        shutil.copytree(dataset_folder, made[name], ignore=shutil.ignore_patterns(".cache"))
        heldout = whole.splits["heldout"] if name == "a" else ()
        replace(whole, splits={"train": whole.splits["train"][chosen], "heldout": heldout}).save(
            made[name]
        )
    return made


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 256 KiB, or of the size that the test is parametrized with."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={getattr(request, 'param', '256k')}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 server on this machine, for this process and those it starts; the URL of its endpoint.

    It has the bucket `bucket`. The folders `s3://bucket/NAME` that tests use must differ.
    """
    import boto3
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield environment["AWS_ENDPOINT_URL"]
    server.stop()


@pytest.fixture
def s3_folder(s3_server: str, request: pytest.FixtureRequest) -> str:
    """The URL of a folder on the S3 server that no other test uses; empty."""
    return f"s3://bucket/{request.node.name.translate(str.maketrans('[]', '--'))}-{os.getpid()}"


@pytest.fixture(scope="session")
def s3_proxy(s3_server: str) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def faulty_s3(s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    """The S3 server behind a proxy that fails as it is told.

    Clients do not wait long before they try again.
    """
    import fsspec

    s3_proxy.behave()
    settings = {
        "endpoint_url": s3_proxy.url,
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setattr("samestep.storage.attempts._DELAYS", (0.01,) * 5)
    monkeypatch.setattr("samestep.storage.attempts._PATIENCE", (0.01,) * 20)
    monkeypatch.setattr("samestep.storage.attempts._answered", {})
    monkeypatch.setattr("samestep.storage.attempts._renewed", {"at": -math.inf})
    return s3_proxy


@pytest.fixture
def samestep(capsys: pytest.CaptureFixture[str]) -> Iterator[Samestep]:
    """Runs a command in this process, where that shows the same as a process of its own."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    with _logging_restored():
        yield run


@pytest.fixture(scope="session")
def finished_run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of 12 steps with checkpoints of steps 8 and 12.

    Do not change it.
    """
    folder = tmp_path_factory.mktemp("finished") / "run"
    overrides = ["checkpoint.every=4", "training.evaluate_every=12", "data.threads=0"]
    with _logging_restored():
        assert main(["train", experiment_file, f"output={folder}", *overrides]) == 0
    return folder


@contextmanager
def _logging_restored() -> Iterator[None]:
    """Undoes the logging set-up of `main`, whose handler would outlive the captured stderr that it
    writes to.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers, root.level = handlers, level


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts commands in the background; kills what is left of them in the end.

    Those of `UNFORKED` are forked, except in the tests that it names.
    """
    started: list[Process] = []
    test = request.node.nodeid.partition("[")[0]

    def run(*arguments: object, command: tuple[str, ...] = SAMESTEP) -> Process:
        forked = command == SAMESTEP and UNFORKED.get(str(arguments[0]), test) != test
        started.append(Process(command, arguments, tmp_path, forked))
        return started[-1]

    yield run
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
