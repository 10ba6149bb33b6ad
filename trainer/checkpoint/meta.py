"""What a checkpoint says about itself: `meta.json`, checked before anything in it is used.

Most keys belong to features of a run, which write and read them. Their types are declared here all
the same: tools that know no run (hub, retention, replay) read the keys as well, and a stranger's
file must be rejected before any of them does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Required, TypedDict

from samestep.config import Tree
from samestep.errors import CheckpointError
from samestep.storage import Digest
from samestep.stored_json import Count, JsonError, Matching, Measure, checked, parse_json
from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.integrity import META

logger = logging.getLogger(__name__)

FORMAT = 1

_Ranges = list[tuple[Count, Count]]
_Shards = list[tuple[str, str, Count]]
_Section = dict[str, Any]


# ISO 8601 with an offset, as `datetime.isoformat` writes it.
_Time = Annotated[str, Matching(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?[+-]\d\d:\d\d")]


class _Phase(TypedDict, total=False):
    steps: Required[Count]
    objective: _Section | None


class _Config(TypedDict, total=False):
    """The sections of a stored configuration; `decode` checks what is in them."""

    output: Required[str]
    model: Required[_Section]
    data: Required[_Section]
    objective: Required[_Section]
    training: Required[_Section]
    checkpoint: _Section
    phases: list[_Phase]


class _Weights(TypedDict):
    path: str
    identity: str


class _Start(TypedDict, total=False):
    run: str


class _Best(TypedDict, total=False):
    metric: Required[str]
    lowest: Required[bool]
    step: Required[Count | None]
    value: Required[Measure | None]
    since: Required[Count]


class _Data(TypedDict, total=False):
    example: Required[Count]
    mixture: list[tuple[Count, dict[str, float]]]
    excluded: _Ranges
    corrupt: _Shards


class _State(TypedDict):
    step: Count
    examples: Count
    tokens: Count


class _Ledger(TypedDict, total=False):
    head: Required[str]
    order: Required[Count]
    basis: Required[str]
    fed: Required[tuple[Count, Count] | None]
    examples: Required[_Ranges]
    excluded: Required[_Ranges]
    corrupt: _Shards


class _Faults(TypedDict, total=False):
    sound: Required[dict[str, list[float]]]
    steps: Required[list[Count]]
    in_a_row: Required[Count]


class _Scale(TypedDict):
    factor: float
    since: float
    skipped: float


class _Meta(TypedDict, total=False):
    """What a meta.json holds; which keys there are depends on what has written it."""

    step: Required[Count]
    saved: _Time
    world_size: Count
    config: _Config
    start: _Start | None
    base: _Weights | None
    teacher: str | None
    micro_batch_sizes: list[Count]
    arithmetic: dict[str, str]
    order: Count
    data: _Data
    state: _State
    window: dict[str, tuple[Measure, Measure]]
    held_rows: list[tuple[Count, dict[str, Measure | str]]]
    digest: Annotated[str, Matching("[0-9a-f]{1,16}")]
    ledger: _Ledger | None
    best: _Best
    faults: _Faults
    loss_scale: _Scale
    notes: _Section


class _Content(dict[str, Any]):
    """The content of a meta.json, in which a missing key is damage of that file."""

    def __init__(self, path: Location, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise integrity.damaged(self._path, f"it has no {key!r}")


def read_meta(folder: Location) -> Tree:
    """Returns a committed step's description: format, step, world_size, versions and `save`'s meta.

    Raises:
        CheckpointError: the step is not committed, its meta.json is damaged, or this version does
            not know its format.
    """
    return _read_meta(folder, integrity.read_checksums(folder)[META])


@dataclass(frozen=True)
class OpenedStep:
    """A committed step whose small files were read.

    Attributes:
        folder: of the step.
        meta: as `read_meta` returns it.
        files: with tensors, in the order of the ranks that wrote them.
    """

    folder: Location
    meta: Tree
    files: list[Location]

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""
        step: int = self.meta["step"]
        return step


def open_step(folder: Location) -> OpenedStep:
    """Opens a committed step, for fewer requests than `read_meta` and `integrity.rank_files`.

    Raises:
        CheckpointError: see `read_meta`.
    """
    checksums = integrity.read_checksums(folder)
    meta = _read_meta(folder, checksums[META])
    return OpenedStep(folder, meta, integrity.tensor_files(folder, checksums))


def _read_meta(folder: Location, expected: Digest) -> Tree:
    content = integrity.read_checked(folder / META, expected)
    try:
        meta: Tree = parse_json(content, dict[str, Any])
        # Checked after the checksum: a damaged file could have any format.
        if meta.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {meta.get('format')!r:.20} and this samestep "
                f"reads format {FORMAT}. Use the samestep that wrote it"
            )
        # All keys, used or not: whoever reads one later must not meet another type.
        checked(meta, _Meta)
    except JsonError as error:
        raise integrity.damaged(folder / META, str(error)) from error
    # A run that leaves a setting out has the value it began with, not a new run's default.
    if "config" in meta:
        from samestep.config import renamed

        meta["config"] = renamed.current(meta["config"])
    return _Content(folder / META, meta)


def newest_meta(root: Location) -> Tree:
    """Returns the description of the newest readable checkpoint; {} if there is none."""
    # A damaged step is skipped, as a restart would do.
    for step in reversed(integrity.committed_steps(root)):
        try:
            return read_meta(integrity.step_folder(root, step))
        except CheckpointError as error:
            logger.warning("skipping the checkpoint of step %d: %s", step, error)
    return {}


def best_step(root: Location) -> int | None:
    """Returns the best step of a run, as its newest readable checkpoint names it, or None.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    best: int | None = newest_meta(root).get("best", {}).get("step")
    return best
