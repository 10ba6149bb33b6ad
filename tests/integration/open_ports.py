"""A process with every port of this project: prints their numbers, and answers until stdin ends.

Usage: open_ports.py FOLDER. The secret is in the file that SAMESTEP_SECRET_FILE names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Thread

from samestep.storage import channel
from samestep.storage.keeper import Keeper
from trainer.elastic.rendezvous import Rendezvous
from trainer.inspect.watch import Server
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.report import Report

if __name__ == "__main__":
    channel.HANDSHAKE_SECONDS = 1.0
    run = Path(sys.argv[1])
    run.mkdir()
    tracker = JsonlTracker(run / "metrics.jsonl")
    tracker.log(1, {"secret loss": 1.0})
    rendezvous = Rendezvous("127.0.0.1:0", 2, 2, "train", run)
    rendezvous.join(1, cancelled=lambda: rendezvous._connection is not None)
    with (
        Keeper(rendezvous.derived_secret("keepers")) as keeper,
        Server(Report([str(run)]), 0) as server,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        ports = [rendezvous._port, int(keeper.address.split()[1])]
        sys.stdout.write(json.dumps({"ports": ports, "url": server.url}) + "\n")
        sys.stdout.flush()
        # Takes part in the rendezvous until the end, as an agent does.
        Thread(target=rendezvous.join, args=(1, lambda: False), daemon=True).start()
        sys.stdin.read()
