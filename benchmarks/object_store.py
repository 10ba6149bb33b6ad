"""An S3 server on this machine (moto), as fast as it can be or with limits and failures.

It is a process of its own, and takes CPU time from what it serves.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import fsspec

_PIECE_BYTES = 2**16


@contextmanager
def object_store(bytes_a_second: float = 0.0, failures: float = 0.0) -> Iterator[list[int]]:
    """An S3 server with the bucket `bucket`, which clients in this process find.

    Args:
        bytes_a_second: of all its answers together; 0 means no limit.
        failures: share of reads that are answered with status 503.

    Yields:
        A list, which is empty until the server has ended; then it has the numbers of reads and of
        failures.
    """
    import boto3

    counts: list[int] = []
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.object_store", str(bytes_a_second), str(failures)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as server:
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
                yield counts
            finally:
                clients.clear_instance_cache()
                assert server.stdin is not None
                server.stdin.close()
                counts += map(int, server.stdout.read().split())


@dataclass
class _Limited:
    """A WSGI application whose answers share a bandwidth, and of whose reads some fail."""

    app: Any
    bytes_a_second: float
    failures: float
    _free_at: float = 0.0  # when all bytes that were let through have passed
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    reads: int = 0
    failed: int = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        is_read = environ["REQUEST_METHOD"] == "GET"
        with self._lock:
            fails = is_read and self._random.random() < self.failures
            self.reads += is_read
            self.failed += fails
        if fails:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return
        for content in self.app(environ, start_response):
            for first in range(0, len(content), _PIECE_BYTES):
                piece = content[first : first + _PIECE_BYTES]
                self._pass(len(piece))
                yield piece

    def _pass(self, size: int) -> None:
        if not self.bytes_a_second:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_a_second
            wait = self._free_at - time.monotonic()
        time.sleep(wait)


def _serve(bytes_a_second: float, failures: float) -> None:
    """Prints the server's address, serves until standard input is closed, and prints counts."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    app = _Limited(DomainDispatcherApplication(create_backend_app), bytes_a_second, failures)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.port}", flush=True)
    sys.stdin.read()
    print(app.reads, app.failed)


if __name__ == "__main__":
    _serve(*map(float, sys.argv[1:]))
