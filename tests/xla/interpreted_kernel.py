"""Runs whose Pallas kernel of attention is interpreted, as if this processor were a TPU.

And the kernel for TPUs.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import jax
from jax._src import cloud_tpu_init
from jax.experimental.pallas.ops.tpu import flash_attention as pallas
from torch_xla import _XLAC

from samestep import cli
from tests.xla import worker
from trainer.accelerators.kinds import xla
from trainer.inspect.doctor.xla_devices import XlaTrial
from trainer.strategies.xla import flash, split


def main() -> None:
    what = sys.argv.pop(1)
    written_out = pallas.pl.pallas_call
    pallas.pl.pallas_call = partial(written_out, interpret=True)
    flash.usable, flash._PLATFORM = lambda accelerator: True, "cpu"
    if what == "run":
        worker.main()
    elif what == "doctor":
        cli.main(["doctor"])
    else:
        trial = XlaTrial(xla.Config().build())
        for cells, width, causal, packed in json.loads(sys.argv[1]):
            report(error=trial.attention_error(cells, width, causal, packed))
        flash._CALLS += [
            flash._Call((4, 2, 1024, width), True, False, 1.0, split.register(trial._mesh))
            for width in (64, 128)
        ]
    pallas.pl.pallas_call, flash._PLATFORM = written_out, "tpu"
    jax.clear_caches()
    flash._kernel.cache_clear()
    cloud_tpu_init.running_in_cloud_tpu_vm = True  # as importing JAX there has it
    for number, call in enumerate(flash._CALLS):
        texts = [_XLAC._xla_computation_text(each) for each in flash._kernel(number)[:2]]
        kernels = [text.count('custom_call_target="tpu_custom_call"') for text in texts]
        report(shape=call.shape, causal=call.causal, kernels=kernels)


def report(**found: object) -> None:
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
