"""A run inside Hugging Face Accelerate.

The same step, and no settings that it drops or changes in silence.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment

from samestep.config import load, to_tree
from samestep.errors import ConfigError
from tests.conformance.worker import losses
from tests.integration.commands import SAMESTEP, Samestep
from tests.processes import run_ranks
from trainer.accelerators.kinds import cpu
from trainer.strategies import Strategy
from trainer.strategies.kinds import accelerate, deepspeed, fsdp
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

OPTIMIZERS = ["optimizer={kind: adamw, lr: 1e-3}", "optimizer={kind: lamb, lr: 1e-2}"]
FSDP1 = {
    "fsdp_version": 1,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_sync_module_states": False,
}
FSDP2 = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "BertLayer"}


def config_file(folder: Path, kind: str, **settings: Any) -> str:
    """A file as `accelerate config` writes it."""
    path = folder / "accelerate.yaml"
    common = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
    }
    path.write_text(
        yaml.safe_dump({**common, "distributed_type": kind, "mixed_precision": "no", **settings})
    )
    return str(path)


def fake_gpu(kind: str, accelerator: object, world: object, replicas: int | None = None) -> Any:
    """What Accelerate sets up for FSDP and DeepSpeed on a GPU, as far as it is used."""
    state = SimpleNamespace(
        fsdp_plugin=FullyShardedDataParallelPlugin() if kind == "FSDP" else None
    )
    parallelism = None if replicas is None else SimpleNamespace(dp_replicate_size=replicas)
    return SimpleNamespace(state=state, parallelism_config=parallelism)


def losses_of(file: str, runs: list[list[str]], gpu: bool = False) -> list[list[float]]:
    """The losses of several runs, one after the other in the same processes."""
    if gpu:
        accelerate._make = fake_gpu  # type: ignore[assignment]
    world = World.start(60)
    world.connect("gloo")
    found = [losses(file, overrides, world) for overrides in runs]
    world.close()
    return found


@pytest.mark.long
def test_losses_are_those_of_one_process(experiment_file: str, tmp_path: Path) -> None:
    """With uneven shares of a batch, several micro-batches in one, and clipping."""

    def runs(strategy: str) -> list[list[str]]:
        common = [
            f"strategy={strategy}",
            "training.steps=30",
            "training.max_grad_norm=0.5",
            "data.threads=0",
        ]
        return [[*common, optimizer, f"output={tmp_path}/run"] for optimizer in OPTIMIZERS]

    (expected,) = run_ranks(1, losses_of, experiment_file, runs("single"))
    file = config_file(tmp_path, "MULTI_CPU", use_cpu=True)
    for size, strategy in ((2, "accelerate"), (3, f"{{kind: accelerate, config: {file}}}")):
        for found in run_ranks(size, losses_of, experiment_file, runs(strategy)):
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=f"{size} ranks")
    file = config_file(tmp_path, "FSDP", fsdp_config=FSDP2)
    strategy = f"{{kind: accelerate, config: {file}}}"
    for found in run_ranks(2, losses_of, experiment_file, runs(strategy)[1:], True):
        np.testing.assert_allclose(found, expected[1:], rtol=1e-5, err_msg="FSDP")


@pytest.mark.long
def test_accelerate_launch(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """As a user types it; and the run goes on without Accelerate."""
    file = config_file(tmp_path, "MULTI_GPU", mixed_precision="bf16")
    launch = [
        str(Path(SAMESTEP[0]).with_name("accelerate")),
        "launch",
        "--config_file",
        file,
        "--main_process_port",
        "0",
    ]
    run = ["train", experiment_file, f"output={tmp_path}/run", "training.precision=bf16"]
    command = [*launch, "--no_python", *SAMESTEP, *run, "strategy=accelerate", "training.steps=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 x CPU" in done.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert "continuing   at step 4" in samestep(*run, "strategy=single", "training.steps=5").err


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Accelerate and the environment as they are in a new process."""
    for name in [
        name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))
    ]:
        monkeypatch.delenv(name)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield monkeypatch
    AcceleratorState._reset_state(reset_partial_state=True)


def build(config: str | None) -> Strategy:
    return accelerate.Config(config).build(
        cpu.Config().build(), World(0, 1, None, timedelta(seconds=10)), "fp32"
    )


def check(config: str, experiment_file: str, *overrides: str) -> None:
    accelerate.Config(config).check(to_tree(load(Experiment, experiment_file, overrides)))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("FSDP", {"fsdp_config": FSDP2}),
        ("FSDP", {"fsdp_config": {**FSDP1, "fsdp_sync_module_states": True}}),
        ("DEEPSPEED", {"deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 1}}),
    ],
)
def test_sharding_is_refused_where_accelerate_would_not_shard(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=f"^{kind} was asked for, and Accelerate.*set strategy={kind.lower()}"
    ):
        build(config_file(tmp_path, kind, **settings))


