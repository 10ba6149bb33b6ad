"""Batch scripts of Slurm."""

from __future__ import annotations

from pathlib import Path

from launch.job import JobSpec
from launch.kinds.slurm import RENDEZVOUS, Config, codes_of_stops, progress_of_stops
from launch.scripts import Run, header

_GPUS = 8
_COMPILED = ("training.compile=true",)
_RUNS = {
    "bert_large_lamb": Run(
        "BERT-large with LAMB on 64 nodes: batches of 65,536 sequences of 128, then of 32,768 of "
        "512 (You et al. 2020).",
        *("configs/pretrain/bert_large_lamb.yaml", "h100", 64 * _GPUS, _COMPILED),
    ),
    "roberta_large": Run(
        "RoBERTa-large on 32 nodes: 500,000 batches of 8,192 sequences of 512 (Liu et al. 2019).",
        *("configs/pretrain/roberta_large.yaml", "h100", 32 * _GPUS, _COMPILED),
    ),
    "t5_11b": Run(
        "T5-11B on 64 nodes under HSDP: eight replicas of eight nodes, a million batches of 2,048 "
        "texts of 512 tokens (Raffel et al. 2020).",
        *("configs/strategies/t5_11b_hsdp.yaml", "h100", 64 * _GPUS, _COMPILED),
    ),
    "modernbert_base": Run(
        "ModernBERT-base on 8 nodes: 1.7 trillion tokens at length 1,024 (Warner et al. 2024).",
        *("configs/pretrain/modernbert_base.yaml", "h100", 8 * _GPUS, _COMPILED),
    ),
    "deepspeed_zero3": Run(
        "T5-3B on 8 nodes under DeepSpeed's ZeRO-3. Other stages: EXPERIMENT=configs/strategies/"
        "bert_large_zero1.yaml, roberta_large_zero2.yaml, or t5_11b_zero3_offload.yaml for few "
        "GPUs.",
        *("configs/strategies/t5_3b_zero3.yaml", "h100", 8 * _GPUS),
    ),
    "accelerate": Run(
        "RoBERTa-large on 32 nodes under Hugging Face Accelerate (docs/accelerate.md).",
        *("configs/strategies/roberta_large_accelerate.yaml", "h100", 32 * _GPUS),
    ),
}


def runs() -> dict[str, Run]:
    """What each script runs, by the script's name."""
    return {f"slurm/{name}.sh": run for name, run in _RUNS.items()}


def scripts() -> dict[str, str]:
    """The text of each script, by name."""
    return {name: _script(name, run) for name, run in runs().items()}


def _script(path: str, run: Run) -> str:
    name = Path(path).stem
    # Only its name and deadline count: a script has no folder of a launch.
    job = JobSpec(name, "train", "", Path(), Path())
    cluster = Config(
        nodes=run.devices // _GPUS,
        gpus_per_node=_GPUS,
        time="1d",
        exclusive=True,
        partition="gpu",
        account="my-account",
    )
    command = (
        'samestep train "$EXPERIMENT" "output=$OUTPUT" ${DATA:+"data.path=$DATA"} '
        f"{''.join(f'{each} ' for each in run.overrides)}\\\n"
        '  "${overrides[@]}" '
        '--elastic "$SLURM_JOB_NUM_NODES" --rendezvous "$rendezvous"'
    )
    note, is_stuck = progress_of_stops('"$OUTPUT/starts.jsonl"', '"$stops"')
    stopped = "|".join(map(str, codes_of_stops(job)))
    lines = [
        "#!/bin/bash",
        *header(
            run,
            f"sbatch launch/scripts/{path}",
            "Change first: account and partition. The dataset must exist (docs/recipes.md), or "
            "DATA names another. Options of sbatch override the lines below, as --account=lab "
            "--nodes=3, and variables of the environment the settings after them.",
            "The run saves a checkpoint before the time limit, and the job is requeued until the "
            "run is done. Submitted again, it goes on from its newest checkpoint, on any number "
            f"of nodes. Watch: tail -f {name}-JOB.log. Stop: scancel JOB, which leaves it Slurm's "
            "KillWait (30 s) for a checkpoint.",
        ),
        *(f"#SBATCH {option}" for option in cluster.batch_options(job)),
        "#SBATCH --output=%x-%j.log",
        "",
        "# Relative paths start in the folder that sbatch is called in.",
        f': "${{EXPERIMENT:={run.experiment}}}"',
        f': "${{OUTPUT:=runs/{name}}}"',
        ': "${DATA:=}"  # a dataset in place of the experiment\'s',
        ': "${VENV:=.venv}"  # the environment with samestep',
        "# Further settings, as training.steps=100 training.micro_batch_size=32",
        'read -r -a overrides <<<"${OVERRIDES:-}"',
        "",
        "# What your site needs: module load cuda; export NCCL_SOCKET_IFNAME=ib0",
        'source "$VENV/bin/activate" || exit 1',
        'export SAMESTEP_JOB="$SLURM_JOB_ID" SAMESTEP_NODES="$SLURM_JOB_NODELIST"',
        "# The nodes find each other at the first one, at a port that no other job has.",
        *RENDEZVOUS,
        "",
        *cluster.srun(job, command, gpus=True),
        "code=$?",
        "",
        "# A run that was stopped, or has lost a node, goes on, but not five times from one step.",
        f"case $code in {stopped})",
        "  stops=$SLURM_JOB_NAME-$SLURM_JOB_ID.stops",
        f"  {note}",
        f'  {is_stuck} || scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
