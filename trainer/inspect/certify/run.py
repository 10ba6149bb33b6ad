"""Runs all checks on the ranks of a launcher, and writes the certificate."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

import torch

from samestep import __version__, storage
from samestep.errors import ConfigError
from samestep.findings import Finding, report
from samestep.stored_json import JsonError, read_json
from samestep.terminal import Console
from trainer.accelerators import Accelerator, Precision
from trainer.accelerators.detect import best
from trainer.inspect.certify import collectives, kernels
from trainer.inspect.certify.layouts import Layouts
from trainer.inspect.certify.ranks import Ranks
from trainer.inspect.replay.difference import Row
from trainer.strategies.world import World
from trainer.training.compute.arithmetic import processor

_TIMEOUT = 300.0  # seconds for a collective
_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def certify(output: Path, against: Path | None, console: Console) -> bool:
    """Runs the checks on this rank; all ranks do so together.

    Args:
        output: the certificate, which rank 0 writes.
        against: another certificate; its digests must be the same.
        console: for the table of rank 0.

    Returns:
        Whether all checks have passed.

    Raises:
        ConfigError: the devices cannot be checked, or `against` is no certificate.
    """
    other = None if against is None else read(against)
    world = World.start(_TIMEOUT)
    try:
        accelerator = best().repeatable().build()
        if accelerator.compiles:
            raise ConfigError(
                f"certify cannot check {accelerator.description}, which compiles graphs. Use "
                "samestep doctor."
            )
        world.connect(accelerator.collective_backend, accelerator.collective_device)
        started, findings = time.monotonic(), list[Finding]()
        ranks = Ranks.meet(world.rank, world.size, world.host_group())
        layouts = Layouts(accelerator, world, {})
        checks = _checks(accelerator, ranks, layouts)
        if other is not None:
            checks = _with_comparison(checks, layouts, other, str(against))

        def kept() -> Iterator[Finding]:
            for finding in checks:
                findings.append(finding)
                yield finding

        if world.rank == 0:
            report(kept(), console)
        else:
            # The checks are collective: ranks without a terminal take part in all of them.
            for _ in kept():
                pass
        has_passed = all(finding.state != "failed" for finding in findings)
        devices = ranks.gather(accelerator.description)
        if world.rank == 0:
            content = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "passed": has_passed,
                "samestep": __version__,
                "torch": torch.__version__,
                "processor": processor(),
                "ranks": [
                    {"node": node, "device": device}
                    for node, device in zip(ranks.nodes, devices, strict=True)
                ],
                "seconds": round(time.monotonic() - started, 1),
                "findings": [asdict(finding) for finding in findings],
                "digests": _digests(layouts),
            }
            storage.write_text(output, json.dumps(content, indent=1) + "\n")
        world.close()
    except BaseException as error:
        world.failed(error)
        raise
    return has_passed


def _checks(accelerator: Accelerator, ranks: Ranks, layouts: Layouts) -> Iterator[Finding]:
    yield _devices(accelerator, ranks)
    precisions = [each for each in _PRECISIONS if each in accelerator.precisions]
    for precision in precisions:
        yield from kernels.products(accelerator, ranks, precision)
        yield from kernels.against_fp64(accelerator, ranks, precision)
        yield from kernels.passes(accelerator, ranks, precision)
    # One rank has nobody to exchange with.
    if len(ranks.nodes) > 1:
        yield from collectives.check(accelerator.device, ranks)
    for precision in precisions:
        yield from layouts.check(precision)


def _devices(accelerator: Accelerator, ranks: Ranks) -> Finding:
    """Whether all ranks have the same hardware and torch."""
    own = f"{accelerator.description}, {processor()}, torch {torch.__version__}"
    found = ranks.gather(own)
    # The rarest kind is the odd one out.
    kinds = sorted(set(found), key=found.count, reverse=True)
    if len(kinds) == 1:
        return Finding("devices", "ok", f"{len(found)} x {own}")
    odd = [rank for rank, each in enumerate(found) if each == kinds[-1]]
    text = f"{ranks.named(odd)}: {kinds[-1]}; others: {kinds[0]}"
    return Finding("devices", "warning", text, "only equal devices compute the same bits")


def _digests(layouts: Layouts) -> dict[str, Row]:
    """The loss and the state after the last step, by precision, of the first layout."""
    found: dict[str, Row] = {}
    for precision, rows in layouts.rows.items():
        last = list(next(iter(rows.values())).values())[-1]
        found[precision] = {"loss": last["loss"], "state": last["state"]}
    return found


def _with_comparison(
    checks: Iterator[Finding], layouts: Layouts, other: _Certificate, name: str
) -> Iterator[Finding]:
    """The checks, and then a comparison with another certificate."""
    yield from checks
    for precision, own in _digests(layouts).items():
        stored = other["digests"].get(precision)
        subject, where = f"{precision} bits", f"{name} ({len(other['ranks'])} ranks)"
        # Its devices may lack this precision.
        if stored is None:
            yield Finding(subject, "warning", f"{where} has none")
            continue
        differ = [key for key, value in own["state"].items() if stored["state"].get(key) != value]
        if differ:
            text = f"{len(differ)} of {len(own['state'])} tensors differ from {where}"
            yield Finding(subject, "failed", text, "expected on other hardware or software only")
        else:
            yield Finding(subject, "ok", f"as in {where}")


def read(path: Path) -> _Certificate:
    """Reads a certificate.

    Raises:
        ConfigError: it is none.
    """
    try:
        return read_json(path, _Certificate)
    except (OSError, JsonError) as error:
        raise ConfigError(
            f"--against {path} is not a certificate: {error}. Name a file of samestep certify."
        ) from error


class _Digests(TypedDict):
    state: dict[str, str]


class _Certificate(TypedDict):
    digests: dict[str, _Digests]
    ranks: list[dict[str, object]]
