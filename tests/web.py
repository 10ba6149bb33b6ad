"""A web server on loopback that knows ranges, counts what it is asked for and misbehaves when told
to.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.server import QuietServer


class WebServer:
    """Serves the files of a folder.

    Attributes:
        url: of the folder.
        contents: how often the content of each path, or a part of it, was asked for.
        cut: number of answers that are to end in the middle.
        flipped: paths of which a bit is wrong, however often they are asked for.
        held: while it is set, answers stop in the middle and wait.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: Counter[str] = Counter()
        self.cut = 0
        self.flipped: set[str] = set()
        self.held = False
        self.released = threading.Condition()
        self._server = QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def release(self) -> None:
        """Lets the answers that are held go on."""
        with self.released:
            self.held = False
            self.released.notify_all()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: WebServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        path = self.path.lstrip("/")
        file = self.web.folder / path
        if not file.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        if path in self.web.flipped:
            content = content[:9] + bytes([content[9] ^ 1]) + content[10:]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        total = len(content)
        if wanted:
            content = content[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header(
                "Content-Range", f"bytes {wanted[1]}-{int(wanted[1]) + len(content) - 1}/{total}"
            )
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.web.contents[path] += 1
            self._send(content)

    def _send(self, content: bytes) -> None:
        half = len(content) // 2
        self.wfile.write(content[:half])
        if self.web.cut > 0:
            self.web.cut -= 1
            self.close_connection = True
            return
        with self.web.released:
            self.web.released.wait_for(lambda: not self.web.held)
        self.wfile.write(content[half:])
