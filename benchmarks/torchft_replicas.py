"""Replicas that train under torchft, for `benchmarks.recovery`.

    python -m benchmarks.torchft_replicas MODEL FOLDER REPLICAS

Starts them and a lighthouse (torchft's rendezvous), and starts a replica again when it dies. Each
trains Hugging Face's BERT of this size on 32 random tokens a step, with AdamW.
Replica 0 writes the time of each step to FOLDER/metrics.jsonl.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.dataset import VOCAB_SIZE
from benchmarks.step import SHAPES

_TOKENS = 32


def train(index: int, model_name: str, folder: str, lighthouse: str) -> None:
    """Trains without end as one of the replicas."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from transformers import BertConfig, BertForMaskedLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, width = SHAPES[model_name]
    shape = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    model = BertForMaskedLM(shape)
    adamw = torch.optim.AdamW(model.parameters(), 1e-4)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load(state: Mapping[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load,
        state,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{index}_",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, adamw)
    parameters = list(model.parameters())
    tokens = torch.randint(VOCAB_SIZE, (1, _TOKENS))
    with (Path(folder) / "metrics.jsonl").open("a") as metrics:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            # Not by its DDP: with torch 2.13, survivors fail in an assertion of its hook.
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            whole = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(whole).wait()
            parts = torch.split(whole, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
            optimizer.step()
            if index == 0 and manager.current_step() > step:
                row = {"step": manager.current_step(), "time": time.time()}
                metrics.write(json.dumps(row) + "\n")
                metrics.flush()


def main(arguments: list[str]) -> None:
    from torchft.coordination import LighthouseServer

    model, folder, replicas = arguments[0], arguments[1], int(arguments[2])
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    context = multiprocessing.get_context("spawn")

    def start(index: int) -> Any:
        process = context.Process(
            target=train, args=(index, model, folder, lighthouse.address()), daemon=True
        )
        process.start()
        return process

    running = [start(index) for index in range(replicas)]
    while True:
        for index, process in enumerate(running):
            if not process.is_alive():
                running[index] = start(index)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
