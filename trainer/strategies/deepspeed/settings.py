"""A user's DeepSpeed JSON beside an experiment.

What is taken from it, and what contradicts the experiment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trainer.config import Tree
from trainer.errors import ConfigError

_ZERO = "zero_optimization"
_TAKEN = {  # how DeepSpeed gathers and reduces, which changes memory and speed only
    f"{_ZERO}.{key}"
    for key in (
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "enable_sanity_checks",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer.pin_memory",
        "offload_param.pin_memory",
        "overlap_comm",
        "parameter_alignment",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage3_allgather_sequential",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold",
        "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size",
        "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
    )
}
_WITHOUT_EFFECT = {  # they are about DeepSpeed's own step, log, optimizer and checkpoints
    "dump_state",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    *(
        f"{_ZERO}.{key}"
        for key in (
            "elastic_checkpoint",
            "gather_16bit_weights_on_model_save",
            "ignore_unused_parameters",
            "load_from_fp32_weights",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    ),
}
_HARMLESS: Tree = {  # the values at which these are what they are here
    "communication_data_type": "fp32",
    "gradient_accumulation_steps": 1,
    "gradient_predivide_factor": 1.0,
    "seq_parallel_communication_data_type": "fp32",
    f"{_ZERO}.zero_hpz_partition_size": 1,
    **dict.fromkeys(
        (
            "bf16.immediate_grad_update",
            "check_grad_overflow",
            "disable_allgather",
            "fp16.auto_cast",
        ),
        False,
    ),
    **dict.fromkeys(("prescale_gradients", "sparse_gradients", "use_node_local_storage"), False),
    **dict.fromkeys(
        (f"{_ZERO}.{key}" for key in ("cpu_offload", "cpu_offload_params", "legacy_stage1")), False
    ),
    **dict.fromkeys((f"{_ZERO}.zero_quantized_{what}" for what in ("weights", "gradients")), False),
}
_KINDS = {"adam": "adamw"}  # DeepSpeed's Adam decouples weight decay unless it is told otherwise
_FIXES = {
    "activation_checkpointing": "set training.activation_checkpointing=true instead",
    "gradient_accumulation_steps": "it follows from the batch sizes and the world size",
    "scheduler": "set schedule instead",
}


def read(path: str) -> Tree:
    """A DeepSpeed JSON; what is "auto", as in those for Hugging Face's Trainer, or switched off is
    left out.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"strategy.config {path} cannot be read: {error}; name a JSON file of DeepSpeed"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"strategy.config {path} is no object; name a JSON file of DeepSpeed")
    return {key: rest for key, value in tree.items() if (rest := _on(key, value)) is not None}


def zero_section(tree: Tree) -> Tree:
    """What is taken over from a JSON that `check` has passed.

    DeepSpeed's settings of communication.
    """
    section: Tree = {}
    for key, value in _flat(tree):
        if key in _TAKEN:
            *parents, name = key.removeprefix(f"{_ZERO}.").split(".")
            place = section
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = value
    return section


def check(path: str, tree: Tree, experiment: Tree) -> None:
    """Refuses what contradicts the experiment, and what would make another step of it, all at once.

    Args:
        path: of the JSON.
        tree: its content.
        experiment: as plain values; its strategy is ours.

    Raises:
        ConfigError: naming the keys.
    """
    said = _said(experiment)
    wrong = []
    for key, value in _flat(tree):
        if key in said:
            setting, expected = said[key]
            if value not in expected:
                meant = " or ".join(dict.fromkeys(map(json.dumps, expected)))
                wrong.append(f"{key} is {json.dumps(value)} and by {setting} it is {meant}")
        elif key not in _TAKEN | _WITHOUT_EFFECT and not _harmless(key, value):
            fix = _FIXES.get(
                key.partition(".")[0], "it is not supported, as it could make another step"
            )
            wrong.append(f"{key} ({fix})")
    if wrong:
        raise ConfigError(
            f"strategy.config {path} does not go with the experiment: {'; '.join(wrong)}. Remove "
            "these keys from a "
            "copy of the file, so that the experiment's settings hold, or change the settings"
        )


def _said(experiment: Tree) -> dict[str, tuple[str, list[object]]]:
    """What an experiment says of DeepSpeed's keys.

    The name of the setting, and the values that are meant by it.
    """
    training, strategy, optimizer = (
        experiment[section] for section in ("training", "strategy", "optimizer")
    )
    precision = training["precision"]
    said = {
        "gradient_clipping": ("training.max_grad_norm", training["max_grad_norm"] or 0.0),
        "bf16.enabled": ("training.precision", precision == "bf16"),
        "fp16.enabled": ("training.precision", precision == "fp16"),
        "data_types.grad_accum_dtype": ("strategy", "fp32"),
        f"{_ZERO}.stage": ("strategy.stage", strategy["stage"]),
        "optimizer.type": ("optimizer.kind", optimizer["kind"]),
        "optimizer.params.adam_w_mode": ("optimizer.kind", True),
    }
    for key, setting in (
        ("offload_optimizer", "offload_optimizer"),
        ("offload_param", "offload_parameters"),
    ):
        said[f"{_ZERO}.{key}.device"] = (
            f"strategy.{setting}",
            "cpu" if strategy[setting] else "none",
        )
    said |= {
        f"optimizer.params.{key}": (f"optimizer.{key}", value) for key, value in optimizer.items()
    }
    phases = experiment["phases"] or [{}]
    sizes = {
        "train_batch_size": "global_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
    }
    return {key: (setting, [value]) for key, (setting, value) in said.items()} | {
        key: (f"training.{size}", [phase.get(size) or training[size] for phase in phases])
        for key, size in sizes.items()
    }


def _on(key: str, section: object) -> object:
    """A section without what does not count.

    A scheduler all of whose numbers are left open, what is switched off.
    """
    if not isinstance(section, dict):
        return section
    if section.get("enabled") in (False, "auto"):
        return {"enabled": False} if section["enabled"] is False else None
    if key == "scheduler" and all(
        value == "auto" for value in section.get("params", {"": None}).values()
    ):
        return None
    return section


def _harmless(key: str, value: object) -> bool:
    return (
        value is None
        or (value is False and key.endswith(".enabled"))
        or value == _HARMLESS.get(key, ...)
    )


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The values of a tree by dotted keys, without those that are left to the experiment."""
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif value == "auto":
            continue
        elif name == "optimizer.type":
            yield name, _KINDS.get(str(value).lower(), str(value).lower())
        else:
            yield name, value
