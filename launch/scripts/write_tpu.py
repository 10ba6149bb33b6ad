"""Scripts that request a slice of Cloud TPU with gcloud alone."""

from __future__ import annotations

import shlex
from pathlib import Path

import jinja2

from launch.scripts import FOLDER, Run, header
from launch.scripts.write_kubernetes import SLICES
from launch.tpu import types
from launch.tpu.slice import WORK
from launch.tpu.startup import UV
from samestep import __version__

# The type to request, and a zone that has it.
_REQUESTS = {
    "bert_base_v5e16": ("v5litepod-16", "us-central1-a"),
    "roberta_base_v5e64": ("v5litepod-64", "us-central1-a"),
    "t5_base_v6e32": ("v6e-32", "us-east5-b"),
}


def runs() -> dict[str, Run]:
    """What each script runs, by the script's name: the same as on Kubernetes."""
    return {f"tpu/{name}.sh": run for name, (run, *_) in SLICES.items()}


def scripts() -> dict[str, str]:
    """The text of each script, by name."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    template = environment.get_template("tpu.sh.jinja")
    texts = {}
    for path, run in runs().items():
        kind, zone = _REQUESTS[Path(path).stem]
        *_, dataset = SLICES[Path(path).stem]
        name = Path(path).stem.replace("_", "-")
        head = header(
            run,
            f"PROJECT=my-project BUCKET=my-bucket bash launch/scripts/{path} [key=value ...]",
            "In a clone, after `pip wheel --no-deps .`; DATA is in the bucket (docs/cloud_tpu.md).",
            f"Watch: gcloud storage cat 'gs://BUCKET/{name}/TIME/log/*'. Stop, with a checkpoint: "
            f"echo | gcloud storage cp - gs://BUCKET/{name}/TIME/stop, and delete the slice as "
            "printed, as after a preemption. Submitted again, the run continues.",
        )
        texts[path] = template.render(
            header="\n".join(head),
            name=name,
            zone=zone,
            experiment=run.experiment,
            data=dataset,
            version=__version__,
            work=WORK,
            uv=UV,
            type=kind,
            image=types.image(kind),
        )
    return texts
