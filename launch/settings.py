"""Settings and checks that several kinds of cluster share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from launch.job import Cluster, JobSpec
from samestep.errors import ConfigError

_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")


def check_patterns(settings: object, patterns: Mapping[str, re.Pattern[str]], system: str) -> None:
    """Rejects settings that the cluster's software would not accept.

    Args:
        patterns: for each setting by name; None is valid for all of them.
        system: name of the software.

    Raises:
        ConfigError: naming the setting.
    """
    for name, pattern in patterns.items():
        value = getattr(settings, name)
        if value is not None and not pattern.fullmatch(str(value)):
            raise ConfigError(f"{name} is {value!r}. Use a value that {system} accepts.")


def check_least(settings: object, **least: int) -> None:
    """Rejects numbers below the least value of a setting; None is valid for all of them.

    Raises:
        ConfigError: naming the setting.
    """
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            raise ConfigError(f"{name} must be at least {smallest}, not {value}")


def check_options(options: Iterable[str], client: str) -> None:
    """Rejects anything but long options of a client.

    Raises:
        ConfigError: naming it.
    """
    for option in options:
        if not option.startswith("--") or not option.isprintable():
            raise ConfigError(
                f"options: {option!r} is not an option of {client}. Write each one as --name=value."
            )


def check_sigterm(job: JobSpec, system: str) -> None:
    """Rejects a run that would save no checkpoint on SIGTERM, though it saves on other signals.

    Args:
        system: that ends runs by SIGTERM.

    Raises:
        ConfigError: the signals of a run lack it.
    """
    signals = job.stop_signals
    if job.action == "train" and signals and "SIGTERM" not in signals:
        raise ConfigError(
            f"training.preemption.signals is [{', '.join(signals)}], and {system} ends runs by "
            "SIGTERM. Add SIGTERM."
        )


def chips_of(topology: str) -> int:
    """Number of chips in a topology such as 4x4 or 2x2x4; 0 if it is written otherwise."""
    return math.prod(map(int, topology.split("x"))) if _TOPOLOGY.fullmatch(topology) else 0


class NodeCluster(Cluster):
    """A cluster of nodes: a job runs one `samestep train --elastic` on each of its nodes."""

    # Fields of the subclasses.
    nodes: str | int | None
    gpus_per_node: int
    processes_per_node: int
    cpus_per_node: int | None
    interface: str | None

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the greatest number of nodes, from 4 or 2-8.

        Raises:
            ConfigError: `nodes` is neither a number nor a range.
        """
        nodes = 1 if self.nodes is None else self.nodes
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(nodes))
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise ConfigError(f"nodes must be a number such as 4, or a range as 2-8, not {nodes}")
        return least, most

    @property
    def devices(self) -> tuple[int, ...]:
        """One number of devices for each number of nodes."""
        least, most = self.node_range
        per_node = self.gpus_per_node or self.processes_per_node
        return tuple(nodes * per_node for nodes in range(least, most + 1))

    @property
    def hardware(self) -> Literal["gpu", "tpu", "cpu", "here"]:
        return "gpu" if self.gpus_per_node else "cpu"

    @property
    def size(self) -> str:
        per_node = self.gpus_per_node or self.processes_per_node
        one, many = ("GPU", "GPUs") if self.gpus_per_node else ("process", "processes")
        return f"{self.nodes_in_words} x {per_node} {one if per_node == 1 else many}"

    @property
    def nodes_in_words(self) -> str:
        """The number of nodes, as "2 to 8 nodes"."""
        least, most = self.node_range
        nodes = f"{least} to {most}" if most > least else str(least)
        return f"{nodes} node{'s' if most > 1 else ''}"

    def check_node_settings(self) -> None:
        """Rejects invalid values of the settings that all these clusters have."""
        check_least(self, processes_per_node=1, cpus_per_node=1, gpus_per_node=0)
        _ = self.node_range  # raises if `nodes` is invalid

    def train_arguments(self, nodes: str, rendezvous: str, has_devices: bool) -> list[str]:
        """Arguments of `samestep train` on each node.

        Args:
            nodes: MIN:MAX of the rendezvous.
            rendezvous: HOST:PORT.
            has_devices: whether the node has accelerators; `train` then counts its workers itself.
        """
        workers = [] if has_devices else ["--processes", str(self.processes_per_node)]
        return [*workers, "--elastic", nodes, "--rendezvous", rendezvous]

    def socket_variables(self) -> dict[str, str]:
        """Environment variables with the network interface of NCCL and gloo."""
        if self.interface is None:
            return {}
        return {f"{library}_SOCKET_IFNAME": self.interface for library in ("NCCL", "GLOO")}
