"""The mesh of a run, on the devices of this machine, of many, or of one that is not here."""

import math
from typing import Any, Sequence

import jax

from zigzag.core import hosts
from zigzag.core.mesh import make_mesh, mesh_sizes, simulate_devices
from zigzag.measure import chips


def machine(config: Any) -> Any:
    """The mesh of a configuration: on the devices of --topology, on the accelerators of all its
    processes, or, without accelerators, on as many simulated CPU devices as it needs."""
    sizes = mesh_sizes(config.mesh, config.shards)
    count, rest = divmod(math.prod(sizes.values()), max(1, config.processes))
    if not config.distributed and rest == 0:
        simulate_devices(count)
    return make_mesh(devices_of(config), **sizes)


def devices_of(config: Any) -> Sequence[Any]:
    """The devices of --topology, or all devices of this run, after its processes have met."""
    hosts.init_distributed(config)
    devices = chips.topology_devices(config.topology) if config.topology else jax.devices()
    hosts.end_at_sigterm()
    return devices
