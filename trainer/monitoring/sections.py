"""Names of metrics in dashboards, which group charts by the part of a name before the slash."""

from __future__ import annotations

from collections.abc import Mapping

_SYSTEM = (
    "compilations",
    "energy_joules",
    "peak_memory_gib",
    "peak_rss_gib",
    "slowest_rank",
    "slowest_rank_lag",
)


def sectioned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Renames metrics of metrics.jsonl to the names that W&B and TensorBoard show.

    "perf/mfu" becomes "throughput/mfu", "perf/peak_rss_gib" "system/peak_rss_gib", "train/tokens"
    "data/tokens" and "heldout/mlm_loss" "loss/heldout_mlm_loss". Others stay, such as "train/lr".
    """
    return {_name(name): value for name, value in metrics.items()}


def _name(name: str) -> str:
    part, _, metric = name.partition("/")
    # What a machine has, and what it does with it, are two sections.
    if part == "perf":
        return f"{'system' if metric in _SYSTEM else 'throughput'}/{metric}"
    # Counts of what was read, beside which losses are plotted.
    if name in ("train/examples", "train/tokens"):
        return f"data/{metric}"
    # With a single slash, as W&B can also group by all parts of a name but the last.
    if metric.endswith(("loss", "perplexity")):
        return f"loss/{name.replace('/', '_')}"
    return name
