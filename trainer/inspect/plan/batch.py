"""The arrays of a micro-batch as the objective makes them, without a dataset.

The settings tell their shapes.
"""

from __future__ import annotations

import numpy as np

from trainer.examples import Batch, Examples, Labels, PackSpec, Vocabulary
from trainer.objectives import Objective
from trainer.tasks import TASKS, TaskKind
from trainer.training.experiment import Experiment
from trainer.training.phases import Phase

_SENTINELS = 100  # of T5's tokenizers


def stand_in(size: int) -> Vocabulary:
    """A vocabulary of a given size that has whatever an objective may ask for."""
    special = (0, 1, 2, 3, 4)
    sentinels = tuple(range(max(len(special) + 1, size - _SENTINELS), size))
    return Vocabulary(size, *special[:4], special, continuing=(), eos=4, sentinels=sentinels)


def example(experiment: Experiment, objective: Objective, phase: Phase) -> Batch:
    """The columns of one example that goes to the device, as full of text as its packing allows.

    Segments, and with them the masks of attention, are left out where the packing fills rows with
    one sequence each.
    """
    spec = objective.pack_spec(phase.sequence_length)
    columns, lengths = _pieces(spec)
    examples = Examples(
        tokens=np.full(
            sum(lengths), len(stand_in(experiment.model.vocab_size).special), dtype=np.int32
        ),
        row=np.zeros(len(lengths), dtype=np.int64),
        column=np.array(columns, dtype=np.int64),
        length=np.array(lengths, dtype=np.int64),
        key=np.zeros(1, dtype=np.uint64),
        weight=np.ones(1, dtype=np.float32),
        isolated=spec.parts is None and experiment.data.packing in ("best_fit", "padded"),
        random=np.zeros(1, dtype=np.bool_) if spec.pairs else None,
        labels=None if spec.parts is None else _labels(experiment, spec.parts.kind, sum(lengths)),
    )
    choices = 1 if spec.parts is None else spec.parts.choices
    dropout_key = np.zeros(1 if choices == 1 else (1, choices), dtype=np.int32)
    batch = {**objective.collate(examples, spec.sequence_length), "dropout_key": dropout_key}
    if experiment.data.packing == "concat":
        batch = {
            name: column
            for name, column in batch.items()
            if name not in ("segments", "target_segments")
        }
    return batch


def _pieces(spec: PackSpec) -> tuple[list[int], list[int]]:
    """The first cells and the lengths of pieces that fill an example."""
    if spec.text_pairs and spec.sides is not None:  # each text gets a token that ends it
        source, target = spec.sides.size
        target = min(target, source // 2) if spec.sides.joined else target
        return [0, 0], [source - target if spec.sides.joined else source - 1, target - 1]
    room = spec.sequence_length - spec.prefix - spec.suffix
    if not spec.pairs:  # of a task's texts that share a sequence one fills it as well as several
        choices = 1 if spec.parts is None else spec.parts.choices
        return [spec.prefix + choice * spec.sequence_length for choice in range(choices)], [
            room
        ] * choices
    room -= spec.suffix
    first = room // 2
    return [spec.prefix, spec.prefix + first + spec.suffix], [first, room - first]


def _labels(experiment: Experiment, kind: TaskKind, tokens: int) -> Labels:
    """Labels of a row: zeros, which every kind of task has, or of soft classes their probabilities."""
    soft = experiment.objective.task.reads_probabilities
    classes = len(experiment.model.labels) if soft else 1
    count = {"row": classes, "tokens": tokens, "span": 2}[TASKS[kind].labeled]
    zeros = np.zeros(1, dtype=np.int64)
    return Labels(
        np.zeros(count, dtype=np.float32),
        np.array([count]),
        document=zeros,
        begin=zeros,
        examples=zeros + 1,
    )
