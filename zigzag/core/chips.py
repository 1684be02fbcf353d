"""Chips: published numbers, and memory use."""

import resource
from typing import Any, NamedTuple

import jax


class Chip(NamedTuple):
    """The published numbers of a single device."""
    flops: float        # bfloat16 operations per second
    memory: float       # bytes
    bandwidth: float    # bytes per second from memory
    links: float        # bytes per second to other chips over all links, one way


# {device name prefix: its numbers}. On TPU7x, each of a chip's two cores is a device.
CHIPS = {"TPU v4": Chip(275e12, 32 * 2**30, 1.228e12, 300e9),
         "TPU v5 lite": Chip(197e12, 16 * 2**30, 0.819e12, 200e9),
         "TPU v5": Chip(459e12, 95 * 2**30, 2.765e12, 600e9),
         "TPU v6 lite": Chip(918e12, 32 * 2**30, 1.64e12, 448e9),
         "TPU7x": Chip(1153e12, 96 * 2**30, 3.69e12, 600e9),
         "NVIDIA A100": Chip(312e12, 80e9, 2.04e12, 300e9),
         "NVIDIA H100": Chip(989e12, 80e9, 3.35e12, 450e9),
         "NVIDIA H200": Chip(989e12, 141e9, 4.8e12, 450e9)}


def chip_of(device: Any) -> Chip | None:
    """Return this device's published numbers, or None if the chip is unknown."""
    return next((c for name, c in CHIPS.items() if device.device_kind.startswith(name)), None)


def mfu(flops: float | None, seconds: float, mesh: Any) -> float | None:
    """Return model FLOPs utilization (MFU), as a fraction of the devices' peak; None if unknown."""
    chip = chip_of(mesh.devices.flat[0])
    return flops / seconds / (chip.flops * mesh.size) if flops and chip else None


def memory_in_use(what: str = "bytes_in_use") -> int:
    """Return the bytes in use on the first device, or the process's peak if jax has no count."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get(what) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
