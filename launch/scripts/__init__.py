"""Scripts to read, edit and submit without `samestep launch`.

The folders slurm, kubernetes and tpu hold them. `python -m launch.scripts` writes them, from the
launchers' own parts; a test compares. `python -m launch.scripts --forecasts` asks `samestep plan`
for their costs first, which takes some minutes.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
FORECASTS = FOLDER / "forecasts.json"


@dataclass(frozen=True)
class Run:
    """What a script runs.

    Attributes:
        about: what it does, in one sentence.
        experiment: a file of configs/.
        device: of `samestep plan --throughput`.
        devices: their number.
        overrides: settings of the experiment, without spaces in them.
    """

    about: str
    experiment: str
    device: str
    devices: int
    overrides: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Of its forecast: scripts of several clusters have the same run."""
        return f"{self.experiment} on {self.devices} {self.device}, {self.implementation}"

    @property
    def implementation(self) -> str:
        """Which of plan's predictions is of this run; XLA always compiles."""
        compiled = self.device.startswith("v") or "training.compile=true" in self.overrides
        return "compiled" if compiled else "eager"


def header(run: Run, submit: str, *further: str) -> list[str]:
    """The comment at the beginning of a script.

    Args:
        submit: the line that submits it.
        further: paragraphs after that line.
    """
    forecast = json.loads(FORECASTS.read_text(encoding="utf-8"))[run.key]
    hours, device = forecast["hours"], forecast["device"]
    cost = (
        f"Cost, a forecast of `samestep plan --throughput {run.device}`, {run.implementation}: "
        f"{_rounded(hours)} hours on {run.devices} {device}, {_rounded(hours * run.devices)} "
        "device hours, without the time for data and checkpoints."
    )
    about = [line for text in (run.about, cost) for line in textwrap.wrap(text, 98)]
    rest = [line for text in further for line in textwrap.wrap(text, 98)]
    return [f"# {line}".rstrip() for line in [*about, "", f"  {submit}", "", *rest]]


def _rounded(number: float) -> str:
    """Two digits, as a forecast deserves: 0.28, 35,000."""
    return f"{float(f'{number:.2g}'):,g}"
