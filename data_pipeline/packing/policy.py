"""Selects the packing of a shard by the objective's `PackSpec` and `data.packing`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from data_pipeline.format.manifest import Manifest
from data_pipeline.format.shards import ShardIndex
from data_pipeline.packing import PACKING_VERSION, PackPlan, documents
from samestep.errors import ConfigError, DataError
from samestep.examples import PackSpec, Parts, Policy


def layout_of(manifest: Manifest, spec: PackSpec) -> PackSpec:
    """The layout of a dataset's examples. In a mixture, text pairs have `spec.of_pairs`."""
    if spec.of_pairs is not None and manifest.target_file is not None:
        return spec.of_pairs
    task = manifest.task
    if spec.of_retrieval is not None and task is not None and task.kind == "retrieval":
        return replace(spec, parts=spec.of_retrieval)
    return spec


def packing_digest(spec: PackSpec, policy: Policy) -> str:
    """Hex digest of a packing. With equal seeds, equal digests mean equal examples."""
    text = f"{PACKING_VERSION} {policy} {spec.sequence_length} {spec.prefix} {spec.suffix}"
    if spec.sides is not None:
        text += f" {spec.sides.size} {spec.sides.cost}"
    if spec.text_pairs:
        text += f" text_pairs {spec.sides} {spec.truncate_sources}"
    if spec.truncate_targets:
        text += " truncate_targets"
    if spec.pairs == "order":
        text += " order"
    if spec.parts is not None:
        text += f" {_description(spec.parts)}"
    if spec.of_pairs is not None:
        text += f" of_pairs {packing_digest(spec.of_pairs, policy)}"
    return hashlib.sha256(text.encode()).hexdigest()


def count_digest(spec: PackSpec, policy: Policy) -> str:
    """Hex digest of a packing, equal for packings with equal numbers of examples and checks."""
    spec = replace(spec, of_pairs=None)  # the layout of other datasets
    # `concat` and `padded` fill the first side only: T5's objectives share their counts.
    if policy in ("concat", "padded") and not spec.text_pairs:
        spec = replace(spec, sides=None)
    digest, parts = packing_digest(spec, policy), spec.parts
    # Counting checks rows, and cached counts of another objective would skip that.
    if parts is not None and parts.score_range is not None:
        digest = hashlib.sha256(f"{digest} {parts.score_range}".encode()).hexdigest()
    if parts is not None and parts.known_positives:
        digest = hashlib.sha256(f"{digest} {parts.known_positives}".encode()).hexdigest()
    return digest


def _description(parts: Parts) -> str:
    """The text that is hashed. It must never change: checkpoints and ledgers store its digest."""
    from samestep.config import renamed

    stored = renamed.original({"settings": {"task": {"target": parts.kind}}})
    target = stored["settings"]["task"]["target"]
    settings = f"between={parts.between}, choices={parts.choices}, "
    settings += f"stride={parts.stride}, most={parts.most}"
    if parts.kind == "retrieval":
        settings += f", negatives={parts.negatives}"
        settings += f", lengths=({parts.query_length}, {parts.passage_length})"
    return f"Parts(target={target!r}, layout={parts.layout!r}, {settings})"


def check_rows(manifest: Manifest, name: str, spec: PackSpec) -> None:
    """Checks that the dataset called `name` holds what the objective reads.

    Raises:
        DataError: it holds documents, or rows of another task.
    """
    spec = layout_of(manifest, spec)
    if spec.text_pairs and manifest.target_file is None:
        raise DataError(
            f"the objective reads pairs of texts, and {name} holds documents; build a dataset "
            "from a source of pairs (jsonl_pairs, tsv_pairs or parallel_text)"
        )
    found = None if manifest.task is None else manifest.task.kind
    if spec.parts is None or found == spec.parts.kind:
        return
    kind = spec.parts.kind
    holds, fix = "documents without labels", "use an objective of pre-training, as mlm"
    if found is not None:
        fitting = "contrastive or ranking" if found == "retrieval" else found
        holds, fix = f"rows for {found}", f"use the objective {fitting}"
    raise DataError(
        f"the objective reads rows for {kind}, and {name} holds {holds}; {fix}, or set data.path "
        f"to a dataset that was built from a source of kind {kind}"
    )


