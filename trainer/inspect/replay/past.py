"""The past of a run, recomputed in one process: its batches, and its steps from a checkpoint."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from data_pipeline.reading.concat_dataset import AnyDataset
from data_pipeline.reading.loader import StreamingLoader
from samestep.config import Tree, decode
from samestep.config.tree import merge_overrides
from samestep.errors import ConfigError, DataError
from samestep.examples import LoaderState
from samestep.hashing import hexadecimal
from samestep.untrusted import read_stored
from trainer.checkpoint import integrity
from trainer.checkpoint.manager import Checkpointer
from trainer.checkpoint.meta import read_meta
from trainer.training.compose import build_trainer, checkpoint_folder, open_loader, open_strategy
from trainer.training.experiment import Experiment
from trainer.training.ledger import Row, corrupt_shards, intact_rows
from trainer.training.loop import Trainer
from trainer.training.passes import Loader
from trainer.training.phases import MicroBatchSize, phase_of

logger = logging.getLogger(__name__)


def stored_settings(folder: str, overrides: Sequence[str] = ()) -> Tree:
    """Returns the settings in a run's folder, with some overridden.

    Raises:
        ConfigError: it is no folder of a run.
    """
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not a run (it has no config.yaml). Name the output folder of a run"
        )
    return read_stored(path, overrides)


def settings_at(folder: str, step: int, overrides: Sequence[str]) -> Tree:
    """Returns the run's settings at a step: of the first checkpoint since, or else the newest.

    A run that is resumed may get other settings from then on.

    Raises:
        ConfigError: it is no folder of a run, or an override drops another.
    """
    tree: Tree = {**stored_settings(folder, overrides), "output": folder}
    root = checkpoint_folder(decode(Experiment, tree))
    # Settings of the first checkpoint at or after the step were in force when it was taken.
    for since in integrity.committed_steps(root):
        if since >= step:
            tree = read_meta(integrity.step_folder(root, since))["config"]
            return {**merge_overrides(tree, overrides), "output": folder}
    return tree


@contextmanager
def open_past(experiment: Experiment, most: int) -> Iterator[Past]:
    """Opens a run at its newest checkpoint of at most `most` steps, or at its start.

    Args:
        experiment: with a strategy for one process.
    """
    with open_strategy(experiment) as strategy:
        root = checkpoint_folder(experiment)
        checkpointer = Checkpointer(root, experiment.checkpoint, rank=0, world_size=1)
        step = checkpointer.latest(most=most)
        ledger = _ledger(experiment)
        if step is None and ledger and ledger[0]["kind"] == "taken":
            raise DataError(
                f"the run began with {ledger[0]['by']}, and no checkpoint of at most {most} steps "
                "is left. Replay a step after the oldest checkpoint; checkpoint.keep_every keeps "
                "some of a new run"
            )
        if experiment.data.group_by_length is None:  # else a mixture cannot change
            # The ledger's mixture counts, not the one that the settings ask for.
            data = replace(experiment.data, on_change="accept")
            experiment = replace(experiment, data=data)
        dataset = experiment.data.open()
        # A checkpoint holds all weights, unless some are frozen: these are in `init_from`.
        weights = experiment.init_from if step is None or experiment.freezes else None
        trainer = build_trainer(
            experiment, dataset, strategy, checkpointer, weights, to_restore=step is not None
        )
        try:
            if step is not None:
                trainer.restore(step)
            yield Past(experiment, dataset, trainer, ledger)
        finally:
            trainer.close()


def _ledger(experiment: Experiment) -> list[Row]:
    path = Path(experiment.output) / "ledger.jsonl"
    return [row for row, _ in intact_rows(path)] if path.exists() else []


class Past:
    """A run at one of its checkpoints, in this process, and the steps that followed.

    Args:
        trainer: restored from the checkpoint.
        ledger: its rows.
    """

    def __init__(
        self, experiment: Experiment, dataset: AnyDataset, trainer: Trainer, ledger: Sequence[Row]
    ) -> None:
        self.experiment, self.dataset, self.trainer = experiment, dataset, trainer
        # Where the checkpoint stands; `train` moves the trainer on.
        self._step, self._order = trainer.state.step, trainer.phase.order
        self._place = trainer.loader.state_dict()
        self._ledger = ledger
        self._fed = [row for row in ledger if row["kind"] == "fed"]
        self._orders = [row for row in ledger if row["kind"] == "order"]

    def excluded(self, step: int) -> list[Row]:
        """Returns the rows of examples that were excluded between the checkpoint and a step."""
        rows = (row for row in self._ledger if row["kind"] == "excluded")
        return [row for row in rows if self._step < row["step"] <= step]

    def compare(self, step: int) -> tuple[int, int] | None:
        """Recomputes all batches of the ledger's row with a step, and compares their digest.

        Returns:
            The first and the last step of the row; None if the ledger has no row of this step.

        Raises:
            DataError: the digest differs.
        """
        row = self._row(step)
        if row is None:
            return None
        first, last = row["first_step"], row["step"]
        # A row has one digest for all its steps, so all of them are needed to check one.
        digest = 0
        with self.open_loader(first, self.excluded(last)) as loader:
            for micro_batches in islice(loader, last - first + 1):
                digest += sum(int(batch["digest"].sum()) for batch in micro_batches)
        found = hexadecimal(digest)
        if found != row["digest"]:
            raise DataError(
                f"the recomputed batches of steps {first} to {last} have the digest {found}, and "
                f"the ledger of {self.experiment.output} says {row['digest']}: the dataset or the "
                "settings differ from the run's. Find the difference with: samestep ledger "
                "verify"
            )
        return first, last

    def _row(self, step: int) -> Row | None:
        """The ledger's row of kind `fed` with a step, if there is one."""
        after = bisect.bisect(self._fed, step, key=lambda row: row["first_step"])
        row = self._fed[after - 1] if after else None
        return row if row and step <= row["step"] else None

    def _batch_size(self, step: int) -> int:
        """Examples of a step: by the ledger, or by the settings where that has no row of it."""
        row = self._row(step)
        if row is None:
            return phase_of(self.trainer.phases, step - 1).global_batch_size
        examples = sum(end - first for first, end in row["examples"])
        size: int = examples // (row["step"] - row["first_step"] + 1)
        return size

    def train(self, last: int) -> Iterator[int]:
        """Trains from the checkpoint to a step, in memory only; yields the number of each step.

        Raises:
            ConfigError: the run took one of these steps with another batch size.
        """
        trainer, basis = self.trainer, None
        trainer.model.train()
        trainer.recorder.means()  # drops the steps before the checkpoint from the next means
        while trainer.state.step < last:
            step, phase = trainer.state.step + 1, trainer.phase
            if (size := self._batch_size(step)) != phase.global_batch_size:
                raise ConfigError(
                    f"the run took step {step} with {size} examples, not "
                    f"{phase.global_batch_size}. Leave --exact out; or, if all steps from the "
                    f"checkpoint of step {self._step} on had {size}, override the batch size"
                )
            # A new data order starts with a new loader, at its first example. A mixture may change
            # within an order.
            if basis != (now := (phase.order, self._order_row(step))):
                basis = now
                self._move(trainer.loader, step, self.excluded(last))
            trainer.train_step(next(iter(trainer.loader)))
            logger.info("step %d  loss %.4f", trainer.state.step, trainer.recorder.means()["loss"])
            yield trainer.state.step

    def open_loader(
        self, step: int, excluded: Sequence[Row], micro_batch_size: MicroBatchSize = "auto"
    ) -> StreamingLoader:
        """Opens a loader at the step's batch, without the examples of these rows."""
        trainer = self.trainer
        phase = replace(
            phase_of(trainer.phases, step - 1),
            global_batch_size=self._batch_size(step),
            micro_batch_size=micro_batch_size,
        )
        replica = trainer.strategy.replica
        loader = open_loader(self.experiment, self.dataset, replica, phase)
        self._move(loader, step, excluded)
        return loader

    def _move(self, loader: Loader, step: int, excluded: Sequence[Row]) -> None:
        """Moves a loader to a step, with the mixture that the ledger has for it."""
        state, row = self._state(step, excluded, loader.state_dict()), self._order_row(step)
        if row is None:
            loader.load_state_dict(state, step - 1)
        else:
            state = {**state, "mixture": row["data"]["mixture"]}
            loader.load_state_dict(state, step - 1, as_recorded=True)

    def _order_row(self, step: int) -> Row | None:
        """The ledger's row with the data order of a step, if it has one."""
        order = phase_of(self.trainer.phases, step - 1).order
        rows = [row for row in self._orders if row["order"] == order and row["step"] < step]
        return rows[-1] if rows else None

    def _state(self, step: int, excluded: Sequence[Row], begin: LoaderState) -> LoaderState:
        """Returns the state of a loader before a step.

        It is the checkpoint's, or `begin` if the step is in a later data order, moved on by the
        examples of the steps in between. A step before the checkpoint moves it back: `compare`
        starts at the first step of a ledger's row, of which the checkpoint may be in the middle.
        """
        phases = self.trainer.phases
        order = phase_of(phases, step - 1).order
        taken, place = self._step, self._place
        if order != self._order:
            taken = min(phase.first_step for phase in phases if phase.order == order)
            place = begin

        def examples(steps: range) -> int:
            return sum(self._batch_size(each + 1) for each in steps)

        # One of the two ranges is empty.
        moved = examples(range(taken, step - 1)) - examples(range(step - 1, taken))
        ranges = [part for row in excluded if row["order"] == order for part in row["examples"]]
        return {
            **place,
            "example": place["example"] + moved,
            "excluded": [*place["excluded"], *ranges],
            "corrupt": corrupt_shards(self._ledger, order),
        }
