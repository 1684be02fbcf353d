"""The commands: --mesh auto and --topology."""

import contextlib
import dataclasses
import importlib.util
import os
import time
from typing import Any, Sequence

import jax
from jax.experimental import topologies

from forecast import estimate
from forecast.estimate import USUAL_COUNT, peak_memory
from zigzag.commands import programs
from zigzag.commands.programs import program_of, ready_to_run, resolved
from zigzag.core.chips import CHIPS, chip_of
from zigzag.core.errors import ConfigError, divisors, human_bytes, one_line
from zigzag.core.flags import change
from zigzag.core.mesh import AXES, abstract_mesh, axes_in_use, make_mesh, slices_of
from zigzag.core.report import Reporter
from zigzag.core.start import LIBTPU
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run.checks import check_network
from zigzag.run.loop import report_header
from zigzag.run.plan import Program, compiled
from zigzag.run.running import devices_of, expected

# The fraction of memory that the formulas may fill; the compiler needs more than they predict.
ROOM = 0.95
# How many of the best meshes to print, and how many of those to compile until one fits.
SHOWN, COMPILED = 5, 3


def choose_mesh(config: Any) -> tuple[Any, tuple[Program, jax.stages.Compiled]]:
    """Find the fastest mesh that divides the model and fits. Compile the meshes that the estimate
    ranks best until one fits, and return the config with it, its program and its compiled step."""
    devices = devices_of(config)
    one = resolved(config, make_mesh(devices[:1]))
    # Reject options that are invalid on every mesh here; below, an error only excludes one mesh.
    network, say = network_of(one), Reporter(config.steps).line
    check_network(change(one, batch=1, accumulate=1, microbatches=1, chunks=1, schedule="gpipe"),
                  network, abstract_mesh({}))
    params, flops = network.weight_shapes(one.network), flops_of_update(one)
    known = chip_of(devices[0])
    chip, slices, costs = known or CHIPS["TPU v5 lite"], slices_of(devices), []
    for sizes in all_meshes(len(devices)):
        # The cost model assumes that tensor splits all heads and the MLP.
        tensor = sizes["tensor"]
        if (one.network.heads % tensor or one.network.d_ff % tensor or sizes["data"] % slices
                or one.shards not in (0, tensor)):
            continue
        text = ",".join(axes_in_use(sizes)) or "data=1"
        placed = dataclasses.replace(one, mesh=text, shards=0)
        with contextlib.suppress(ConfigError):
            check_network(placed, network, abstract_mesh(sizes))
            costs.append((placed, estimate.cost_model(placed, params, sizes, chip, flops)))
    if not costs:
        raise ConfigError(f"--mesh auto: no mesh of {len(devices)} devices divides this model and "
                          f"--batch {config.batch}")
    # Meshes that don't fit come last. If none fit, the one that needs the least memory comes first.
    costs.sort(key=lambda x: (max(1.0, x[1].memory / (ROOM * chip.memory)),
                              x[1].arithmetic + x[1].links))
    say(f"mesh     auto: {len(costs)} meshes of {len(devices)} devices, by the cost model" + (
        "" if known else " and a v5e's rates, because these devices' are unknown"))
    if len(devices) == 1 and devices[0].platform == "cpu":
        say("         (XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates eight devices "
            "here)")
    for placed, cost in costs[:SHOWN]:
        say(f"         {placed.mesh:36} {in_units(cost.arithmetic + cost.links, TIMES):>11}: "
            f"arithmetic {in_units(cost.arithmetic, TIMES)}, links "
            f"{in_units(cost.links, TIMES)}; about {_gib(cost.memory)} of "
            f"{chip.memory / 2**30:.0f} GiB")
    for placed, _ in costs[:COMPILED]:
        try:
            ready = ready_to_run(placed)
            peak = peak_memory(ready[1])
        except jax.errors.JaxRuntimeError as e:
            say(f"         {placed.mesh} does not compile: {one_line(e)}")
            continue
        say(f"         {placed.mesh} compiled: {_gib(peak)} a device")
        if peak < chip.memory:
            return dataclasses.replace(config, mesh=placed.mesh, shards=0), ready
    raise ConfigError(f"--mesh auto: among {len(costs)} meshes of {len(devices)} devices, none of "
                      f"the {COMPILED} best fits; try --remat full, a larger --accumulate or more "
                      f"devices")


