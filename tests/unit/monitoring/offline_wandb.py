"""Reading what W&B has written offline, as `wandb sync` would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.waiting import until
from trainer.monitoring.transaction_log import records


def offline_records(folder: Path, kind: str) -> Iterator[Any]:
    """The records of a kind in all offline runs of a folder, in the order in which `wandb sync`
    reads them.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def offline_rows(folder: Path) -> list[dict[str, Any]]:
    """The history rows in all offline runs of a folder."""
    rows = []
    for history in offline_records(folder, "history"):
        items = {
            item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item
        }
        rows.append({**items, "_step": history.step.num})
    return rows


def offline_summary(folder: Path) -> dict[str, Any]:
    """The summary that the records of all offline runs of a folder come to."""
    updates = (item for summary in offline_records(folder, "summary") for item in summary.update)
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates}


def offline_alerts(folder: Path) -> list[tuple[str, str, str]]:
    """Level, title and text of the alerts in all offline runs of a folder."""
    return [(alert.level, alert.title, alert.text) for alert in offline_records(folder, "alert")]


wait_for = partial(until, seconds=60)


def ended(folder: Path) -> list[int]:
    """The exit codes in all offline runs of a folder.

    W&B's own process writes the end of a file after its `finish`.
    """
    wait_for(lambda: any(offline_records(folder, "exit")))
    return [record.exit_code for record in offline_records(folder, "exit")]
