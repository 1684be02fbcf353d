"""XLA options for our programs, by platform.

A user's own options, in XLA_FLAGS and LIBTPU_INIT_ARGS, win over ours, except for the one that
keeps XLA from aborting. The effect of each option is measured, or estimated for devices that were
not at hand (docs/measurements.md). zigzag/core/mesh.py sets where jax keeps compiled programs.
"""

import os
from typing import Any

import jax
from jax.sharding import Mesh

from zigzag.core.mesh import platform

# For training, and for other programs that use its weights, by platform or kind of device.
TRAINING = {
    # Compiles in three quarters of the time; steps are as fast.
    "cpu": {"xla_backend_optimization_level": 1},
    # From estimates for v5e; nothing is measured for other kinds of TPUs.
    "TPU v5 lite": {
        # Sends gradients over fsdp, and tokens to experts, during the matmuls. For 1.2B on 16 chips
        # (fsdp=16), a step of 379 ms waits 5.1 ms for them, not 15.7. libtpu 0.0.51 fails on more
        # chips, so compiler_options leaves it out there.
        "xla_tpu_enable_async_all_to_all": True,
        # All-gathers a weight even where a chip has less than some 300 kB of it, during the
        # matmuls. An all-reduce sends twice the bytes. On 64 chips 223.6 -> 197.6 ms.
        "xla_tpu_prefer_async_allgather_to_allreduce": True}}


def compiler_options(mesh: Mesh, auto_tensor: bool = False, any_loss: bool = False
                     ) -> dict[str, Any]:
    """The options of a training program: TRAINING, without those that the user sets.
    `auto_tensor`: the compiler handles tensor inside a shard_map. `any_loss`: the loss is custom,
    not one of our networks'."""
    given = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    kind = getattr(mesh.abstract_mesh.abstract_device, "device_kind", "")
    wanted = TRAINING.get(platform(mesh), {}) | TRAINING.get(kind, {})
    if mesh.size > 16:
        wanted.pop("xla_tpu_enable_async_all_to_all", None)
    if platform(mesh) == "cpu" and any_loss and jax.lib.__version__ == "0.10.2":
        # This version returns a wrong sum((x @ w)**2, -1) if x has three columns and more than
        # 32,768 rows (https://github.com/jax-ml/jax/issues/39103): use its kernels for products
        # only. 0.10.1, and 0.11.0 and later, are right.
        wanted["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    options = {name: value for name, value in wanted.items() if name not in given}
    if jax.config.read("jax_disable_most_optimizations"):
        options.pop("xla_backend_optimization_level", None)
    if platform(mesh) == "cpu" and auto_tensor and mesh.shape["tensor"] > 1:
        # This pass aborts the process on a bfloat16 psum with auto tensor ("Invalid binary
        # instruction opcode copy", jax 0.10.2 and 0.12.0.1).
        options["xla_disable_hlo_passes"] = "all-reduce-promotion"
    return options
