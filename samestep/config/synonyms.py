"""Messages about an unknown key: where it belongs, or which name was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping

SETTINGS: Mapping[str, str] = {
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "peak_lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "betas": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer",
    "lr_scheduler_type": "schedule.decay",
    "lr_schedule": "schedule.decay",
    "scheduler": "schedule.decay",
    "warmup": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_steps",
    "batch_size": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.micro_batch_size",
    "accumulate_grad_batches": "training.micro_batch_size",
    "max_steps": "training.steps",
    "num_train_steps": "training.steps",
    "total_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "epochs": "training.steps",
    "clip_grad_norm": "training.max_grad_norm",
    "gradient_clipping": "training.max_grad_norm",
    "gradient_clip_val": "training.max_grad_norm",
    "gradient_checkpointing": "training.activation_checkpointing",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "mixed_precision": "training.precision",
    "dtype": "training.precision",
    "torch_compile": "training.compile",
    "logging_steps": "training.log_every",
    "log_interval": "training.log_every",
    "eval_steps": "training.evaluate_every",
    "eval_interval": "training.evaluate_every",
    "early_stopping_patience": "training.best.patience",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "output_dir": "output",
    "save_dir": "output",
    "max_seq_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "max_tokens": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "block_size": "data.sequence_length",
    "num_workers": "data.threads",
    "dataloader_num_workers": "data.threads",
    "train_file": "data.path",
    "dataset": "data.path",
    "n_layer": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "d_model": "model.width",
    "n_embd": "model.width",
    "hidden_size": "model.width",
    "n_head": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "d_ff": "model.ffn_width",
    "intermediate_size": "model.ffn_width",
    "n_positions": "model.max_positions",
    "max_position_embeddings": "model.max_positions",
    "hidden_act": "model.activation",
    "hidden_dropout_prob": "model.dropout",
    "attention_probs_dropout_prob": "model.attention_dropout",
    "type_vocab_size": "model.type_vocab",
    "layer_norm_eps": "model.norm_eps",
    "mlm_probability": "objective.mask_fraction",
    "masking_ratio": "objective.mask_fraction",
    "report_to": "tracking",
    "wandb": "tracking.wandb",
    "run_name": "tracking.wandb.name",
    "resume_from_checkpoint": "output",
    "model_name_or_path": "init_from",
    "pretrained": "init_from",
    "fsdp": "strategy",
    "ddp": "strategy",
    "deepspeed": "strategy",
    "zero_stage": "strategy.stage",
    "device": "accelerator",
    "use_cpu": "accelerator",
}
"""Last part of a key -> the setting of an experiment that does it."""


_OTHER_FILES = {
    "kind": "a cluster, for samestep launch CLUSTER EXPERIMENT",
    "source": "a dataset, for samestep data build",
    "question": "a study, for samestep study",
    **dict.fromkeys(
        ("data", "init_from", "model", "objective", "optimizer", "schedule", "training"),
        "an experiment, for samestep train",
    ),
}
"""Key outside of all sections -> what the file with it describes, and the command for it."""


def place(root: object, path: str, key: str, known: Iterable[str]) -> str:
    """Where the setting is that a user has looked for in another place or by another name."""
    setting = SETTINGS.get(key)
    sections = _sections(root)
    if setting is not None and setting.partition(".")[0] in sections.get("", ()):
        names = ", ".join(sorted(known))
        return f"set {setting} instead. Known{f' in {path}' * bool(path)}: {names}"
    elsewhere = [_join(section, key) for section, names in sections.items() if key in names]
    if elsewhere:
        return f"set {' or '.join(elsewhere)} instead"
    other = _OTHER_FILES.get(key) if not path else None
    return (f"a file with it describes {other}. " if other else "") + suggest(key, known)


def _sections(schema: object, path: str = "") -> dict[str, tuple[str, ...]]:
    """Path -> keys of a dataclass and of the dataclasses in it, without kinds."""
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        return {}
    found = {path: tuple(field.name for field in dataclasses.fields(schema))}
    for name, hint in typing.get_type_hints(schema).items():
        # Sections in a list have a number in their path, and in a mapping a name.
        inner = () if typing.get_origin(hint) in (tuple, dict) else typing.get_args(hint)
        for part in (hint, *inner):
            if dataclasses.is_dataclass(part):
                found |= _sections(part, _join(path, name))
    return found


def suggest(word: str, known: Iterable[str]) -> str:
    """All known names, and the one that was probably meant."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(names)}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