def check_policy(manifest: Manifest, name: str, spec: PackSpec, policy: Policy) -> None:
    """Checks that a policy fits the objective and the dataset called `name`.

    Raises:
        ConfigError: the objective needs another policy.
        DataError: the dataset lacks what the objective or the policy needs.
    """
    check_rows(manifest, name, spec)
    spec = layout_of(manifest, spec)
    if spec.text_pairs and policy not in ("best_fit", "padded"):
        raise ConfigError(
            f"data.packing is {policy}, and the objective reads pairs of texts; use "
            "data.packing=best_fit, or padded for one pair in each example"
        )
    if spec.parts is not None and policy != "padded":
        raise ConfigError(
            f"data.packing is {policy}, and the objective reads rows of a task; use "
            "data.packing=padded"
        )
    if spec.pairs is not None and policy != "pairs":
        raise ConfigError(
            f"data.packing is {policy}, and the objective needs pairs of segments; use "
            "data.packing=pairs"
        )
    if policy in ("pairs", "full_sentences") and not manifest.has_sentences:
        raise DataError(
            f"data.packing {policy} needs sentences, and {name} was built without; build it again "
            "with sentences=rules"
        )


def needs_parts(spec: PackSpec, policy: Policy) -> bool:
    """Whether packing reads where the parts of documents begin (`ShardIndex.sentences`)."""
    return policy in ("pairs", "full_sentences") or spec.text_pairs or spec.parts is not None


@dataclass(frozen=True)
class _Packing:
    """A way to pack shards.

    Attributes:
        plan: places the documents of a shard; from shard, key and epoch.
        count: number of examples of the plan; from shard and key. Only `pairs` uses the key.
        check: rejects pairs or rows that cannot be packed; from shard and names of source files.
    """

    plan: Callable[[ShardIndex, int, int], PackPlan]
    count: Callable[[ShardIndex, int], int]
    check: Callable[[ShardIndex, Sequence[str]], None] = lambda shard, files: None


def _packing_of(spec: PackSpec, policy: Policy) -> _Packing:
    """Chooses the packing; one that a run does not use is not imported."""
    # What the objective reads decides before `data.packing` does; `check_policy` has compared them.
    if spec.text_pairs:
        from data_pipeline.packing import text_pairs

        return _Packing(
            lambda shard, key, epoch: text_pairs.plan(shard, spec, policy, key),
            lambda shard, key: text_pairs.count_examples(shard, spec, policy),
            lambda shard, files: text_pairs.check(shard, spec, files),
        )
    if spec.parts is not None and spec.parts.kind == "retrieval":
        from data_pipeline.packing import retrieval_rows

        return _Packing(
            lambda shard, key, epoch: retrieval_rows.plan(shard, spec),
            lambda shard, key: len(shard.length),
            lambda shard, files: retrieval_rows.check(shard, spec, files),
        )
    if spec.parts is not None:
        from data_pipeline.packing import task_rows

        return _Packing(
            lambda shard, key, epoch: task_rows.plan(shard, spec),
            lambda shard, key: task_rows.count_examples(shard, spec),
            lambda shard, files: task_rows.check(shard, spec, files),
        )
    if policy == "pairs":
        from data_pipeline.packing.segment_pairs import count_examples, plan

        return _Packing(
            lambda shard, key, epoch: plan(shard.length, shard.sentences, spec, key, epoch),
            lambda shard, key: count_examples(shard.length, shard.sentences, spec, key),
        )
    if policy == "full_sentences":
        from data_pipeline.packing import full_sentences

        return _Packing(
            lambda shard, key, epoch: full_sentences.plan(shard.length, shard.sentences, spec),
            lambda shard, key: full_sentences.count_examples(shard.length, shard.sentences, spec),
        )
    return _Packing(
        lambda shard, key, epoch: documents.plan(shard.length, spec, policy, key),
        lambda shard, key: documents.count_examples(shard.length, spec, policy),
    )


def plan_shard(
    shard: ShardIndex, spec: PackSpec, policy: Policy, key: int = 0, epoch: int = 0
) -> PackPlan:
    """Packs the documents of a shard. Only the plans of `pairs` depend on the epoch."""
    return _packing_of(spec, policy).plan(shard, key, epoch)


def check_shard(shard: ShardIndex, spec: PackSpec, policy: Policy, files: Sequence[str]) -> None:
    """Checks that the pairs or rows of a shard can be packed.

    Args:
        files: names of the source files that `shard.origin` refers to.

    Raises:
        DataError: a text does not fit into an example, or a row has the wrong number of texts.
        ConfigError: examples are too short to hold text.
    """
    _packing_of(spec, policy).check(shard, files)


def count_shard(
    shard: ShardIndex, spec: PackSpec, policy: Policy, key: int, files: Sequence[str]
) -> int:
    """Checks a shard and returns the number of examples of `plan_shard`.

    Arguments and errors as for `check_shard`.
    """
    # Counting a row that cannot be packed would fail later, without its file and line.
    packing = _packing_of(spec, policy)
    packing.check(shard, files)
    return packing.count(shard, key)
