"""A run on local shards imports no code of features that it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Each with what a run would have to use.
UNUSED = {
    "data_pipeline.format.row_lines": "rows of a task",
    "data_pipeline.format.writing": "a build",
    "data_pipeline.order.mixture": "several datasets",
    "data_pipeline.packing.full_sentences": "data.packing=full_sentences",
    "data_pipeline.packing.segment_pairs": "data.packing=pairs",
    "data_pipeline.packing.task_rows": "rows of a task",
    "data_pipeline.packing.text_pairs": "pairs of texts",
    "data_pipeline.reading.cache": "remote shards",
    "data_pipeline.reading.corruption": "a corrupt shard",
    "data_pipeline.reading.length_groups": "data.group_by_length",
    "data_pipeline.reading.prefetch": "remote shards",
    "data_pipeline.reading.remote": "remote shards",
    "data_pipeline.reading.several_datasets": "several datasets",
    "data_pipeline.tokenizers.alignment": "text",
    "data_pipeline.tokenizers.foreign_settings": "another program's tokenizer",
    "data_pipeline.tokenizers.huggingface_models": "another program's tokenizer",
    "data_pipeline.tokenizers.sentencepiece": "a SentencePiece tokenizer",
    "data_pipeline.tokenizers.words": "text",
    "samestep.addresses.parts": "an address",
    "samestep.config.own_modules": "a user's own module",
    "samestep.config.recipes": "the name of a recipe",
    "samestep.config.renamed": "a run's stored settings",
    "samestep.config.synonyms": "an unknown key",
    "samestep.storage.attempts": "an object store",
    "samestep.storage.channel": "an elastic run",
    "samestep.storage.hub": "the Hugging Face Hub",
    "samestep.storage.keeper": "snapshots",
    "samestep.storage.new_folder": "an export",
    "samestep.storage.objects": "an object store",
    "trainer.accelerators.kinds.cuda": "a GPU",
    "trainer.accelerators.kinds.tpu": "a TPU",
    "trainer.accelerators.kinds.xla": "XLA",
    "trainer.accelerators.traces": "a profile",
    "trainer.checkpoint.huggingface": "init_from",
    "trainer.elastic.agent": "several processes",
    "trainer.models.cache": "generation",
    "trainer.models.codecs.bert": "a Hugging Face folder",
    "trainer.models.extras.crf": "model.crf",
    "trainer.models.extras.next_sentence": "model.nsp",
    "trainer.models.peft.kinds.lora": "model.peft",
    "trainer.models.recurrent.lstm_layers": "an LSTM",
    "trainer.monitoring.tensorboard": "tracking.tensorboard",
    "trainer.monitoring.wandb": "tracking.wandb",
    "trainer.objectives.whole_words": "objective.whole_words",
    "trainer.optim.plain_adamw": "an exact run",
    "trainer.partition.digest": "training.digest_every",
    "trainer.partition.exact": "training.exact=bitwise",
    "trainer.strategies.exact": "training.exact=bitwise",
    "trainer.strategies.kinds.ddp": "strategy=ddp",
    "trainer.strategies.loss_scale": "training.precision=fp16",
    "trainer.strategies.neighbor": "several processes",
    "trainer.training.compute.compiled": "training.compile",
    "trainer.training.compute.fused_attention": "a GPU",
    "trainer.training.compute.micro_batch": "a device with memory of its own",
    "trainer.training.evaluation": "training.evaluate_every",
    "trainer.training.finished": "a checkpoint",
    "trainer.training.observers.best": "training.best",
    "trainer.training.observers.digests": "training.digest_every",
    "trainer.training.observers.probes": "probes",
    "trainer.training.rewind": "training.faults.action=rewind",
    "trainer.training.shared_facts": "several processes",
    "trainer.training.weights.loading": "init_from",
    "trainer.training.weights.teacher": "distillation",
    "trainer.vectors.folder": "init_embeddings",
}
MOST_MODULES = 139
"""Of this project, that a run has imported; each feature used to add to them."""

CODE = """
import sys
from samestep.cli import main
assert main(sys.argv[1:]) == 0
print("IMPORTED", *sys.modules)
"""


def test_a_plain_run_imports_what_it_uses(experiment_file: str, tmp_path: Path):
    steps = ("training.steps=2", "schedule.warmup_steps=1", f"output={tmp_path / 'run'}")
    command = [sys.executable, "-c", CODE, "train", experiment_file, *steps]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(result.stdout.rpartition("IMPORTED")[2].split())
    assert "data_pipeline.reading.loader" in imported
    packages = {"samestep", "trainer", "data_pipeline", "launch"}
    ours = {name for name in imported if name.partition(".")[0] in packages}
    assert len(ours) <= MOST_MODULES
    assert {name: use for name, use in UNUSED.items() if name in imported} == {}


def test_the_names_are_of_modules():
    root = Path(__file__).parents[3]
    for name in UNUSED:
        assert (root / f"{name.replace('.', '/')}.py").is_file(), name
