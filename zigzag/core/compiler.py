"""XLA options for our programs, by platform.

Options that the user sets in XLA_FLAGS and LIBTPU_INIT_ARGS override ours, except the one that
keeps XLA from aborting. We measured each option's effect, or estimated it for devices we didn't
have (docs/measurements.md). zigzag/core/mesh.py sets where jax caches compiled programs.
"""

import os
from typing import Any

import jax
from jax.sharding import Mesh

from zigzag.core.mesh import platform

# Options for training, and for other programs on its weights, by platform or device kind.
TRAINING = {
    # Compiles in three quarters of the time; steps are just as fast.
    "cpu": {"xla_backend_optimization_level": 1},
    # Estimated for v5e; we have no numbers for other kinds of TPUs.
    "TPU v5 lite": {
        # Sends gradients over fsdp, and tokens to experts, during the matmuls. For 1.2B on 16 chips
        # (fsdp=16), a 379 ms step waits 5.1 ms for these sends instead of 15.7. libtpu 0.0.51 fails
        # on more chips, so compiler_options leaves the option out there.
        "xla_tpu_enable_async_all_to_all": True,
        # All-gathers a weight during the matmuls even if a chip holds less than about 300 kB of it.
        # An all-reduce would send twice the bytes. On 64 chips: 223.6 -> 197.6 ms.
        "xla_tpu_prefer_async_allgather_to_allreduce": True}}


def compiler_options(mesh: Mesh, auto_tensor: bool = False, any_loss: bool = False
                     ) -> dict[str, Any]:
    """Return a training program's options: TRAINING, minus those that the user sets.
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
