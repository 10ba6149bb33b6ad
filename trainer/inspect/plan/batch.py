"""A micro-batch as the objective makes it, without a dataset: the settings determine its shapes."""

from __future__ import annotations

import numpy as np

from samestep.examples import Batch, Examples, Labels, PackSpec, Parts, Vocabulary
from samestep.tasks import TASKS
from trainer.objectives import Objective
from trainer.training.experiment import Experiment
from trainer.training.phases import Phase

_SENTINELS = 100  # in T5's tokenizers


def stand_in(size: int) -> Vocabulary:
    """Returns a vocabulary of this size with every special token that an objective may need."""
    # Ids do not matter here, only that special tokens and sentinels exist and differ.
    special = (0, 1, 2, 3, 4)
    sentinels = tuple(range(max(len(special) + 1, size - _SENTINELS), size))
    return Vocabulary(
        size,
        *special[:4],
        special,
        continuing=(),
        eos=4,
        sentinels=sentinels,
        full_stops=(len(special),),
    )


def example(experiment: Experiment, objective: Objective, phase: Phase) -> Batch:
    """Returns the columns of one example, with as many tokens as its packing allows.

    Under `concat` there are no segments, and so no attention mask, if a sequence fills each row.
    """
    spec = objective.pack_spec(phase.sequence_length)
    positions, lengths = _chunks(spec)
    parts = spec.parts
    tokens = sum(lengths)
    word = len(stand_in(experiment.model.vocab_size).special)  # the first id of an ordinary token
    examples = Examples(
        tokens=np.full(tokens, word, dtype=np.int32),
        row=np.zeros(len(lengths), dtype=np.int64),
        column=np.array(positions, dtype=np.int64),
        length=np.array(lengths, dtype=np.int64),
        key=np.zeros(1, dtype=np.uint64),
        weight=np.ones(1, dtype=np.float32),
        isolated=parts is None and experiment.data.packing in ("best_fit", "padded"),
        random=np.zeros(1, dtype=np.bool_) if spec.pairs is not None else None,
        labels=None if parts is None else _labels(experiment, spec.of_retrieval or parts, tokens),
    )
    choices = 1 if parts is None else parts.choices
    dropout_key = np.zeros(1 if choices == 1 else (1, choices), dtype=np.int32)
    keys = {"dropout_key": dropout_key, "step_key": np.zeros(1, dtype=np.int32)}
    batch = {**objective.collate(examples, spec.sequence_length), **keys}
    # As in training: without segments, kernels that take no mask can be used.
    names = batch.keys() & {"segments", "target_segments"}
    if experiment.data.packing == "concat" and all((batch[name] == 1).all() for name in names):
        for name in names:
            del batch[name]
    return batch


def _chunks(spec: PackSpec) -> tuple[list[int], list[int]]:
    """Returns the first positions and the lengths of the chunks that fill an example.

    With a sequence length of 16, [CLS] before and [SEP] after each chunk:

        one sequence       [CLS] 14 tokens [SEP]                 -> [1], [14]
        a pair             [CLS] 6 tokens [SEP] 7 tokens [SEP]   -> [1, 8], [6, 7]
        multiple choice    one sequence per choice, 16 apart     -> [1, 17, ...], [14, 14, ...]
        separate texts     [CLS] 6 tokens [SEP] [CLS] 6 ...      -> [1, 9], [6, 6]
    """
    if spec.text_pairs and spec.sides is not None:
        source, target = spec.sides.size
        if spec.sides.joined:  # both share one sequence of `source` positions
            target = min(target, source // 2)
            return [0, 0], [source - target, target - 1]
        return [0, 0], [source - 1, target - 1]  # each ends with one more token
    room = spec.sequence_length - spec.prefix - spec.suffix
    if spec.pairs is not None:
        room -= spec.suffix
        first = room // 2
        return [spec.prefix, spec.prefix + first + spec.suffix], [first, room - first]
    # A task's texts that share a sequence take as much room as one text.
    parts = spec.of_retrieval or spec.parts
    choices = 1 if parts is None else parts.choices
    if parts is not None and parts.layout == "separate":
        count = 2 + parts.negatives
        size = (room + parts.between) // count  # of a text and the special tokens behind it
        columns = [spec.prefix + number * size for number in range(count)]
        return columns, [size - parts.between] * count
    positions = [spec.prefix + choice * spec.sequence_length for choice in range(choices)]
    return positions, [room] * choices


def _labels(experiment: Experiment, parts: Parts, tokens: int) -> Labels:
    """Returns the labels of one example: zeros, which are valid for every kind of task."""
    soft = experiment.objective.task.reads_probabilities
    ranks = np.array([True]) if parts.kind == "retrieval" else None
    classes = len(experiment.model.labels) if soft else 1 + parts.negatives
    count = {"row": classes, "tokens": tokens, "span": 2}[TASKS[parts.kind].labeled]
    values, zeros = np.zeros(count, dtype=np.float32), np.zeros(1, dtype=np.int64)
    known = 1 + parts.negatives + parts.known_positives if parts.known_positives else 0
    return Labels(
        *(values, np.array([count])),
        document=zeros,
        begin=zeros,
        examples=zeros + 1,
        ranks=ranks,
        passages=np.zeros((1, known), dtype=np.int64) if known else None,
    )
