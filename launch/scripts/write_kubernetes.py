"""Manifests of Kubernetes, on GPUs and on TPUs of Google Kubernetes Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from launch import records
from launch.job import Cluster, JobSpec
from launch.k8s import manifest
from launch.scripts import Run, header, write_slurm
from samestep.config import decode, read_tree

SLICES: dict[str, tuple[Run, tuple[str, str], str]] = {
    "bert_base_v5e16": (
        Run(
            "BERT-base on a slice of 16 v5e chips: batches of 131,072 tokens (Devlin et al. 2019).",
            *("configs/pretrain/tpu/bert_base.yaml", "v5e", 16),
        ),
        ("accelerator: tpu-v5-lite-podslice", "topology: 4x4"),
        "wikipedia_en",
    ),
    "roberta_base_v5e64": (
        Run(
            "RoBERTa-base on a slice of 64 v5e chips: 500,000 batches of 8,192 sequences of 512 "
            "(Liu et al. 2019).",
            *("configs/pretrain/tpu/roberta_base.yaml", "v5e", 64),
        ),
        ("accelerator: tpu-v5-lite-podslice", "topology: 8x8"),
        "corpus_bpe",
    ),
    "t5_base_v6e32": (
        Run(
            "T5-base on a slice of 32 v6e chips: a million batches of 2,048 texts of 512 tokens "
            "(Raffel et al. 2020).",
            *("configs/pretrain/tpu/t5_base.yaml", "v6e", 32),
        ),
        ("accelerator: tpu-v6e-slice", "topology: 4x8"),
        "c4_en_t5",
    ),
}
"""What a slice runs, how GKE calls it, and the dataset in the bucket, by name."""


def runs() -> dict[str, Run]:
    """What each manifest runs, by the manifest's name."""
    gpus = {Path(name).stem: run for name, run in write_slurm.runs().items()}
    tpus = {name: run for name, (run, *_) in SLICES.items()}
    return {f"kubernetes/{name}.yaml": run for name, run in (gpus | tpus).items()}


def scripts() -> dict[str, str]:
    """The text of each manifest, by name."""
    return {name: _manifest(name, run) for name, run in runs().items()}


def _manifest(path: str, run: Run) -> str:
    name = Path(path).stem
    overrides = [f"nodes={run.devices // 8}"]
    # The cluster's files are the ones that users copy, so both say the same.
    file = "configs/launch/kubernetes_gpu.yaml"
    places = ""
    if name in SLICES:
        _, tpu, dataset = SLICES[name]
        file = "configs/launch/kubernetes_tpu.yaml"
        overrides = [f"tpu={{{', '.join([*tpu, 'chips_per_node: 4'])}}}"]
        places = (
            f"data: {{path: gs://my-bucket/{dataset}}}  # in place of the recipe's\n"
            f"checkpoint: {{folder: gs://my-bucket/{name}}}\n"
        )
    cluster = decode(Annotated[Cluster, records.KINDS], read_tree(file, overrides), "cluster")
    config = (
        "# What to run: a recipe, and the settings that differ from it. Paths are the pods'.\n"
        f"base: {run.experiment}\n"
        f"output: runs/{name}\n"
        f"{places}"
    )
    # A file has no command line: overrides become sections of it.
    for override in run.overrides:
        setting, _, value = override.partition("=")
        section, _, key = setting.partition(".")
        config += f"{section}: {{{key}: {value}}}\n"
    job = JobSpec(name.replace("_", "-"), "train", config, Path(), Path())
    (text,) = cluster.render(job).files.values()
    # Launches are numbered; a file has one name until its reader gives it another.
    text = text.replace(manifest.name_of(job), job.name)
    head = header(
        run,
        f"kubectl create -f launch/scripts/{path}",
        "Change first: config.yaml below, the image and the namespace, and what must exist in it: "
        "the claim samestep-work (ReadWriteMany), the secret wandb with the key api-key"
        + (", and the service account samestep with access to the bucket" if places else "")
        + " (docs/kubernetes.md). The pods of the JobSet restart, and continue the run from its "
        f"newest checkpoint. To end it: kubectl delete -f launch/scripts/{path}",
    )
    return "\n".join([*head, text])
