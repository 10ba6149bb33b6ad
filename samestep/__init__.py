"""samestep as a library: names that stay. All other modules are private by convention.

    import samestep

    experiment = samestep.load_experiment("configs/debug/demo.yaml", ["training.steps=100"])
    samestep.train(experiment)

A name is imported when it is first used, so `import samestep` does not wait for torch.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

__all__ = [
    "AnswerPrediction",
    "Batch",
    "Batches",
    "CheckpointError",
    "ClassPrediction",
    "ConfigError",
    "DataError",
    "Examples",
    "Experiment",
    "Family",
    "Inputs",
    "JsonlTracker",
    "Loss",
    "Model",
    "ModelConfig",
    "NumberPrediction",
    "Objective",
    "ObjectiveConfig",
    "PackSpec",
    "Parts",
    "Rows",
    "SamestepError",
    "TagsPrediction",
    "TokenObjective",
    "TrainedModel",
    "Transformer",
    "Vocabulary",
    "__version__",
    "accumulate_gradients",
    "build_dataset",
    "evaluate",
    "export",
    "load_experiment",
    "load_model",
    "means",
    "open_batches",
    "open_dataset",
    "open_parts",
    "read_metrics",
    "score",
    "train",
    "train_tokenizer",
]

_MODULES = {
    "data_pipeline.library": ("build_dataset", "open_dataset", "train_tokenizer"),
    "samestep.errors": ("CheckpointError", "ConfigError", "DataError", "SamestepError"),
    "samestep.examples": ("Batch", "Examples", "PackSpec", "Vocabulary"),
    "trainer.inference.evaluate": ("evaluate",),
    "trainer.inference.predict": (
        "AnswerPrediction",
        "ClassPrediction",
        "NumberPrediction",
        "TagsPrediction",
    ),
    "trainer.inference.trained_model": ("TrainedModel", "load_model"),
    "trainer.models": ("Model", "ModelConfig"),
    "trainer.models.inputs": ("Inputs",),
    "trainer.models.families": ("Family",),
    "trainer.models.transformer": ("Transformer",),
    "trainer.monitoring.jsonl": ("JsonlTracker", "read_metrics"),
    "trainer.objectives": ("Loss", "Objective", "ObjectiveConfig"),
    "trainer.objectives.rows": ("Rows", "TokenObjective"),
    "trainer.publish.export": ("export",),
    "trainer.training.experiment": ("Experiment",),
    "trainer.training.own_loop": ("Batches", "Parts", "open_batches", "open_parts"),
    "trainer.training.evaluation": ("score",),
    "trainer.training.passes": ("accumulate_gradients", "means"),
    "trainer.training.run": ("train",),
    "trainer.training.starting": ("load_experiment",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
