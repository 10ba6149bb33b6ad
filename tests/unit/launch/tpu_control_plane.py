"""Cloud TPU's control plane on loopback: states of queued resources, and machines' metadata."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "token-of-the-tests"
NEXT = {
    "WAITING_FOR_RESOURCES": "PROVISIONING",
    "PROVISIONING": "ACTIVE",
    "SUSPENDING": "SUSPENDED",
}
REAL_GCLOUD = "/usr/bin/gcloud"
PROGRAM = Path(__file__).with_name("tpu_gcloud.py")


class ControlPlane:
    """A server with the state of one project.

    Attributes:
        url: of it.
        queued: queued resources by name.
        bodies: what was posted, with the version of the interface.
        deleted: names, in order.
        types: accelerator types of every zone.
        machines: of each node.
        metadata: of the machine that asks for it.
        refusal: (code, status, message) that every request is answered with; None answers them.
        create_refusal: the same, of requests for a slice.
        answers_lost: requests for a slice that are accepted next, but answered with a mistake.
    """

    def __init__(self) -> None:
        self.queued: dict[str, dict[str, Any]] = {}
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.deleted: list[str] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.types = ["v4-8", "v4-16", "v5litepod-16"]
        self.machines = 1
        self.metadata: dict[str, str] = {}
        self.refusal: tuple[int, str, str] | None = None
        self.create_refusal: tuple[int, str, str] | None = None
        self.answers_lost = 0
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"plane": self})
        )
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def state(self, name: str) -> str:
        with self.lock:
            return str(self.queued[name]["state"]["state"]) if name in self.queued else ""

    def become(self, name: str, state: str, **data: Any) -> None:
        """Puts a request into a state; ACTIVE ones have a node, others none."""
        with self.lock:
            self._become(name, state, **data)

    def _become(self, name: str, state: str, **data: Any) -> None:
        self.queued[name]["state"] = {"state": state, **data}
        if state == "ACTIVE":
            addresses = [{"ipAddress": f"10.0.0.{i + 1}"} for i in range(self.machines)]
            where = f"projects/p/locations/z/nodes/{name}"
            self.nodes[name] = {
                "name": where,
                "state": "READY",
                "health": "HEALTHY",
                "apiVersion": "V2",
            }
            self.nodes[name]["networkEndpoints"] = addresses
        else:
            self.nodes.pop(name, None)

    def preempt(self, name: str) -> None:
        """Takes the machines away."""
        self.become(name, "SUSPENDING", stateInitiator="SERVICE")

    def answer(
        self, method: str, path: str, query: dict[str, list[str]], body: Any
    ) -> tuple[int, dict[str, Any]]:
        """What Google would say, and do."""
        if self.refusal is not None:
            code, status, message = self.refusal
            return code, {"error": {"code": code, "status": status, "message": message}}
        match = re.fullmatch(r"/(v2\w*)/(projects/[^/]+/locations/[^/]+)/(\w+)(?:/([^/]+))?", path)
        assert match is not None, path
        version, parent, what, name = match.groups()
        if what == "acceleratorTypes":
            return 200, {
                what: [{"name": f"{parent}/{what}/{each}", "type": each} for each in self.types]
            }
        if what == "operations":
            return 200, {"name": path[4:], "done": True, "response": {}}
        if what == "nodes":
            return (
                (200, self.nodes[name])
                if name in self.nodes
                else _missing(f"{parent}/{what}/{name}")
            )
        if method == "POST":
            return self._create(version, parent, query["queuedResourceId"][0], body)
        if name is None:
            listed = {what: [dict(each) for each in self.queued.values()]}
            self._go_on()
            return 200, listed
        if name not in self.queued:
            return _missing(f"{parent}/{what}/{name}")
        if method == "DELETE":
            if query.get("force") not in (["True"], ["true"]):
                return 400, _error(
                    400, "FAILED_PRECONDITION", "the queued resource has nodes; use force"
                )
            self._become(name, "DELETING")
            return 200, {"name": f"{parent}/operations/delete-{name}", "done": False}
        found = dict(self.queued[name])
        self._go_on()
        return 200, found

    def _create(
        self, version: str, parent: str, name: str, body: Any
    ) -> tuple[int, dict[str, Any]]:
        if self.create_refusal is not None:
            code, status, message = self.create_refusal
            return code, _error(code, status, message)
        if name in self.queued:
            where = f"{parent}/queuedResources/{name}"
            return 409, _error(409, "ALREADY_EXISTS", f"Resource '{where}' already exists")
        self.bodies.append((version, body))
        state = {"state": "WAITING_FOR_RESOURCES"}
        self.queued[name] = {
            "name": f"{parent}/queuedResources/{name}",
            "state": state,
            "tpu": body["tpu"],
        }
        if self.answers_lost:
            self.answers_lost -= 1
            return 503, _error(503, "UNAVAILABLE", "The connection was lost.")
        return 200, {"name": f"{parent}/operations/create-{name}", "done": False}

    def _go_on(self) -> None:
        """Time goes by between two looks."""
        for name, resource in list(self.queued.items()):
            state = resource["state"]["state"]
            if state == "DELETING":
                del self.queued[name]
                self.deleted.append(name)
            elif state in NEXT:
                more = {key: value for key, value in resource["state"].items() if key != "state"}
                self._become(name, NEXT[state], **more)


def _missing(resource: str) -> tuple[int, dict[str, Any]]:
    return 404, _error(404, "NOT_FOUND", f"Resource '{resource}' was not found")


def _error(code: int, status: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "status": status, "message": message}}


class _Handler(BaseHTTPRequestHandler):
    plane: ControlPlane

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path.startswith("/computeMetadata/v1/instance/"):
            value = self.plane.metadata.get(url.path.removeprefix("/computeMetadata/v1/instance/"))
            asked_well = value is not None and self.headers.get("Metadata-Flavor") == "Google"
            self._send(200 if asked_well else 404, (value or "").encode())
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            answer = (
                401,
                _error(401, "UNAUTHENTICATED", "Request had invalid authentication credentials."),
            )
        else:
            with self.plane.lock:
                answer = self.plane.answer(self.command, url.path, parse_qs(url.query), body)
        self._send(answer[0], json.dumps(answer[1]).encode())

    do_POST = do_DELETE = do_GET

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def install(folder: Path, plane: ControlPlane, thin: bool) -> dict[str, str]:
    """Makes the `gcloud` that `tpu_gcloud.py` is; the environment in which it finds all it needs.

    Args:
        folder: for its files: `buckets`, `secrets`, and `calls`, a line of JSON for each call.
        plane: which it talks to.
        thin: whether the real gcloud has no part in it.
    """
    for name in ("bin", "buckets", "secrets", "config"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    program = folder / "bin" / "gcloud"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {PROGRAM} "$@"\n')
    program.chmod(0o755)
    (folder / "token").write_text(TOKEN)
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": plane.url,
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(folder / "token"),
        "CLOUDSDK_CONFIG": str(folder / "config"),
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "0",
        "GCE_METADATA_HOST": plane.host,
        "FAKE_GCLOUD": str(folder),
        "REAL_GCLOUD": REAL_GCLOUD,
    } | ({"THIN": "1"} if thin else {})