def all_meshes(count: int, axes: Sequence[str] = AXES) -> list[dict[str, int]]:
    """Return the axis sizes of every mesh with `count` devices."""
    first, *others = axes
    if not others:
        return [{first: count}]
    return [{first: n, **rest} for n in divisors(count) for rest in all_meshes(count // n, others)]


def run(config: Any) -> None:
    """Compile the real step for the --topology hardware. Report its memory, FLOPs and collectives,
    and how long they take at the chip's published rates."""
    begin = time.perf_counter()
    config, ready = programs.choose_mesh(config)
    program = ready[0] if ready else program_of(config)
    config, reporter = program.config, Reporter(config.steps, verbose=True)
    say = reporter.line
    report_header(program, reporter)
    say("compiling ...", live=True)
    step = ready[1] if ready else compiled(program)
    say(f"compiled in {time.perf_counter() - begin:.1f} s")
    wanted, is_complete = expected(program)
    flops = flops_of_update(config) / program.mesh.size
    sends, done, error = estimate.work_of(program, step, wanted)
    if error:
        say(f"         {error}")
    else:
        reporter.collectives(sends, wanted, is_complete)
    chip, memory = chip_of(program.mesh.devices.flat[0]), step.memory_analysis()
    far = sum(c.bytes for c in sends if c.kind == "send between slices")
    peak, sent = peak_memory(step), sum(c.bytes for c in sends) - far
    fits = "" if not chip else f", which has {_gib(chip.memory)}: " + (
        "it fits" if peak < chip.memory else "IT DOES NOT FIT")
    say(f"memory   {_gib(memory.argument_size_in_bytes)} of state and batch, "
        f"{_gib(memory.temp_size_in_bytes)} of temporaries, peak {_gib(peak)} a device" + fits)
    frozen = "; 4 per frozen weight" if config.network.lora_rank else ""
    say(f"compute  {in_units(done, FLOPS, 2)} a device, {done / flops:.3f} times the usual count "
        f"({USUAL_COUNT}{frozen})")
    say(f"links    {_gib(sent)} sent by a device" + (
        f", and {_gib(far)} between slices, whose time isn't in the bound" if far else ""))
    if not chip:
        return
    takes = estimate.least_times(step, done, sent, chip)
    worst, least = max(takes.items(), key=lambda pair: pair[1])
    speed = config.batch * config.network.seq_len / least
    speed = f"{speed:,.0f}" if speed < 1e6 else f"{speed / 1e6:,.1f} million"
    say("bound    " + ", ".join(f"{k} {in_units(v, TIMES)}" for k, v in takes.items())
        + f": a step takes at least {in_units(least, TIMES)} ({worst}), {speed} tokens/s, mfu at "
        f"most {flops / chip.flops / least:.1%}, if each runs at its published rate "
        f"({chip.flops / 1e12:.0f} Tflop/s, {chip.bandwidth / 1e9:.0f} GB/s, "
        f"{chip.links / 1e9:.0f} GB/s over all links) and all at once")


# Units from largest to smallest, so that a small model's numbers aren't all 0.00.
FLOPS = {"Tflop": 1e12, "Gflop": 1e9, "Mflop": 1e6}
TIMES = {"ms": 1e-3, "us": 1e-6}


def in_units(x: float, units: dict[str, float], digits: int = 1) -> str:
    """Format x in the largest of these units that makes it at least 0.1."""
    name, unit = next((pair for pair in units.items() if 10 * x >= pair[1]), [*units.items()][-1])
    return f"{x / unit:,.{digits}f} {name}"


def _gib(size):
    return f"{size / 2**30:.2f} GiB" if 10 * size >= 2**30 else human_bytes(size)


# -------------------------------------------------------------------------------------------
# Absent hardware

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


def topology_devices(name: str, slices: int = 1) -> list[Any]:
    """Return the devices of absent hardware, for example v5e:4x4 or h100:1x2x8, with this many TPU
    slices. jax can compile programs for them, but can't run any."""
    kind, _, size = name.partition(":")
    jax.config.update("jax_platforms", "cpu")       # don't look for or occupy an accelerator
    _check_compiler(name, kind)
    for key, value in LIBTPU.items():
        os.environ.setdefault(key, value)
    try:
        if kind == "h100":
            if slices > 1:
                raise ValueError("--slices is for TPUs")
            from jax._src.cudnn import fused_attention_stablehlo
            fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN_VERSION
            return topologies.get_topology_desc(size, "cuda", topology=size,
                                                target_config=_H100).devices
        # On a real v4, a chip's two cores form a single device.
        options = {"chip_config_name": "megacore"} if kind == "v4" else {}
        options |= {"num_slices": slices} if slices > 1 else {}
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
