"""Streaming from an object store on this machine, from a cold cache.

Its share of the speed of local files.

    python -m benchmarks.stream --corpus corpus/*.jsonl.zst

The store is a process of its own (moto), which takes CPU time from what it serves, so this says
less about the network than about what downloading, checking and caching cost. Wall time of a whole
pass over the data.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import fsspec

from benchmarks.corpus import data_arguments, prepare_dataset
from benchmarks.loader import open_loader
from benchmarks.pairing import Comparison, Contender, compare, publish
from data_pipeline.building.push import push
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.dataset import Dataset

_LENGTH, _BATCH_SIZE = 128, 64
_SHARD_BYTES = 2**20
_SERVER = """
import sys, time
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()  # until it is closed
"""


@contextmanager
def object_store() -> Iterator[None]:
    """An S3 server on this machine with the bucket `bucket`, which clients in this process find."""
    import boto3

    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        environment = {
            "AWS_ENDPOINT_URL": server.stdout.readline().decode().strip(),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        clients = fsspec.get_filesystem_class("s3")  # remember where their server was
        with patch.dict(os.environ, environment):
            clients.clear_instance_cache()
            boto3.client("s3").create_bucket(Bucket="bucket")
            try:
                yield
            finally:
                clients.clear_instance_cache()


def one_pass(dataset: Dataset) -> float:
    """Reads as many batches as there are in an epoch; returns their examples."""
    with open_loader(dataset, _LENGTH, _BATCH_SIZE, threads=1) as loader:
        batches = loader.examples // _BATCH_SIZE
        for _ in range(batches):
            next(loader)
    return batches * _BATCH_SIZE


def compare_streaming(folder: Path, repeats: int) -> Comparison:
    """Measures passes over local files, over a cold and over a warm cache."""
    url = "s3://bucket/dataset"
    push(folder, url)

    def cold() -> float:
        with tempfile.TemporaryDirectory() as cache:
            return one_pass(Dataset.open(url, ShardCache.open_folder(cache, "100GB")))

    with tempfile.TemporaryDirectory() as cache:
        contenders = [
            Contender("S3, cold cache", cold),
            Contender("local files", lambda: one_pass(Dataset.open(folder))),
            Contender(
                "S3, warm cache",
                lambda: one_pass(Dataset.open(url, ShardCache.open_folder(cache, "100GB"))),
            ),
        ]
        return compare(
            f"Streaming, {_LENGTH} tokens", "examples", contenders, repeats, clock="wall"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    args = data_arguments(__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary, object_store():
        compared = compare_streaming(
            prepare_dataset(args, Path(temporary), _SHARD_BYTES), args.repeats
        )
    publish([compared], args.json)


if __name__ == "__main__":
    main()
