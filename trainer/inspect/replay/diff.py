"""`samestep diff`: the first step, and there the first tensor, in which two runs differ.

Rows of digests.jsonl tell up to which step two runs are equal. Norms of the gradient, which rows
have for all steps, mostly tell in which step they part; a changed last bit may be rounded away.
Where the runs are bitwise, the steps in between are then recomputed in one process, from the newest
checkpoint of each run at which they are still equal. Two recomputed runs have digests of all steps,
so the first tensor is found; and a run that differs from its own recomputation has had a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

from samestep.config import decode
from samestep.config.tree import differences, of_kinds
from samestep.errors import ConfigError, DataError, SamestepError
from samestep.stored_json import JsonError, Measure, checked
from samestep.terminal import Console
from trainer.inspect.replay.difference import Difference, Row, Rows, first_difference
from trainer.inspect.replay.past import open_past, settings_at, stored_settings
from trainer.monitoring.jsonl import read_rows
from trainer.partition.digest import digests
from trainer.strategies.kinds import single
from trainer.training.experiment import Experiment
from trainer.training.observers.digests import digests_of
from trainer.training.observers.settings import DIGESTS, Faults
from trainer.training.state import state_tensors


class Recomputed(NamedTuple):
    """A part of a run, recomputed.

    Attributes:
        rows: of the checkpoint, and of all steps after it.
        repeats: the run's own record has the same; None if it has none of these steps.
    """

    rows: Rows
    repeats: bool | None


class Diff(NamedTuple):
    """The result of a comparison.

    Attributes:
        settings: those that differ, (first run, second run) by dotted key.
        last: the last step that both have a row of.
        difference: None if all rows are equal.
        recomputed: by run; empty where nothing was.
        first: the first difference of the recomputed runs.
        reason: why nothing was recomputed; empty if it was, or nothing differs.
    """

    settings: Mapping[str, tuple[object, object]]
    last: int
    difference: Difference | None
    recomputed: Mapping[str, Recomputed]
    first: Difference | None
    reason: str


def diff(folders: Sequence[str], most_steps: int) -> Diff:
    """Compares two runs.

    Args:
        folders: the two output folders.
        most_steps: to recompute of each run; 0: none.

    Raises:
        ConfigError: a folder is no run, or the models differ.
        DataError: a run has no digests.
    """
    trees = [{**stored_settings(folder), "output": ""} for folder in folders]
    changed = of_kinds(differences(trees[0], trees[1]))
    rows = [_recorded(folder) for folder in folders]
    common = rows[0].keys() & rows[1].keys()
    if not common:
        raise DataError(
            "no step has a row in both runs. Train them with the same training.digest_every."
        )
    # Rows of different tensors would differ in all steps, which says nothing.
    names = [set(each[min(common)]["state"]) for each in rows]
    if names[0] != names[1]:
        other = sorted(names[0] ^ names[1])[0]
        raise ConfigError(
            f"the runs train different tensors: only one has {other}. Compare runs of one model "
            "and optimizer."
        )
    found = first_difference(rows[0], rows[1])
    recomputed: dict[str, Recomputed] = {}
    reason, first = "", None
    if found is not None:
        try:
            for folder, own in zip(folders, rows, strict=True):
                recomputed[folder] = _recompute(folder, own, found, most_steps)
        # What was found without recomputing is a result, too.
        except SamestepError as error:
            reason = str(error)
        if len(recomputed) == 2:
            one, two = recomputed.values()
            first = first_difference(one.rows, two.rows)
    return Diff(changed, max(common), found, recomputed, first, reason)


class _Recorded(TypedDict):
    batch: str
    loss: Measure
    norms: list[Measure]
    gradients: dict[str, str]
    state: dict[str, str]


def _recorded(folder: str) -> dict[int, Row]:
    rows: dict[int, Row] = {
        row["step"]: row for row in read_rows(Path(folder) / DIGESTS, nested=True)
    }
    for row in rows.values():
        try:
            checked(row, _Recorded)
        except JsonError as error:
            raise DataError(
                f"{Path(folder) / DIGESTS} is damaged: in the row of step {row['step']}, {error}. "
                "Restore the file."
            ) from error
    if not rows:
        raise DataError(f"{folder} has no {DIGESTS}. Train with training.digest_every=10.")
    return rows


def _recompute(folder: str, rows: Rows, found: Difference, most_steps: int) -> Recomputed:
    """Recomputes a run from its newest checkpoint at which both are equal, up to the difference.

    Raises:
        SamestepError: that is not possible; the message says why.
    """
    experiment = decode(Experiment, settings_at(folder, found.step, ()))
    if not experiment.training.is_bitwise:
        raise ConfigError(
            "training.exact is tolerance, so one process would not compute the same bits"
        )
    # Without faults: a step that was recomputed in the run is computed once here.
    training = replace(experiment.training, digest_every=1, faults=Faults())
    experiment = replace(experiment, training=training, strategy=single.Config())
    with open_past(experiment, found.equal) as past:
        trainer, begin = past.trainer, past.trainer.state.step
        if (steps := found.step - begin) > most_steps:
            raise ConfigError(
                f"the newest checkpoint of {folder} before the difference is of step {begin}, "
                f"{steps} steps before it. Use --steps {steps} to recompute these"
            )
        state = state_tensors(trainer.strategy.parameters, trainer.optimizer)
        computed: dict[int, Row] = {begin: {"state": digests(state)}}
        for step in past.train(found.step):
            computed[step] = digests_of(trainer.observers).row
    return Recomputed(computed, _repeats(computed, rows, found))


def _repeats(computed: Rows, rows: Rows, found: Difference) -> bool | None:
    """Whether a run's record has the recomputed values, up to the difference."""
    own = {step: row for step, row in rows.items() if step in computed}
    if first_difference(computed, own) is not None:
        return False
    # The row after the difference has its norm.
    after = min((step for step in rows if step >= found.step), default=None)
    if after is None:
        return True if own else None
    # A row has the norms of all steps since the row before it, the newest last.
    norms = rows[after]["norms"]
    back = after - found.step
    if back >= len(norms):
        return True if own else None
    # By repr, as NaN differs from itself.
    return repr(norms[-1 - back]) == repr(computed[found.step]["norms"][-1])


