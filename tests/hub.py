"""A Hugging Face Hub on loopback.

The part of its HTTP interface that downloads use, over a folder of repositories.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.server import QuietServer

COMMIT = hashlib.sha1(b"what main points to").hexdigest()
_API = re.compile(
    r"/api/(models|datasets)/([\w.-]+(?:/[\w.-]+)?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?"
)
_FILE = re.compile(r"/(datasets/)?([\w.-]+(?:/[\w.-]+)?)/resolve/([^/]+)/(.+)")


class Hub:
    """Serves `folder`/models/NAME/... and `folder`/datasets/OWNER/NAME/...

    Under whatever commit is asked for.

    Attributes:
        requests: how often each path was asked for, by method and path.
        cut: number of downloads that are to end in the middle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: Counter[str] = Counter()
        self.cut = 0
        self._server = QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def write(self, path: str, data: bytes) -> None:
        """Adds the file "models/NAME/FILE" or "datasets/OWNER/NAME/FILE"."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def close(self) -> None:
        """Ends the service, as a network that goes down."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def running_hub(folder: Path, cache: Path) -> Iterator[Hub]:
    """A hub that this process and those it starts take for the real one, with an empty cache."""
    hub = Hub(folder)
    with closing(hub), taken_for_the_hub(hub.endpoint, cache):
        yield hub


@contextmanager
def taken_for_the_hub(endpoint: str, cache: Path) -> Iterator[None]:
    """Directs the clients of this process, and of those it starts, to an endpoint."""
    import datasets.config
    import transformers.utils.hub
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", endpoint)
        patch.setenv("HF_HOME", str(cache))
        patch.setattr(constants, "ENDPOINT", endpoint)
        patch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        patch.setattr(constants, "HF_URL_HOSTS", frozenset({"127.0.0.1"}), raising=False)
        patch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
        # Its client keeps the endpoint of its first use, and a connection to it.
        patch.setattr(transformers.utils.hub, "_hf_api", None)
        yield


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        match = _API.fullmatch(path)
        assert match is not None, path
        repository = self.hub.folder / match[1] / match[2]
        files = [repository / name for name in json.loads(body)["paths"]]
        self._json([_entry(repository, file) for file in files if file.exists()])

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[f"{self.command} {path}"] += 1
        if match := _API.fullmatch(path):
            kind, name, what, revision, below = match.groups()
            repository = self.hub.folder / kind / name
            if not repository.is_dir():
                return self._fail(401, "RepoNotFound")
            if not re.fullmatch("main|[0-9a-f]{40}", revision or "main"):
                return self._fail(404, "RevisionNotFound")
            if what == "tree":
                top = repository / (below or "")
                if not top.is_dir():
                    return self._fail(404, "EntryNotFound")
                found = top.rglob("*") if "recursive=true" in self.path.lower() else top.iterdir()
                return self._json([_entry(repository, file) for file in sorted(found)])
            files = [
                {"rfilename": str(f.relative_to(repository))}
                for f in repository.rglob("*")
                if f.is_file()
            ]
            return self._json(
                {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
            )
        match = _FILE.fullmatch(path)
        file = self.hub.folder / (match[1] or "models/") / match[2] / match[4] if match else None
        return (
            self._file(file, with_body)
            if file and file.is_file()
            else self._fail(404, "EntryNotFound")
        )

    def _file(self, file: Path, with_body: bool) -> None:
        data = file.read_bytes()
        begin, end = 0, len(data)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(wanted[1]), min(int(wanted[2] or end) + 1, end)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body and self.hub.cut and end - begin > 1000:
            self.hub.cut -= 1
            self.wfile.write(data[begin : (begin + end) // 2])
            self.close_connection = True
        elif with_body:
            self.wfile.write(data[begin:end])

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(repository: Path, file: Path) -> dict[str, object]:
    name = str(file.relative_to(repository))
    if file.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    data = file.read_bytes()
    return {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
