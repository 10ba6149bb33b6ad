"""One training step of sentence-transformers or PyLate on one rank; see `world_sizes`.

    torchrun --nproc-per-node 2 examples/retrieval/their_step.py JOB

JOB is a JSON file; its environment needs the library of `job["library"]`, and not samestep.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import set_seed


def build(job: dict[str, Any], case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The model, the loss and the collator of a case."""
    dropout = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    config = dict.fromkeys(dropout, case["dropout"])
    cached = {"mini_batch_size": case["micro_batch"]} if "Cached" in case["loss"] else {}
    if job["library"] == "pylate":
        from pylate import losses, models, utils

        set_seed(0)  # for the projection to 128 numbers, which the weights do not have
        model = models.ColBERT(job["model"], device="cpu", config_kwargs=config)
        collator = utils.ColBERTCollator(model.tokenize)
    else:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses

        model = SentenceTransformer(job["model"], device="cpu", config_kwargs=config)
        collator, cached = None, {"scale": 1 / job["temperature"], **cached}
    loss = getattr(losses, case["loss"])
    return model, loss(model, gather_across_devices=case["gathered"], **cached), collator


def step(job: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    """Takes a step of the library's own trainer; returns the loss and norm that it logs."""
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    model, loss, collator = build(job, case)
    rows = len(job["pairs"]) // int(os.environ["WORLD_SIZE"])
    passes = 1 if "Cached" in case["loss"] else rows // case["micro_batch"]
    arguments = SentenceTransformerTrainingArguments(
        output_dir=job["folder"],
        seed=job["seed"],
        max_steps=1,
        per_device_train_batch_size=rows // passes,
        gradient_accumulation_steps=passes,
        max_grad_norm=1e9,  # no clipping, but 0 would not log the norm
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    queries, passages = zip(*job["pairs"], strict=True)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"query": queries, "positive": passages}),
        loss=loss,
        data_collator=collator,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    return {"loss": logged["loss"], "norm": logged["grad_norm"]}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = []
    for case in job["cases"]:
        found.append(step(job, case))
        gc.collect()  # a trainer and its model hold each other
    if os.environ["RANK"] == "0":
        Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