@pytest.mark.usefixtures("untouched")
def test_all_clashes_are_named_at_once(experiment_file: str, tmp_path: Path) -> None:
    recompute = {
        "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_offload": True,
    }
    settings = {**FSDP2, "fsdp_offload_params": True, **recompute}
    dynamo = {"dynamo_backend": "INDUCTOR"}
    file = config_file(
        tmp_path, "FSDP", mixed_precision="bf16", fsdp_config=settings, dynamo_config=dynamo
    )
    with pytest.raises(ConfigError) as raised:
        check(file, experiment_file)
    for clash in (
        "ACCELERATE_DYNAMO_BACKEND=INDUCTOR",
        "FSDP_OFFLOAD_PARAMS=true",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true",
        "fsdp_activation_checkpointing is on",
        "mixed_precision is bf16 and training.precision fp32",
    ):
        assert clash in str(raised.value)


def test_settings_of_deepspeed(
    untouched: pytest.MonkeyPatch, experiment_file: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_stage": 3,
    }
    offload = {
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": True,
    }
    good = config_file(tmp_path, "DEEPSPEED", deepspeed_config=settings | offload)
    check(good, experiment_file)
    with patch_environment(**accelerate._settings_of(good)):
        assert accelerate._zero() == deepspeed.Config(stage=3, offload_optimizer=True)
    untouched.setattr(accelerate, "_make", fake_gpu)
    assert isinstance(build(good), deepspeed.DeepSpeed)
    others = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "offload_param_device": "nvme",
    }
    with pytest.raises(
        ConfigError, match=r"ACCUMULATION_STEPS=4.*PARAM_DEVICE=nvme.*gradient_clipping is 0\.5"
    ):
        check(
            config_file(tmp_path, "DEEPSPEED", deepspeed_config=settings | others), experiment_file
        )
    with pytest.raises(ConfigError, match="zero_stage is 0"):
        check(
            config_file(tmp_path, "DEEPSPEED", deepspeed_config=settings | {"zero_stage": 0}),
            experiment_file,
        )


@pytest.mark.usefixtures("untouched")
def test_a_json_of_deepspeed_is_checked_as_by_itself(experiment_file: str, tmp_path: Path) -> None:
    json_file = tmp_path / "zero.json"
    json_file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    file = config_file(
        tmp_path, "DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(json_file)}
    )
    text = Path(file).read_text().replace("mixed_precision: 'no'\n", "")
    Path(file).write_text(text)
    with patch_environment(**accelerate._settings_of(file)):
        assert accelerate._zero() == deepspeed.Config(stage=1, config=str(json_file))
    check(file, experiment_file, "training.precision=bf16")
    with pytest.raises(ConfigError, match=r"bf16\.enabled"):
        check(file, experiment_file)
    json_file.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}})
    )
    Path(file).write_text(f"{text}mixed_precision: bf16\n")
    with pytest.raises(ConfigError, match=r"mixed_precision is bf16 and training\.precision fp32"):
        check(file, experiment_file)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("MULTI_CPU", {"no_such_key": 1}, "unknown keys.*no_such_key"),
        ("FSDQ", {}, "'FSDQ' is not a valid DistributedType"),
        ("XLA", {}, "is for .* on LOCAL_MACHINE, and samestep runs NO, MULTI_CPU"),
    ],
)
def test_bad_files(tmp_path: Path, kind: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(config_file(tmp_path, kind, **settings))


def test_two_sources_of_settings_are_refused(untouched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    untouched.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match="Leave out one of the two"):
        build(config_file(tmp_path, "NO"))


def test_one_process_in_place_of_several_is_refused(untouched: pytest.MonkeyPatch) -> None:
    untouched.setenv("ACCELERATE_USE_CPU", "True")
    untouched.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="Append `--processes N`"):
        build(None)


def test_another_device_is_refused(untouched: pytest.MonkeyPatch) -> None:
    untouched.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    with pytest.raises(ConfigError, match="takes meta and this run cpu"):
        build(None)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (FSDP2, fsdp.Config(1, True)),
        ({**FSDP2, "fsdp_reshard_after_forward": False}, fsdp.Config(1, False)),
        ({**FSDP1, "fsdp_sharding_strategy": "FULL_SHARD"}, fsdp.Config(1, True)),
        ({**FSDP1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, fsdp.Config(1, False)),
        ({**FSDP1, "fsdp_sharding_strategy": "NO_SHARD"}, fsdp.Config(8, False)),
        ({**FSDP1, "fsdp_sharding_strategy": "HYBRID_SHARD"}, fsdp.Config(2, True)),
        ({**FSDP1, "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, fsdp.Config(2, False)),
    ],
)
def test_settings_of_fsdp(tmp_path: Path, settings: dict[str, Any], expected: fsdp.Config) -> None:
    """For 8 processes on 2 machines."""
    world = World(0, 8, None, timedelta(seconds=10))
    found = accelerate._settings_of(config_file(tmp_path, "FSDP", fsdp_config=settings))
    with patch_environment(**found, LOCAL_WORLD_SIZE=4):
        assert accelerate._fsdp(fake_gpu("FSDP", None, None), world) == expected
        if settings is FSDP2:
            assert accelerate._fsdp(fake_gpu("FSDP", None, None, replicas=2), world) == fsdp.Config(
                2, True
            )
