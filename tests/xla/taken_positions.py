"""Selects positions under torch-xla; reports differences from the CPU, and what the graph has."""

from __future__ import annotations

import json
import re
import sys

import torch
from torch_xla import _XLAC

from tests.xla.interpreted_kernel import report
from trainer.accelerators.kinds import xla
from trainer.models.layers.attention import take


def main() -> None:
    device = xla.Config().build().device
    for positions, length, width in json.loads(sys.argv[1]):
        random = torch.Generator().manual_seed(positions)
        x = torch.randn(4, length, width, generator=random)
        weight = torch.randn(4, positions, width, generator=random)
        index = torch.randint(length, (4, positions), generator=random)
        found = []
        for place in ("cpu", device):
            own = x.detach().to(place).requires_grad_()
            with torch.autocast(torch.device(place).type, torch.bfloat16):
                taken = take(own, index.to(place))
            (taken * weight.to(place)).sum().backward()
            found.append((taken, own.grad))
        (expected, on_devices) = found
        graph = _XLAC._get_xla_tensors_hlo(list(on_devices))
        report(
            operations=sorted(set(re.findall(r" (dot|gather|scatter|sort)\(", graph))),
            errors=[
                (a - b.cpu()).abs().max().item() for a, b in zip(expected, on_devices, strict=True)
            ],
        )


if __name__ == "__main__":
    main()
