"""What XLA is told: its options for our programs, on each platform.

A user's own options win, from XLA_FLAGS and LIBTPU_INIT_ARGS, but for two without which a program
would end in an abort or wait for ever. What an option brings is measured, or estimated where a
device is not at hand (docs/measurements.md). zigzag/core/mesh.py says where compiled programs are
kept.
"""

import os
from typing import Any

import jax
from jax.sharding import Mesh

from zigzag.core.mesh import platform

# For programs of training and what else runs on its weights, by platform or kind of device.
TRAINING = {
    # Compiles in three quarters of the time; steps are as fast.
    "cpu": {"xla_backend_optimization_level": 1},
    # By estimates for v5e (not measured for TPUs of other kinds):
    "TPU v5 lite": {
        # Gradients over fsdp, and tokens for experts, travel while products are computed: of the
        # sends of 1.2B on 16 chips (fsdp=16), 5.1 ms are waited for, not 15.7 (of 379). libtpu
        # 0.0.51 fails on more chips, so compiler_options leaves it out there.
        "xla_tpu_enable_async_all_to_all": True,
        # A weight of which a chip has less than some 300 kB is still all-gathered, while products
        # are computed: not by an all-reduce, of twice the bytes. On 64 chips 223.6 -> 197.6 ms.
        "xla_tpu_prefer_async_allgather_to_allreduce": True}}


def compiler_options(mesh: Mesh, auto_tensor: bool = False, any_loss: bool = False
                     ) -> dict[str, Any]:
    """The options of a program of training: TRAINING, apart from those that the user names.
    `auto_tensor` says that tensor is left to the compiler inside a shard_map; `any_loss` that the
    program has a loss which is not one of our networks'."""
    given = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    kind = getattr(mesh.abstract_mesh.abstract_device, "device_kind", "")
    wanted = TRAINING.get(platform(mesh), {}) | TRAINING.get(kind, {})
    if mesh.size > 16:
        wanted.pop("xla_tpu_enable_async_all_to_all", None)
    if platform(mesh) == "cpu" and any_loss and jax.lib.__version__ == "0.10.2":
        # This version adds up wrong numbers in sum((x @ w)**2, -1) if x has three columns and more
        # than 32,768 rows (https://github.com/jax-ml/jax/issues/39103): keep its kernels for
        # products only. (0.10.1 and from 0.11.0 on it is right.)
        wanted["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    options = {name: value for name, value in wanted.items() if name not in given}
    if jax.config.read("jax_disable_most_optimizations"):
        options.pop("xla_backend_optimization_level", None)
    if platform(mesh) == "cpu" and auto_tensor and mesh.shape["tensor"] > 1:
        # This pass aborts the process on a bfloat16 psum with auto tensor ("Invalid binary
        # instruction opcode copy", jax 0.10.2 and 0.12.0.1).
        options["xla_disable_hlo_passes"] = "all-reduce-promotion"
    return options
