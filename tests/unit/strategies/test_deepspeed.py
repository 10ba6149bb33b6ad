"""Settings of ZeRO, and what a DeepSpeed JSON may say beside an experiment.

No DeepSpeed is needed for that.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import ConfigError, MissingExtra
from trainer.accelerators.kinds import cpu
from trainer.strategies.kinds.deepspeed import Config, settings
from trainer.strategies.world import World

HUGGING_FACE: dict[str, Any] = {  # of the documentation of Hugging Face's Trainer
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def experiment(strategy: Config, **training: Any) -> dict[str, Any]:
    return {
        "training": {
            "global_batch_size": 256,
            "micro_batch_size": 4,
            "max_grad_norm": 1.0,
            "precision": "fp32",
            "compile": False,
            "fp8": False,
            **training,
        },
        "phases": [],
        "strategy": vars(strategy),
        "optimizer": {"kind": "adamw", "lr": 1e-4, "betas": [0.9, 0.98], "weight_decay": 0.01},
    }


def check(
    path: Path, content: dict[str, Any], strategy: Config | None = None, **training: Any
) -> dict[str, Any]:
    path.write_text(json.dumps(content))
    strategy = Config(stage=3, config=str(path)) if strategy is None else strategy
    settings.check(str(path), settings.read(str(path)), experiment(strategy, **training))
    return settings.zero_section(settings.read(str(path)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def test_what_is_left_to_the_experiment_is_absent(path: Path) -> None:
    assert check(path, HUGGING_FACE) == {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
    }


def test_what_the_experiment_says_as_well_is_fine(path: Path) -> None:
    same = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale_window": 1000},
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-4, "betas": [0.9, 0.98], "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "curriculum_learning": {"enabled": False, "min_difficulty": 8},
    }
    strategy = Config(stage=2, offload_optimizer=True, config=str(path))
    assert check(path, same, strategy, precision="bf16") == {
        "offload_optimizer": {"pin_memory": True}
    }


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (
            {"train_batch_size": 32},
            "train_batch_size is 32 and by training.global_batch_size it is 256",
        ),
        ({"train_micro_batch_size_per_gpu": 1}, "by training.micro_batch_size it is 4"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps .it follows from"),
        (
            {"gradient_clipping": 0.5},
            "gradient_clipping is 0.5 and by training.max_grad_norm it is 1.0",
        ),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true and by training.precision it is false"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.enabled .*fp16.loss_scale"),
        (
            {"zero_optimization": {"stage": 1}},
            "zero_optimization.stage is 1 and by strategy.stage it is 3",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            'by strategy.offload_parameters it is "none"',
        ),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_quantized_gradients .* change the step",
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            'optimizer.type is "onebitadam" and by optimizer.kind it is "adamw"',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
            "optimizer.params.lr is 1.0 and by optimizer.lr",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
            "warmup_num_steps .set schedule",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": None}}, "scheduler.type .set schedule"),
        ({"scheduler": {"type": "WarmupLR", "params": []}}, "scheduler.params .set schedule"),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params .not supported"),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "set training.activation_checkpointing=true",
        ),
        (
            {"progressive_layer_drop": {"enabled": True, "theta": 0.5}},
            "progressive_layer_drop.theta",
        ),
        ({"communication_data_type": "fp16"}, "communication_data_type"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16.enabled is true"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "adam_w_mode is false .* it is true",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type .set schedule"),
        ({"zero_optimization": {"zero_hpz_partition_size": 0}}, "zero_hpz_partition_size"),
    ],
)
def test_what_contradicts_is_refused_by_name(
    path: Path, content: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check(path, content)


def test_precision_is_that_of_the_experiment_where_it_is_switched_off(path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"bf16.enabled is false and by training.precision it is true"
    ):
        check(path, {"bf16": {"enabled": False}}, precision="bf16")


def test_sizes_are_those_of_the_phases(path: Path) -> None:
    path.write_text(json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}))
    run = experiment(Config(stage=3)) | {
        "phases": [{"global_batch_size": 64, "micro_batch_size": None}, {}]
    }
    with pytest.raises(ConfigError, match=r"micro_batch_size_per_gpu is 8 and by .* it is 4\."):
        settings.check(str(path), settings.read(str(path)), run)


@pytest.mark.parametrize(
    "content",
    [
        {
            "gradient_accumulation_steps": 1,
            "gradient_predivide_factor": 1.0,
            "communication_data_type": None,
        },
        {"communication_data_type": "fp32", "optimizer": {"type": "auto"}},
        {"optimizer": {"type": "AdamW", "params": None}},
        {"prescale_gradients": False, "zero_optimization": {"zero_quantized_weights": False}},
        {
            "activation_checkpointing": {"enabled": False},
            "flops_profiler": {"enabled": False, "profile_step": 1},
        },
    ],
)
def test_values_at_which_a_setting_does_nothing(path: Path, content: dict[str, Any]) -> None:
    assert check(path, content) == {}


def test_all_of_it_is_named_at_once(path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"train_batch_size.*; gradient_clipping.*; data_efficiency.*Remove these keys",
    ):
        check(
            path,
            {"train_batch_size": 1, "gradient_clipping": 9, "data_efficiency": {"enabled": True}},
        )


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_no_json_of_deepspeed(path: Path, content: str | None) -> None:
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"ds.json .* JSON file of DeepSpeed"):
        settings.read(str(path))


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="Set stage=3"):
        Config(stage=2, offload_parameters=True)
    with pytest.raises(ConfigError, match=r"training.compile does not go with strategy.stage 3"):
        Config(stage=3).check(experiment(Config(stage=3), compile=True))
    Config(stage=2).check(experiment(Config(stage=2), compile=True))
    with pytest.raises(ConfigError, match=r"training.fp8 does not go with strategy deepspeed"):
        Config(stage=2).check(experiment(Config(stage=2), fp8=True))


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 1, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(metadata, "version", lambda name: "0.20.1")
    with pytest.raises(
        ConfigError,
        match=r"DeepSpeed 0.19, and 0.20.1 is installed. Run pip install 'deepspeed==0.19.\*'",
    ):
        Config().build(cpu.Config().build(), world, "fp32")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingExtra, match=r"pip install .deepspeed<"):
        Config().build(cpu.Config().build(), world, "fp32")