def report(found: Diff, folders: Sequence[str], console: Console) -> None:
    """Prints where two runs part, and why if that is known."""
    for name, (old, new) in found.settings.items():
        console.print(f"setting     {name}: {old} -> {new}")
    if found.difference is None:
        console.print(f"equal       in all rows that both have, up to step {found.last}")
        return
    where = found.difference
    equal = f"up to step {where.equal}" if where.equal else "in no row"
    console.print(f"equal       {equal}")
    console.print(f"different   {where}")
    for folder, each in found.recomputed.items():
        first, last = min(each.rows), max(each.rows)
        repeats = {True: "as in the run", False: "NOT as in the run", None: "the run has no record"}
        console.print(
            f"recomputed  steps {first + 1} to {last} of {folder}: {repeats[each.repeats]}"
        )
    for line in _conclusions(found, folders):
        console.print(f"conclusion  {line}")


def _conclusions(found: Diff, folders: Sequence[str]) -> Iterator[str]:
    assert found.difference is not None
    if found.reason:
        yield f"nothing was recomputed: {found.reason}"
    if found.first is not None:
        yield f"recomputed, the runs first differ in {found.first}"
    faulty = [name for name, each in found.recomputed.items() if each.repeats is False]
    if len(faulty) == len(folders):
        yield "neither run is repeated here, so this machine or this software computes other bits"
        return
    for folder in faulty:
        yield (
            f"{folder} had a fault after step {found.difference.equal}, up to step "
            f"{found.difference.step}, which its recomputation does not have. Test the machines "
            "that computed it: samestep certify"
        )
        if not found.difference.tensors:
            yield "training.digest_every=1 would have named the tensor"
