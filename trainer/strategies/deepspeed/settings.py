"""A user's DeepSpeed JSON next to an experiment: which settings apply, and which contradict it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.config import Tree
from samestep.errors import ConfigError
from samestep.stored_json import JsonError, read_json

_ZERO = "zero_optimization"
# How DeepSpeed gathers and reduces: changes memory and throughput, but not the step.
_TAKEN = {
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
# Settings of DeepSpeed's own step, log, optimizer and checkpoints, which are not used.
_WITHOUT_EFFECT = {
    "dump_state",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
}
# Settings that may be present with these values, at which the step is samestep's.
_HARMLESS: Tree = {
    "bf16.immediate_grad_update": False,
    "check_grad_overflow": False,
    "communication_data_type": "fp32",
    "disable_allgather": False,
    "fp16.auto_cast": False,
    "gradient_accumulation_steps": 1,
    "gradient_predivide_factor": 1.0,
    "prescale_gradients": False,
    "seq_parallel_communication_data_type": "fp32",
    "sparse_gradients": False,
    "use_node_local_storage": False,
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_params": False,
    "zero_optimization.legacy_stage1": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_quantized_weights": False,
}
_FIXES = {
    "activation_checkpointing": "set training.activation_checkpointing=true instead",
    "gradient_accumulation_steps": "it follows from the batch sizes and the world size",
    "scheduler": "set schedule instead",
}


def read(path: str) -> Tree:
    """Reads a DeepSpeed JSON, without disabled sections and sections that are "auto".

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        tree = read_json(Path(path), dict[str, Any])
    except (OSError, JsonError) as error:
        raise ConfigError(
            f"strategy.config {path} cannot be read: {error}. Name a JSON file of DeepSpeed."
        ) from error
    found = {key: _enabled(key, value) for key, value in tree.items()}
    return {key: value for key, value in found.items() if value is not None}


def zero_section(tree: Tree) -> Tree:
    """Returns the settings of communication in a JSON that `check` has accepted."""
    section: Tree = {}
    for key, value in _flat(tree):
        if key in _TAKEN:
            # "offload_param.pin_memory" becomes a nested section again.
            *parents, name = key.removeprefix(f"{_ZERO}.").split(".")
            place = section
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = value
    return section


def check(path: str, tree: Tree, experiment: Tree) -> None:
    """Rejects settings that contradict the experiment, or that would change its step.

    Args:
        path: of the JSON.
        tree: its content.
        experiment: as plain values.

    Raises:
        ConfigError: naming all such keys.
    """
    # Three classes of keys: those that the experiment decides, harmless ones, and all others.
    expected = _expected(experiment)
    wrong = []
    for key, value in _flat(tree):
        if key in expected:
            setting, values = expected[key]
            if value not in values:
                # Phases may have equal sizes: each is named once.
                meant = " or ".join(dict.fromkeys(map(json.dumps, values)))
                wrong.append(f"{key} is {json.dumps(value)} and by {setting} it is {meant}")
        elif key not in _TAKEN | _WITHOUT_EFFECT and not _harmless(key, value):
            fix = _FIXES.get(key.partition(".")[0], "not supported, as it could change the step")
            wrong.append(f"{key} ({fix})")
    if wrong:
        raise ConfigError(
            f"strategy.config {path} does not go with the experiment: {'; '.join(wrong)}. Remove "
            "these keys from a copy of the file, so that the experiment's settings hold, or change "
            "the settings."
        )


def _expected(experiment: Tree) -> dict[str, tuple[str, list[object]]]:
    """DeepSpeed's keys that an experiment determines: the name of the setting, and valid values."""
    training, strategy = experiment["training"], experiment["strategy"]
    # A run without phases has the sizes of `training` alone.
    precision = training["precision"]
    phases = experiment["phases"] or [{}]

    def sizes(name: str) -> list[object]:
        return [phase.get(name) or training[name] for phase in phases]

    def device(setting: str) -> list[object]:
        return ["cpu" if strategy[setting] else "none"]

    expected: dict[str, tuple[str, list[object]]] = {
        "train_batch_size": ("training.global_batch_size", sizes("global_batch_size")),
        "train_micro_batch_size_per_gpu": ("training.micro_batch_size", sizes("micro_batch_size")),
        "gradient_clipping": ("training.max_grad_norm", [training["max_grad_norm"] or 0.0]),
        "bf16.enabled": ("training.precision", [precision == "bf16"]),
        "fp16.enabled": ("training.precision", [precision == "fp16"]),
        "data_types.grad_accum_dtype": ("strategy", ["fp32"]),
        "zero_optimization.stage": ("strategy.stage", [strategy["stage"]]),
        "zero_optimization.offload_optimizer.device": (
            "strategy.offload_optimizer",
            device("offload_optimizer"),
        ),
        "zero_optimization.offload_param.device": (
            "strategy.offload_parameters",
            device("offload_parameters"),
        ),
        "optimizer.type": ("optimizer.kind", [experiment["optimizer"]["kind"]]),
        "optimizer.params.adam_w_mode": ("optimizer.kind", [True]),
    }
    for key, value in experiment["optimizer"].items():
        expected[f"optimizer.params.{key}"] = (f"optimizer.{key}", [value])
    return expected


def _enabled(key: str, section: object) -> object:
    """A section without the settings that have no effect; None if it has no effect at all."""
    if not isinstance(section, dict):
        return section
    if section.get("enabled") in (False, "auto"):
        return {"enabled": False} if section["enabled"] is False else None
    # Hugging Face's Trainer fills in a scheduler whose numbers are all "auto".
    params = section.get("params")
    is_open = isinstance(params, dict) and all(value == "auto" for value in params.values())
    return None if key == "scheduler" and is_open else section


def _harmless(key: str, value: object) -> bool:
    disabled = value is False and key.endswith(".enabled")
    return value is None or disabled or value == _HARMLESS.get(key, ...)


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The values of a tree by dotted keys, without those that are "auto"."""
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif value == "auto":
            continue
        elif name == "optimizer.type":
            # DeepSpeed's Adam decouples weight decay by default.
            yield name, "adamw" if str(value).lower() == "adam" else str(value).lower()
        else:
            yield name, value
