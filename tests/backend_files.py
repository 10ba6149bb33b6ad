"""The experiments of configs/pretrain/tpu and configs/strategies, and how tests make them small."""

from __future__ import annotations

from pathlib import Path

from samestep.config import read_tree

TPU = sorted(Path("configs/pretrain/tpu").glob("*.yaml"))
STRATEGIES = sorted(Path("configs/strategies").glob("*.yaml"))


def small(file: Path, text: str, text_with_sentinels: str) -> list[str]:
    """Overrides for two steps of a tiny model on a CPU, by the file's strategy.

    Args:
        text: a dataset with sentences, of 600 tokens.
        text_with_sentinels: another, of 700.
    """
    kind = read_tree(file)["model"]["kind"]
    settings = [
        f"data.path={text_with_sentinels if kind == 't5' else text}",
        "data.lanes=16",
        "phases=[]",
        "schedule={warmup_steps: 1}",
        "training={steps: 2, global_batch_size: 8, micro_batch_size: 2, precision: fp32, "
        "evaluate_every: null, log_every: 1, activation_checkpointing: false}",
        "checkpoint.folder=null",
        "tracking.wandb=null",
    ]
    if kind == "t5":
        return [
            *settings,
            "data.sequence_length=64",
            "model={layers: 1, width: 32, heads: 2, head_width: 16, ffn_width: 64}",
            "model.vocab_size=700",
        ]
    shape = "model={layers: 2, width: 32, heads: 2, ffn_width: 64, vocab_size: 600}"
    return [*settings, "data.sequence_length=32", shape]
