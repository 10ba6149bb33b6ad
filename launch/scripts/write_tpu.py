"""Scripts that request a TPU slice for a recipe with gcloud alone."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2

from launch.tpu import types
from launch.tpu.slice import WORK
from launch.tpu.startup import UV
from samestep.version import __version__


@dataclass(frozen=True)
class Run:
    """A recipe on a slice.

    Attributes:
        model: its name in prose.
        slice: in Google's words for people, as v5e-16.
        accelerator_type: for the request.
        zone: one that has such chips.
        recipe: in configs/pretrain/tpu.
        data: folder of the dataset in the bucket.
        micro_batch: sequences of a chip in a micro-batch.
        hours: of all steps, as `samestep plan` predicts.
        tokens: tokens/s of a chip by sequence length, as `samestep plan` predicts.
    """

    model: str
    slice: str
    accelerator_type: str
    zone: str
    recipe: str
    data: str
    micro_batch: int
    hours: float
    tokens: dict[int, int]

    @property
    def devices(self) -> int:
        return types.devices(self.accelerator_type, None)

    @property
    def file(self) -> str:
        """Name of the script, as bert_base_v5e16.sh."""
        return f"{self.recipe}_{self.slice.replace('-', '')}.sh"

    def script(self) -> str:
        """The script."""
        days = self.hours / 24
        throughput = " and ".join(f"{tokens:,}" for tokens in self.tokens.values())
        lengths = " and ".join(str(length) for length in self.tokens)
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
        )
        environment.filters["quote"] = shlex.quote
        return environment.get_template("tpu.sh.jinja").render(
            model=self.model,
            slice=self.slice,
            devices=self.devices,
            hours=f"{self.hours:.1f} hours" if days < 2 else f"{days:.1f} days",
            chip_hours=f"{self.hours * self.devices:,.0f}",
            throughput=throughput,
            phases=f" at length {lengths}",
            file=self.file,
            name=self.file.removesuffix(".sh").replace("_", "-"),
            zone=self.zone,
            recipe=self.recipe,
            data=self.data,
            version=__version__,
            micro_batch=self.micro_batch,
            work=WORK,
            uv=UV,
            type=self.accelerator_type,
            image=types.image(self.accelerator_type),
        )


RUNS = (
    Run(
        model="BERT-base",
        slice="v5e-16",
        accelerator_type="v5litepod-16",
        zone="us-central1-a",
        recipe="bert_base",
        data="wikipedia_en",
        micro_batch=16,
        hours=6.2,
        tokens={128: 122_110, 512: 111_189},
    ),
    Run(
        model="RoBERTa-base",
        slice="v5e-64",
        accelerator_type="v5litepod-64",
        zone="us-central1-a",
        recipe="roberta_base",
        data="corpus_bpe",
        micro_batch=16,
        hours=85.8,
        tokens={512: 106_085},
    ),
    Run(
        model="T5-base",
        slice="v6e-32",
        accelerator_type="v6e-32",
        zone="us-east5-b",
        recipe="t5_base",
        data="c4_en_t5",
        micro_batch=32,
        hours=49.4,
        tokens={512: 225_231},
    ),
)


def scripts() -> dict[str, str]:
    """The scripts by file name in this folder."""
    return {f"tpu/{run.file}": run.script() for run in RUNS}
