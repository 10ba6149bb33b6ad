"""`samestep watch`: the report of one or several runs, served live to this machine's browser.

Other users of the machine can connect, too. The address of the page begins with a random token, so
only who has seen the address can open it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from types import FrameType
from typing import Any
from urllib.parse import unquote, urlsplit

from samestep.config import Tree
from samestep.errors import ConfigError, SamestepError
from samestep.storage import write_text
from trainer.monitoring.report import Report, as_json, has_metrics, page, policy
from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
PORT = 8700
"""Used if it is free; fixed, so that `ssh -L` can name it."""

# Of this machine, seen from itself or through `ssh -L`. A page elsewhere whose name was made to
# point here (DNS rebinding) has that name in its requests, and gets nothing.
_HOSTS = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_SECONDS = 10.0  # without a byte of the browser's request
_ANSWER_SECONDS = 300.0  # for a large page over a slow tunnel
_MOST_REQUESTS = 64  # at the same time
# Of a study's own page, which may be a stranger's: no script, no request, and an origin of its own.
_FOREIGN = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


class Server(ThreadingHTTPServer):
    """Serves the page, its `data`, and the pages of studies that it links to, all below `url`.

    Raises:
        ConfigError: the port is not free or not a port.
    """

    daemon_threads = True

    def __init__(self, report: Report, port: int | None) -> None:
        self._report, self._lock = report, Lock()
        self._token = secrets.token_urlsafe(16)
        self._requests: dict[socket.socket, None] = {}  # in the order of arrival
        self._requests_lock = Lock()  # another one, as reading the runs may take long
        wanted = PORT if port is None else port
        try:
            super().__init__((ADDRESS, wanted), _Handler)
        except OverflowError:
            raise ConfigError(f"--port is {wanted}. Use a number from 0 to 65535.") from None
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            if port is not None:
                raise ConfigError(
                    f"--port {port} cannot be used: {error.strerror}. Name another, or leave "
                    "--port out."
                ) from None
            super().__init__((ADDRESS, 0), _Handler)  # any free one

    @property
    def url(self) -> str:
        """Address of the page; who knows it can open the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self._token}/"

    def below_token(self, path: str) -> str | None:
        """The part of a request's path after the token; None without the right token."""
        token, slash, rest = path.removeprefix("/").partition("/")
        is_right = hmac.compare_digest(token.encode(), self._token.encode())
        return rest if is_right and slash else None

    def data(self) -> Tree:
        """The page's data, now. Each reading continues where the last one ended."""
        with self._lock:
            return self._report.data(live=True)

    def page(self) -> str:
        """The page, with its data."""
        return page(self._report.names, self.data())

    def linked(self, link: str) -> tuple[str, bool] | None:
        """The page of a study or of one of its runs, see `Report.linked`."""
        return self._report.linked(link)

    def process_request(self, request: Any, client_address: object) -> None:
        """Answers a request in a thread. If there are too many, the oldest one is dropped."""
        with self._requests_lock:
            self._requests[request] = None
            if len(self._requests) > _MOST_REQUESTS:
                oldest = next(iter(self._requests))
                del self._requests[oldest]
                with suppress(OSError):  # ends its thread
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._requests_lock:
            self._requests.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: object) -> None:
        # The browser tab was closed, or does not take the answer.
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "samestep", ""
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        try:
            self._answer()
        except SamestepError as error:  # of a damaged file; another one may be read next time
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n")

    def _answer(self) -> None:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            path = urlsplit(self.path).path
        except ValueError:  # brackets without an address in them
            host = path = None
        below = None if path is None else self.server.below_token(path)
        if host not in _HOSTS:
            self._send(HTTPStatus.FORBIDDEN, "open this page as http://localhost:PORT/TOKEN/\n")
        elif path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, "")
        elif below is None:
            self._send(HTTPStatus.FORBIDDEN, "open the whole address that samestep watch shows\n")
        elif below == "":
            self._send(HTTPStatus.OK, self.server.page(), "text/html", policy=policy())
        elif below == "data":
            self._send_data()
        elif (linked := self.server.linked(unquote(below))) is not None:
            text, is_ours = linked
            self._send(HTTPStatus.OK, text, "text/html", policy=policy() if is_ours else _FOREIGN)
        else:
            self._send(HTTPStatus.NOT_FOUND, "the page has no such link\n")

    def _send_data(self) -> None:
        data = self.server.data()
        # The time of the answer alone is no news.
        digest = hashlib.sha256(as_json({**data, "now": 0}).encode()).hexdigest()
        tag = f'"{digest[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, "", tag=tag)
        else:
            self._send(HTTPStatus.OK, as_json(data), "application/json", tag)

    def _send(
        self,
        status: HTTPStatus,
        text: str,
        kind: str = "text/plain",
        tag: str | None = None,
        policy: str = "default-src 'none'; sandbox",
    ) -> None:
        body = text.encode()
        self.connection.settimeout(_ANSWER_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")  # it would have the token
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


def watch(runs: Sequence[str], output: Path, port: int | None = None, once: bool = False) -> bool:
    """Serves the page until Ctrl-C, SIGTERM or SIGHUP, then writes it as one file.

    Args:
        runs: at most 10 folders of runs, suites or studies; they need not exist yet.
        output: the HTML file.
        port: None for the usual one, or any if that is taken.
        once: only write the file.

    Returns:
        Whether the file was written; it is not if no run has metrics.

    Raises:
        ConfigError: the file cannot be written; or see `Report` and `Server`.
        StorageError: the file cannot be written.
    """
    report = Report(runs, Experiment)
    # Found now, rather than at the end of days. The folder of a run may not exist yet.
    place = next(parent for parent in output.absolute().parents if parent.exists())
    if output.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"--output is {output}, which cannot be written. Name another file.")
    if not once:
        with Server(report, port) as server:
            for run in report.folders:
                if not run.folder.exists():
                    sys.stdout.write(f"{run.folder} does not exist yet; the page waits for it\n")
            sys.stdout.write(f"{server.url} shows {', '.join(report.names)}\n")
            sys.stdout.write(f"Ctrl-C ends this and writes {output}\n")
            sys.stdout.flush()
            signal.signal(signal.SIGTERM, _interrupt)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # by nohup
                signal.signal(signal.SIGHUP, _interrupt)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                sys.stdout.write("\n")
    if not has_metrics(report.data()):
        sys.stdout.write("no run has metrics yet; nothing is written\n")
        return False
    # As in the page of `samestep report`. Only now: it imports the models and plans each run.
    from trainer.inspect.plan.plan import memory_of_run

    for run in report.folders:
        run.planned_memory = memory_of_run(run.folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, page(report.names, report.data()))
    sys.stdout.write(f"{output}\n")
    return True


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
