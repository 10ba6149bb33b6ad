"""Writes the scripts: python -m launch.scripts [--forecasts]."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

from launch.scripts import FOLDER, FORECASTS, Run, write_kubernetes, write_slurm, write_tpu


def runs() -> dict[str, Run]:
    """What each script runs, by the script's name."""
    return write_slurm.runs() | write_kubernetes.runs() | write_tpu.runs()


class Forecast(TypedDict):
    """What `samestep plan` says of a run."""

    device: str
    hours: float


def texts() -> dict[str, str]:
    """The text of each script, by name."""
    return write_slurm.scripts() | write_kubernetes.scripts() | write_tpu.scripts()


def forecast(run: Run) -> Forecast:
    """Asks `samestep plan`."""
    command = [str(Path(sys.executable).with_name("samestep")), "plan", run.experiment]
    command += [*run.overrides, "--devices", str(run.devices), "--throughput", run.device, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = [
        next(each for each in phase["predictions"] if each["implementation"] == run.implementation)
        for phase in json.loads(done.stdout)["phases"]
    ]
    return {"device": found[0]["device"], "hours": round(sum(each["hours"] for each in found), 3)}


def main() -> None:
    """Writes the forecasts, if they are asked for, and all scripts."""
    if "--forecasts" in sys.argv[1:]:
        distinct = {run.key: run for run in runs().values()}
        forecasts = {key: forecast(run) for key, run in distinct.items()}
        FORECASTS.write_text(json.dumps(forecasts, indent=2) + "\n", encoding="utf-8")
    for name, text in texts().items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
