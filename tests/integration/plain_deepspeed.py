"""What a user of DeepSpeed has: a script around a model of transformers, with no code of ours.

    plain_deepspeed.py FOLDER

It trains a tiny BERT under each ZeRO stage on two processes, saves it with `engine.save_checkpoint`
in the middle, and writes the losses that follow. Once a line comes on its standard input, three
processes go on from FOLDER/back, a universal checkpoint, and write their losses.

DeepSpeed and transformers take 15 seconds to import, so that is done once, and processes are
forked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # deepspeed.initialize would, in each process
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from transformers import BertConfig, BertForMaskedLM

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a compiler half a minute

STAGES = (1, 2, 3)
SAVED, STEPS = 3, 6
SIZES = {"vocab_size": 600, "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 62, "max_position_embeddings": 31}


def model() -> BertForMaskedLM:
    torch.manual_seed(1)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **none))


def batch(step: int) -> torch.Tensor:
    """Twelve rows of tokens, all of which are predicted."""
    return torch.randint(600, (12, 16), generator=torch.Generator().manual_seed(step))


def engine(stage: int, universal: bool = False, bf16: bool = False) -> deepspeed.DeepSpeedEngine:
    bert = model()
    decaying = [each for each in bert.parameters() if each.ndim > 1]
    others = [each for each in bert.parameters() if each.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 12 // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    return deepspeed.initialize(model=bert, optimizer=optimizer, config=config)[0]


def train(bert: deepspeed.DeepSpeedEngine, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        rows = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = bert(input_ids=rows, labels=rows).loss
        bert.backward(loss)
        bert.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def write(folder: Path) -> None:
    """Trains, saves, and trains on."""
    for stage in STAGES:
        bert = engine(stage)
        train(bert, 0, SAVED)
        bert.save_checkpoint(str(folder / str(stage)))
        losses = train(bert, SAVED, STEPS)
        if dist.get_rank() == 0:
            (folder / f"{stage}.json").write_text(json.dumps(losses))
        bert = engine(stage, bf16=True)
        train(bert, 0, SAVED)
        bert.save_checkpoint(str(folder / f"bf16-{stage}"))


def make_universal(folder: Path) -> None:
    """As `python -m deepspeed.checkpoint.ds_to_universal` does."""
    for stage in (1, 3):
        settings = {
            "num_extract_workers": 1,
            "num_merge_workers": 1,
            "keep_temp_folder": False,
            "strict": True,
        }
        source, target = (
            folder / str(stage) / f"global_step{SAVED}",
            folder / f"universal-{stage}" / "step",
        )
        settings |= {
            "input_folder": str(source),
            "output_folder": str(target),
            "inject_missing_state": True,
        }
        ds_to_universal.main(argparse.Namespace(**settings))


def go_on(folder: Path) -> None:
    """Goes on from universal checkpoints."""
    for stage in STAGES:
        bert = engine(stage, universal=True)
        bert.load_checkpoint(str(folder / "back"))
        for (
            state
        ) in bert.optimizer.optimizer.state.values():  # stage 3 gives all groups the same count
            state["step"] = state["step"].clone()
        losses = train(bert, bert.global_steps, STEPS)
        if dist.get_rank() == 0:
            (folder / f"back-{stage}.json").write_text(json.dumps(losses))


def in_processes(count: int, function: Callable[[Path], None], folder: Path) -> None:
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
            meeting = folder / f"meeting-{function.__name__}"
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
            )
            deepspeed.init_distributed("gloo")
            function(folder)
            os._exit(0)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{function.__name__} failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    in_processes(2, write, Path(sys.argv[1]))
    make_universal(Path(sys.argv[1]))
    sys.stdout.write("written\n")
    sys.stdout.flush()
    sys.stdin.readline()
    in_processes(3, go_on, Path(sys.argv[1]))
