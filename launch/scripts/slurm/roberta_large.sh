#!/bin/bash
# RoBERTa-large on 32 nodes: 500,000 batches of 8,192 sequences of 512 (Liu et al. 2019).
# Cost, a forecast of `samestep plan --throughput h100`, compiled: 15 hours on 256 H100 SXM, 3,700
# device hours, without the time for data and checkpoints.
#
#   sbatch launch/scripts/slurm/roberta_large.sh
#
# Change first: account and partition. The dataset must exist (docs/recipes.md), or DATA names
# another. Options of sbatch override the lines below, as --account=lab --nodes=3, and variables of
# the environment the settings after them.
# The run saves a checkpoint before the time limit, and the job is requeued until the run is done.
# Submitted again, it goes on from its newest checkpoint, on any number of nodes. Watch: tail -f
# roberta_large-JOB.log. Stop: scancel JOB, which leaves it Slurm's KillWait (30 s) for a
# checkpoint.
#SBATCH --job-name=roberta_large
#SBATCH --open-mode=append
#SBATCH --nodes=32
#SBATCH --gres=gpu:8
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --account=my-account
#SBATCH --time=1-00:00:00
#SBATCH --exclusive
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --output=%x-%j.log

# Relative paths start in the folder that sbatch is called in.
: "${EXPERIMENT:=configs/pretrain/roberta_large.yaml}"
: "${OUTPUT:=runs/roberta_large}"
: "${DATA:=}"  # a dataset in place of the experiment's
: "${VENV:=.venv}"  # the environment with samestep
# Further settings, as training.steps=100 training.micro_batch_size=32
read -r -a overrides <<<"${OVERRIDES:-}"

# What your site needs: module load cuda; export NCCL_SOCKET_IFNAME=ib0
source "$VENV/bin/activate" || exit 1
export SAMESTEP_JOB="$SLURM_JOB_ID" SAMESTEP_NODES="$SLURM_JOB_NODELIST"
# The nodes find each other at the first one, at a port that no other job has.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
rendezvous="$first:$((20000 + SLURM_JOB_ID % 10000))"

srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \
  samestep train "$EXPERIMENT" "output=$OUTPUT" ${DATA:+"data.path=$DATA"} training.compile=true \
  "${overrides[@]}" --elastic "$SLURM_JOB_NUM_NODES" --rendezvous "$rendezvous"
code=$?

# A run that was stopped, or has lost a node, goes on, but not five times from one step.
case $code in 69|75|129|137|138|143)
  stops=$SLURM_JOB_NAME-$SLURM_JOB_ID.stops
  { tail -n 1 -- "$OUTPUT/starts.jsonl" | grep -o '"step": *[0-9]*' || echo none; } >> "$stops"
  tail -n 5 -- "$stops" | uniq -c | grep -q '^ *5 ' || scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
