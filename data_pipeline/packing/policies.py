"""What each packing policy needs, and what it makes of a shard, by the objective's `PackSpec`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from data_pipeline.format.manifest import Manifest
from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing import pairs, parts, plans, text_pairs
from data_pipeline.packing.plans import PACKING_VERSION, PackPlan
from trainer.config import renamed
from trainer.errors import ConfigError, DataError
from trainer.examples import PackSpec, Parts, Policy


def packing_digest(spec: PackSpec, policy: Policy) -> str:
    """Hex digest of how documents become examples; equal digests and seeds mean equal examples."""
    text = f"{PACKING_VERSION} {policy} {spec.sequence_length} {spec.prefix} {spec.suffix}"
    if spec.sides is not None:
        text += f" {spec.sides.size} {spec.sides.cost}"
    if spec.text_pairs:
        text += f" text_pairs {spec.sides} {spec.truncate_sources}"
    if spec.truncate_targets:
        text += " truncate_targets"
    if spec.parts is not None:
        text += f" {_description(spec.parts)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _description(parts: Parts) -> str:
    """The text that is hashed. Checkpoints and ledgers hold digests of it, so it must never change."""
    stored = renamed.original({"settings": {"task": {"target": parts.kind}}})
    target = stored["settings"]["task"]["target"]
    settings = f"between={parts.between}, choices={parts.choices}, stride={parts.stride}, most={parts.most}"
    return f"Parts(target={target!r}, layout={parts.layout!r}, {settings})"


def check_policy(manifest: Manifest, name: str, spec: PackSpec, policy: Policy) -> None:
    """Refuses a policy that the objective or the dataset, `name` in messages, does not go with.

    Raises:
        ConfigError: the objective needs another one.
        DataError: the dataset was built without what it needs.
    """
    if spec.text_pairs:
        if policy not in ("best_fit", "padded"):
            raise ConfigError(
                f"the objective takes pairs of texts and data.packing is {policy}; use data.packing=best_fit, or "
                "padded for one pair an example"
            )
        if manifest.target_file is None:
            raise DataError(
                f"the objective takes pairs of texts, and {name} holds documents; build a dataset from a source of "
                "pairs (jsonl_pairs, tsv_pairs or parallel_text)"
            )
    if spec.parts is not None:
        if policy != "padded":
            raise ConfigError(
                f"the objective takes rows of a task, an example each, and data.packing is {policy}; use "
                "data.packing=padded"
            )
        found = None if manifest.task is None else manifest.task.kind
        kind = spec.parts.kind
        if found != kind:
            holds, fix = "documents without labels", "use another objective"
            if found is not None:
                holds, fix = f"rows for {found}", f"use the objective {found}"
            raise DataError(
                f"the objective takes rows for {kind}, and {name} holds {holds}; {fix}, or build a dataset from a "
                f"source of kind {kind}"
            )
    if spec.pairs and policy != "pairs":
        raise ConfigError(
            f"the objective needs pairs of segments and data.packing is {policy}; use data.packing=pairs"
        )
    if policy == "pairs" and not manifest.has_sentences:
        raise DataError(
            f"data.packing pairs needs to know where sentences begin, and {name} was built without; build it again "
            "with sentences=rules"
        )


def needs_parts(spec: PackSpec, policy: Policy) -> bool:
    """Whether shards must say where the parts of their documents begin (`ShardIndex.sentences`)."""
    return policy == "pairs" or spec.text_pairs or spec.parts is not None


def plan_shard(
    shard: ShardIndex, spec: PackSpec, policy: Policy, key: int = 0, epoch: int = 0
) -> PackPlan:
    """Packs the documents of a shard; `pairs` alone gives other plans in other epochs."""
    if spec.text_pairs:
        return text_pairs.plan(shard, spec, policy, key)
    if spec.parts is not None:
        return parts.plan(shard, spec)
    if policy == "pairs":
        return pairs.plan(shard.length, shard.sentences, spec, key, epoch)
    return plans.plan(shard.length, spec, policy, key)


def count_shard(
    shard: ShardIndex, spec: PackSpec, policy: Policy, key: int, files: Sequence[str]
) -> int:
    """The number of examples of `plan_shard`; `files` are those that the shard's origins count.

    Raises:
        DataError: a text does not fit into an example, or a row has another number of texts than the objective takes.
        ConfigError: examples are too short to hold text.
    """
    if spec.text_pairs:
        text_pairs.check(shard, spec, files)
        return text_pairs.count_examples(shard, spec, policy)
    if spec.parts is not None:
        parts.check(shard, spec, files)
        return parts.count_examples(shard, spec)
    if policy == "pairs":
        return pairs.count_examples(shard.length, shard.sentences, spec, key)
    return plans.count_examples(shard.length, spec, policy)
