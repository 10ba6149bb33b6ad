"""Which page of the documentation explains a setting, for the end of an error message."""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGES: Mapping[str, str] = {
    "accelerator": "training.md",
    "also": "tasks.md",
    "checkpoint": "checkpoints.md",
    "data": "training.md",
    "data.group_by_source": "mixtures.md",
    "data.lanes": "data_order.md",
    "data.sources": "mixtures.md",
    "grid": "finetuning.md",
    "model": "models.md",
    "model.peft": "peft.md",
    "model.scalar_mix": "finetuning_methods.md",
    "model.scalar_mix_l2": "finetuning_methods.md",
    "model.head_lstm": "finetuning_methods.md",
    "model.crf": "finetuning_methods.md",
    "objective": "objectives.md",
    "objective.guide": "retrieval_training.md",
    "objective.known_positives": "retrieval_training.md",
    "objective.learn_temperature": "retrieval_training.md",
    "objective.metrics": "tasks.md",
    "objective.of": "distillation.md",
    "objective.stride": "finetuning_methods.md",
    "objective.target_length": "seq2seq.md",
    "objective.teacher": "distillation.md",
    "optimizer": "optimizers.md",
    "phases": "training.md",
    "schedule": "training.md",
    "source": "data.md",
    "strategy": "strategies.md",
    "strategy.config": "deepspeed.md",
    "tokenizer": "data.md",
    "tracking": "monitoring.md",
    "training": "training.md",
    "training.best": "finetuning.md",
    "training.faults": "faults.md",
    "training.hang_timeout": "hangs.md",
    "training.preemption": "elastic.md",
}
"""Setting, or the section of others -> file in docs/."""

_SETTING = re.compile(
    r"(?<![\w./-])(" + "|".join({name.partition(".")[0] for name in PAGES}) + r")(\.[\w.]*\w)"
)


def page_about(message: str) -> str | None:
    """Returns the page about the first setting that a message names, as "docs/training.md".

    Returns:
        None if it names no setting with its section, such as training.steps.
    """
    if (found := _SETTING.search(message)) is None:
        return None
    name = found[0]
    # From the whole name up to its section: training.best.metric, training.best, training.
    while name not in PAGES:
        name = name.rpartition(".")[0]
    return f"docs/{PAGES[name]}"
