"""Chips: published numbers, memory use, and XLA options for our programs, by platform.

Options that the user sets in XLA_FLAGS and LIBTPU_INIT_ARGS override ours, except the one that
keeps XLA from aborting. We measured each option's effect, or estimated it for devices we didn't
have (docs/measurements.md). zigzag/core/mesh.py sets where jax caches compiled programs.
"""

import os
import resource
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from zigzag.core.mesh import platform


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


# Options for training and other programs with the same weights, by platform or device kind.
TRAINING = {
    # Compiles in three quarters of the time; steps are just as fast.
    "cpu": {"xla_backend_optimization_level": 1},
    # Estimated for v5e; we have no numbers for other kinds of TPUs.
    "TPU v5 lite": {
        # Sends gradients over fsdp, and tokens to experts, during the matmuls. With 1.2B weights on
        # 16 chips (fsdp=16), a 379 ms step waits 5.1 ms for these sends, not 15.7. libtpu 0.0.51
        # fails on more chips, so compiler_options leaves the option out there.
        "xla_tpu_enable_async_all_to_all": True,
        # All-gathers a weight during the matmuls even if a chip holds less than about 300 kB of it.
        # An all-reduce would send twice the bytes. A step on 64 chips: 223.6 -> 197.6 ms.
        "xla_tpu_prefer_async_allgather_to_allreduce": True}}


def compiler_options(mesh: Mesh, auto_tensor: bool = False, any_loss: bool = False
                     ) -> dict[str, Any]:
    """Return a training program's options: TRAINING, minus options that the user sets.
    `auto_tensor`: the compiler handles tensor inside a shard_map. `any_loss`: the loss is custom,
    not one of our networks'."""
    given = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    kind = getattr(mesh.abstract_mesh.abstract_device, "device_kind", "")
    wanted = TRAINING.get(platform(mesh), {}) | TRAINING.get(kind, {})
    if mesh.size > 16:
        wanted.pop("xla_tpu_enable_async_all_to_all", None)
    if platform(mesh) == "cpu" and any_loss and jax.lib.__version__ == "0.10.2":
        # This version miscomputes sum((x @ w)**2, -1) if x has three columns and more than 32,768
        # rows (https://github.com/jax-ml/jax/issues/39103), so use its kernels for matmuls only.
        # 0.10.1 is correct, and so are 0.11.0 and later.
        wanted["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    options = {name: value for name, value in wanted.items() if name not in given}
    if jax.config.read("jax_disable_most_optimizations"):
        options.pop("xla_backend_optimization_level", None)
    if platform(mesh) == "cpu" and auto_tensor and mesh.shape["tensor"] > 1:
        # This pass aborts the process on a bfloat16 psum with auto tensor ("Invalid binary
        # instruction opcode copy", jax 0.10.2 and 0.12.0.1).
        options["xla_disable_hlo_passes"] = "all-reduce-promotion"
    return options
