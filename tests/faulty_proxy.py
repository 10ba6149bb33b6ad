"""An HTTP server that passes requests on to another one, and now and then misbehaves."""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from tests.server import QuietServer

Fault: TypeAlias = int | Literal["drop", "truncate", "delay"] | None
"""A status to answer with, a connection closed without an answer, an answer cut in the middle or
late, or none.
"""


class FaultyProxy(QuietServer):
    """Serves what `upstream` serves.

    Attributes:
        url: of this server.
        faults: of the next requests, in order; none when it is used up.
        always: the fault of all requests after these.
        delay: seconds that a late answer is late.
        first_fault: when the first of them happened, in seconds since 1970.
        key: the access key whose requests are answered, others get 403; None: any.
        ranges: whether requests for a part of an object get that part; else they get all of it.
        requests: the method and path of each request so far.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.behave()

    def behave(self) -> None:
        """Does nothing wrong from now on, and forgets what was."""
        self.faults: list[Fault] = []
        self.always: Fault = None
        self.delay = 1.0
        self.first_fault = math.inf
        self.key: str | None = None
        self.ranges = True
        self.requests: list[str] = []


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    """Runs a proxy in a thread."""
    with FaultyProxy(upstream) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.faults.pop(0) if self.server.faults else self.server.always
        if self.server.key and f"={self.server.key}/" not in self.headers["Authorization"]:
            fault = 403
        self.server.requests.append(f"{self.command} {self.path}")
        if fault is not None:
            self.server.first_fault = min(self.server.first_fault, time.time())
        if fault == "delay":
            time.sleep(self.server.delay)
        if fault == "drop":
            self.close_connection = True
        elif isinstance(fault, int):
            self._answer(fault, [], b"")
        else:
            self._pass_on(body, cut=fault == "truncate")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _pass_on(self, body: bytes, cut: bool) -> None:
        headers = {"Authorization": "AWS anybody:nothing"}  # S3 shows an object to nobody else
        headers |= {
            name: value
            for name, value in self.headers.items()
            if self.server.ranges or name != "Range"
        }
        connection = http.client.HTTPConnection(self.server.upstream)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        self._answer(answer.status, answer.getheaders(), content, cut)
        connection.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False
    ) -> None:
        self.send_response(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in (
                "content-length",
                "transfer-encoding",
                "connection",
                "date",
                "server",
            ):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if cut:
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        return
