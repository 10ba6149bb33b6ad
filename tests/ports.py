"""Ports of tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of the loopback interface at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    return int(port)
