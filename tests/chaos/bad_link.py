"""A link that loses and delays frames: copies them between two TAP devices in two namespaces.

The kernel may lack `tc netem`, so this process is the link. It reads commands from its standard
input, a line of JSON each: {"to": 0, "from": 1.0, "delay": 0.05} loses no frame on the way to the
machine, all that come from it, and takes 50 ms each way.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import selectors
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65536


def open_tap(namespace: str, name: str) -> int:
    """Creates a TAP device in the network namespace of a process; frames are read and written."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def main() -> None:
    switch, machine, name = sys.argv[1:]
    taps = {"from": open_tap(machine, "eth0"), "to": open_tap(switch, name)}
    settings = {"to": 0.0, "from": 0.0, "delay": 0.0}
    generator = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()  # when to deliver which frame, and where
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for direction, tap in taps.items():
        selector.register(tap, selectors.EVENT_READ, direction)
    print("ready", flush=True)
    while True:
        seconds = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(seconds):
            if key.data is None:
                line = sys.stdin.readline()
                if not line:  # the test has ended
                    return
                settings |= json.loads(line)
                continue
            target = taps["to" if key.data == "from" else "from"]
            try:
                frame = os.read(key.fd, _FRAME_BYTES)
            except BlockingIOError:
                continue
            if generator.random() >= settings[key.data]:
                waiting.append((time.monotonic() + settings["delay"], target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            try:
                os.write(target, frame)
            except OSError:  # the queue is full, or the device is down: one more frame is lost
                continue


if __name__ == "__main__":
    main()
