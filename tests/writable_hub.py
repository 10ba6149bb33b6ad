"""A Hugging Face Hub on loopback that models can be pushed to.

The part of its HTTP interface that uploads use, with Git LFS for weights, and enough of the rest to
load them back. Repositories are in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.hub import taken_for_the_hub
from tests.server import QuietServer

WRITE, READ = "hf_write", "hf_read"
_API = re.compile(r"/api/models/(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<what>[\w-]+)(?:/(?P<rest>.+))?)?")
_FILE = re.compile(r"/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_LFS = re.compile(r"/(?P<name>[\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch")


class WritableHub:
    """Repositories by name: a token WRITE may write to those of "ada", READ to none.

    Attributes:
        repositories: name -> branch -> path -> content.
        private: names of private repositories.
        commits: how often each branch of each repository was committed to.
        uploads: sizes of the objects that were uploaded by Git LFS.
        refused: number of commits that are to fail, as when the service is down.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.commits: Counter[tuple[str, str]] = Counter()
        self.uploads: list[int] = []
        self.objects: dict[str, bytes] = {}
        self.refused = 0
        self._server = QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def sha(self, name: str, branch: str) -> str:
        """The commit of a branch: a hash of its files, so that each content has its own."""
        files = self.repositories[name][branch]
        content = [(path, hashlib.sha1(data).hexdigest()) for path, data in sorted(files.items())]
        return hashlib.sha1(json.dumps([name, content]).encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or commit; None if there is none."""
        branches = self.repositories[name]
        if revision in branches:
            return branches[revision]
        found = [branches[branch] for branch in branches if self.sha(name, branch) == revision]
        return found[0] if found else None

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def running_writable_hub(cache: Path, token: str | None) -> Iterator[WritableHub]:
    """A hub that this process takes for the real one, with an empty cache.

    Args:
        token: that this process is logged in with.
    """
    from huggingface_hub import constants

    hub = WritableHub()
    with (
        closing(hub),
        taken_for_the_hub(hub.endpoint, cache),
        pytest.MonkeyPatch.context() as patch,
    ):
        # Its protocol for large files is in a compiled client; LFS is the documented other one.
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            patch.setenv("HF_TOKEN", token)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: WritableHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._read(with_body=True)

    def do_HEAD(self) -> None:
        self._read(with_body=False)

    def do_PUT(self) -> None:
        oid, data = self.path.rpartition("/")[2], self._body()
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.objects[oid] = data
        self.hub.uploads.append(len(data))
        self._answer({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := _LFS.fullmatch(path):
            return self._lfs(json.loads(body)["objects"])
        match = _API.fullmatch(path)
        assert match is not None, path
        name, what, rest = match["name"], match["what"], match["rest"]
        if name not in self.hub.repositories or not self._may_write(name):
            return self._fail(403, "Forbidden")
        branches = self.hub.repositories[name]
        if what == "branch":
            if rest in branches:
                return self._fail(409, "Conflict")
            branches[rest] = dict(branches["main"])
            return self._answer({})
        assert rest in branches, path
        if what == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            return self._answer({"files": modes})
        assert what == "commit", path
        if self.hub.refused:
            self.hub.refused -= 1
            return self._fail(400, "BadRequest")
        files = branches[rest]
        for line in body.splitlines():
            operation = json.loads(line)
            value: Any = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.commits[name, rest] += 1
        sha = self.hub.sha(name, rest)
        url = f"{self.hub.endpoint}/{name}/commit/{sha}"
        return self._answer({"success": True, "commitOid": sha, "commitUrl": url})

    def _create(self, content: dict[str, Any]) -> None:
        name = f"{content['organization']}/{content['name']}"
        if not self._may_write(name):
            return self._fail(403, "Forbidden")
        if name in self.hub.repositories:
            return self._fail(409, "Conflict", path=name)
        self.hub.repositories[name] = {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
        if content.get("private") or content.get("visibility") == "private":
            self.hub.private.add(name)
        return self._answer({"url": f"{self.hub.endpoint}/{name}"})

    def _lfs(self, objects: list[dict[str, Any]]) -> None:
        answers = []
        for each in objects:
            answer = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.endpoint}/lfs/{each['oid']}", "header": {}}
                answer["actions"] = {"upload": upload}
            answers.append(answer)
        self._answer({"transfer": "basic", "objects": answers})

    def _read(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        match = _FILE.fullmatch(path) or _API.fullmatch(path)
        name = match["name"] if match else None
        if match is None or name not in self.hub.repositories or not self._may_read(name):
            return self._fail(401, "RepoNotFound")
        parts = match.groupdict()
        branches = self.hub.repositories[name]
        if parts.get("what") == "refs":
            refs = [
                {
                    "name": each,
                    "ref": f"refs/heads/{each}",
                    "targetCommit": self.hub.sha(name, each),
                }
                for each in branches
            ]
            return self._answer({"branches": refs, "converts": [], "tags": []})
        if "path" in parts:
            return self._file(name, parts["revision"], parts["path"], with_body)
        revision = (parts["rest"] or "main").partition("/")[0]
        files = self.hub.files(name, revision)
        if files is None:
            return self._fail(404, "RevisionNotFound")
        if parts["what"] == "tree":
            entries = [
                {
                    "type": "file",
                    "path": file,
                    "oid": hashlib.sha1(data).hexdigest(),
                    "size": len(data),
                }
                for file, data in files.items()
            ]
            return self._answer(entries)
        return self._answer(
            {
                "id": name,
                "sha": self._commit(name, revision),
                "siblings": [{"rfilename": file} for file in files],
                "private": name in self.hub.private,
                "tags": [],
            }
        )

    def _file(self, name: str, revision: str, path: str, with_body: bool) -> None:
        files = self.hub.files(name, revision)
        if files is None or path not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            self._fail(404, code, "" if files is None else self._commit(name, revision))
            return
        data = files[path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self._commit(name, revision))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _commit(self, name: str, revision: str) -> str:
        return self.hub.sha(name, revision) if revision in self.hub.repositories[name] else revision

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _may_write(self, name: str) -> bool:
        return self._token() == WRITE and name.startswith("ada/")

    def _may_read(self, name: str) -> bool:
        return name not in self.hub.private or self._token() in (WRITE, READ)

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []  # chunks of a streamed upload: size in hexadecimal, content, empty line
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str, commit: str = "", path: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        body = json.dumps({"error": code, "url": f"{self.hub.endpoint}/{path}"}).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
