"""Absent hardware: the devices of --topology, for which jax can compile programs."""

import contextlib
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from zigzag.core.errors import ConfigError
from zigzag.core.start import LIBTPU

# The cuDNN version to assume for an H100. By default jax queries the installed cuDNN.
_CUDNN_VERSION = 91000
# A text proto that describes the H100 to XLA's compiler.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" device_address_bits: 64
  pcie_bandwidth: 34359738368 name: "NVIDIA H100 80GB HBM3" driver_version: "12.9.0"
  runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.8.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3" """


def topology_devices(name: str) -> list[Any]:
    """Return the devices of absent hardware, for example v5e:4x4 or h100:1x2x8. jax can compile
    programs for them, but can't run any."""
    kind, _, size = name.partition(":")
    jax.config.update("jax_platforms", "cpu")       # don't look for or occupy an accelerator
    _check_compiler(name, kind)
    for key, value in LIBTPU.items():
        os.environ.setdefault(key, value)
    try:
        if kind == "h100":
            from jax._src.cudnn import fused_attention_stablehlo
            fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN_VERSION
            return topologies.get_topology_desc(size, "cuda", topology=size,
                                                target_config=_H100).devices
        # On a real v4, a chip's two cores form a single device.
        options = {"chip_config_name": "megacore"} if kind == "v4" else {}
        return topologies.get_topology_desc(name, "tpu", **options).devices
    except Exception as e:      # the compilers raise their own exception types
        raise ConfigError(
            f"--topology {name}: not known ({' '.join(str(e).split())[:150]}); expected one like "
            f"v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x2 or h100:1x2x8 "
            f"(slices x hosts x GPUs)") from None


def _check_compiler(name, kind):
    module = wheels = "libtpu"
    if kind == "h100":
        module = "jax_plugins.xla_cuda12"
        wheels = f"jax-cuda12-plugin=={jax.__version__} nvidia-cuda-nvcc-cu12"
    with contextlib.suppress(ModuleNotFoundError):      # jax_plugins may not exist
        if importlib.util.find_spec(module):
            return
    raise ConfigError(f"--topology {name}: its compiler is not installed: pip install {wheels}")
