"""Absent hardware (--topology), --mesh auto, and --bench."""

import importlib.util
import json
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest

import shard
from forecast import dry_run
from forecast.estimate import cost_model, peak_memory
from forecast.traffic import expected_traffic
from tests.common import SMALL, command, full, net, peer, refused, slow, started
from tests.helpers import make, program_of
from zigzag.core import chips
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import AXES, make_mesh, mesh_sizes

# -------------------------------------------------------------------------------------------
# --mesh auto

WIDE = dict(batch=16, layers=4, d_model=128, d_ff=512, seq_len=64)


def test_a_mesh_is_chosen_that_fits(monkeypatch, capsys):
    """A chosen mesh over which the model does not divide, or that does not fit into memory."""
    config = make(mesh="auto", **WIDE)
    chosen, (program, step) = dry_run.choose_mesh(config)
    lines = capsys.readouterr().out.splitlines()
    assert math.prod(mesh_sizes(chosen.mesh).values()) == 8 and peak_memory(step) > 0
    assert {a: n for a, n in program.mesh.shape.items() if n > 1} == mesh_sizes(chosen.mesh)
    assert "meshes of 8 devices" in lines[0] and chosen.mesh in lines[1]
    assert "compiled" in lines[-1]
    with pytest.raises(ConfigError, match="no mesh of 8 devices divides"):
        dry_run.choose_mesh(change(config, batch=1, heads=1, kv_heads=1, head_dim=128, layers=1,
                                   seq_len=1, d_ff=7))
    # (From here on with programs that are not compiled, but said to take so much memory.)
    monkeypatch.setattr(dry_run, "peak_memory", lambda step: step)
    monkeypatch.setattr(dry_run, "ready_to_run", lambda config: (None, 0))
    chosen, _ = dry_run.choose_mesh(change(config, shards=4))
    assert mesh_sizes(chosen.mesh)["tensor"] == 4
    monkeypatch.setattr(dry_run, "ready_to_run", lambda config: (None, 2**60))
    with pytest.raises(ConfigError, match="none of the 3 best fits"):
        dry_run.choose_mesh(config)


SLOW_LINKS = chips.Chip(flops=1e12, memory=1e9, bandwidth=1e11, links=1.0)


def links(mesh, **changes):
    """The seconds that cost_model has for links of a byte per second."""
    config = make(mesh=mesh, **{**WIDE, **changes})
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    sizes = {a: mesh_sizes(mesh).get(a, 1) for a in AXES}
    return cost_model(config, params, sizes, SLOW_LINKS, flops=1.0).links


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "tensor=4", "data=2,fsdp=2,tensor=2", "seq=4",
                                  "pipe=4"])
def test_the_cost_model_is_near_the_expected_traffic(mesh):
    """An estimate without the cost of some parallelism, which would always be chosen."""
    changes = dict(microbatches=2 if "pipe" in mesh else 1)
    program = program_of(make(mesh=mesh, **{**WIDE, **changes}), mesh)
    exact = sum(c.bytes for c in expected_traffic(program.plan))
    assert 0.5 < links(mesh, **changes) / exact < 2


@pytest.mark.parametrize("mesh, share", [("data=8", 1), ("seq=4", 1), ("expert=2", 1),
                                         ("fsdp=8", 0.5), ("tensor=4", 0.5), ("pipe=4", 0.5)])
def test_the_cost_model_knows_what_is_sent_in_8_bits(mesh, share):
    """A mesh that --mesh auto does not choose, because it counts 16 bits where 8 are sent, or one
    that it does choose, because it counts 8 where 16 are."""
    changes = dict(dtype="bfloat16", microbatches=2, experts=2)
    in_16_bits = links(mesh, **changes)
    assert links(mesh, **changes, send_dtype="float8") == pytest.approx(share * in_16_bits)


@pytest.mark.parametrize("changes", [dict(dense_layers=2), dict(expert_every=2)], ids=str)
def test_the_cost_model_knows_which_layers_have_experts(changes):
    """An estimate in which layers without experts send tokens to experts."""
    def of_tokens(**changes):
        return links("expert=2", experts=2, batch=32, **changes) - links(
            "expert=2", experts=2, batch=16, **changes)

    assert 0 < of_tokens(**changes) == pytest.approx(of_tokens() / 2)


def test_the_cost_model_gathers_a_whole_entry_of_the_stack():
    """A mesh that doesn't fit, because its layers are gathered n at a time."""
    def gathered(**changes):
        config = make(**{**WIDE, **changes})
        params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
        parts = cost_model(config, params, dict.fromkeys(AXES, 1), SLOW_LINKS, flops=1.0).parts
        return parts["two layers' gathered weights and gradients"] / sum(
            w.size for w in jax.tree.leaves(params))

    assert gathered(experts=2, expert_every=2) == pytest.approx(2 * gathered(experts=2))


# -------------------------------------------------------------------------------------------
# --topology

def test_a_compiler_that_is_not_installed_is_named(monkeypatch):
    """A traceback of an import, which does not say what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install libtpu"):
        dry_run.topology_devices("v5e:4x4")
    with pytest.raises(ConfigError, match="pip install jax-cuda12-plugin=="):
        dry_run.topology_devices("h100:1x2x8")


def test_hardware_that_is_not_known_is_one_line(capsys):
    """The compiler's own exception, a page long."""
    peer("libtpu")
    assert "--topology v9z:4x4: not known" in refused(capsys, "--topology", "v9z:4x4")


@pytest.mark.slow
def test_a_dry_run_says_what_it_does_and_ends_at_sigterm():
    """Minutes in which nothing is printed; a page of addresses, by libtpu, for whoever stops it."""
    peer("libtpu")
    run = started("--topology", "v5e:4x4", "--mesh", "fsdp=16", "--layers", 24, "--d_model", 1024,
                  "--batch", 16)
    lines = []
    while not lines or lines[-1] not in ("", "compiling ...\n"):
        lines.append(run.stdout.readline())
    run.terminate()
    assert run.communicate() == ("", "stopped by SIGTERM\n") and run.returncode == 1
    assert lines[0].startswith("=== zigzag on 16 x TPU v5 lite that are not here")


@pytest.mark.parametrize("sizes", [dict(fsdp=32, tensor=2),
                                   dict(data=2, fsdp=2, pipe=2, tensor=8)])
def test_an_axis_may_be_a_part_of_a_side_of_a_torus(sizes):
    """--mesh fsdp=32,tensor=2 refused on 4x4x4 chips, as by jax.make_mesh."""
    peer("libtpu")
    mesh = make_mesh(dry_run.topology_devices("v4:4x4x4"), **sizes)
    assert {a: n for a, n in mesh.shape.items() if n > 1} == sizes
    assert len(set(mesh.devices.flat)) == 64


def test_only_data_crosses_the_network_between_slices(capsys):
    """Another axis over the slow network; a mesh of one slice on two; too few devices."""
    peer("libtpu")
    chips = dry_run.topology_devices("v5e:2x2", slices=2)
    placed = make_mesh(chips, data=4, tensor=2).devices
    assert [{d.slice_index for d in row.flat} for row in placed] == [{0}, {0}, {1}, {1}]
    with pytest.raises(ConfigError, match="only data crosses .* make data a multiple of 2"):
        make_mesh(chips, fsdp=8)
    with pytest.raises(ConfigError, match="needs 16 devices, but there are 8"):
        make_mesh(chips, data=2, fsdp=8)
    assert "--slices 2: these devices are in 1" in refused(capsys, "--slices", "2")


@pytest.mark.full
def test_what_a_larger_data_axis_sends_between_slices_has_no_formula(tmp_path):
    """A wrong number beside the right one."""
    peer("libtpu")
    done = command("--topology", "v5e:2x2", "--slices", 2, "--mesh", "data=4,fsdp=2", "--layers", 2,
                   "--d_model", 512, "--heads", 4, "--seq_len", 512, "--batch", 16, cwd=tmp_path)
    assert re.search(r"send between slices over data \(there is no formula", done.stdout), done


def test_bias_and_activation_and_dropout_and_sum_are_fused():
    """Activations that are written to memory and read again for the bias, GELU, dropout or the sum
    with the stream: there may be at most one such array for each of the two products."""
    peer("libtpu")
    mesh = make_mesh(devices=dry_run.topology_devices("v5e:2x2")[:1])

    def block(w, b, out, out_bias, x, seeds):
        h, = shard.columns(x, (w, b))
        y = shard.row((jax.nn.gelu(h), out)) + out_bias
        return x + shard.dropout(y, 0.1, seeds, 1)

    shapes = [(512, 2048), (1, 2048), (2048, 512), (512,), (4, 256, 512)]
    place = jax.NamedSharding(mesh, jax.P())
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    args.append(jax.ShapeDtypeStruct((4,), jnp.uint32, sharding=place))
    with jax.set_mesh(mesh):
        text = jax.jit(block).lower(*args).compile().as_text()
    entry = text[text.index("\nENTRY"):].split("\n}")[0]
    made = re.findall(r"= (?:bf16|f32)\[4,256,(?:512|2048)\]\S* ([\w-]+)\(", entry)
    made = [kind for kind in made if kind != "parameter"]
    assert made and set(made) == {"fusion"} and len(made) <= 2, made


def test_a_small_programs_numbers_are_not_all_zero():
    """memory 0.00 GiB, 0.00 Tflop, 0.0 ms, 161,635,550 tokens/s; other units for a large one, which
    the docs quote."""
    assert [dry_run._gib(2**30 * x) for x in (2.15, 0.29, 0.01)] == [
        "2.15 GiB", "0.29 GiB", "10.7 MB"]
    assert [dry_run.in_units(x, dry_run.FLOPS, 2) for x in (2.4e11, 2.4e8, 2.4e3)] == [
        "0.24 Tflop", "0.24 Gflop", "0.00 Mflop"]
    assert [dry_run.in_units(x, dry_run.TIMES) for x in (12.0, 1e-4, 9.8e-6)] == [
        "12,000.0 ms", "0.1 ms", "9.8 us"]


def read_size(text):
    """Bytes from a text like 1.5 MB."""
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def compiler_of(chips, changes, is_small=True):
    """An environment in which the compiler for these chips is found and fast."""
    if chips.startswith("v"):
        peer("libtpu")          # machine code of the worst kind; the programs are the same
        small = " --xla_tpu_scoped_vmem_limit_kib=4096"
        if not is_small or {"--experts", "--pack"} & {*changes}:        # (their kernels need more)
            small = ""
        return {"LIBTPU_INIT_ARGS": "--xla_msa_enable=false" + small}
    if "ZIGZAG_GPU" in os.environ:
        return {"PYTHONPATH": os.environ["ZIGZAG_GPU"]}
    peer("jax_cuda12_plugin")
    return {}


# The arithmetic includes a pipeline's idle ticks, equally busy experts, and two key heads on four
# devices. A TPU's kernel computes blocks of 512 (here one), and two of the five products of its
# backward pass twice.
@pytest.mark.full
@pytest.mark.parametrize("chips, mesh, changes, least, most", [
    slow("v5e:4x4", "fsdp=16", ("--remat", "full", "--pack", "documents"), 1.25, 1.35),
    slow("v5e:4x4", "fsdp=4,tensor=4", ("--remat", "selective", "--experts", 4), 1.0, 1.1),
    full("v5e:4x4", "data=2,pipe=2,tensor=4",
         ("--schedule", "1f1b", "--microbatches", 2, "--zero", 1), 3.2, 3.6),
    full("v5e:4x4", "fsdp=4,expert=4", ("--experts", 8), 1.0, 1.1),
    full("v5e:4x8", "fsdp=16,expert=2", ("--experts", 8, "--batch", 32), 1.0, 1.1),
    full("v5e:8x8", "fsdp=64", ("--batch", 64), 0.9, 1.1),
    slow("h100:1x2x8", "fsdp=4,tensor=4", (), 0.9, 1.0),
    slow("h100:1x1x8", "data=2,tensor=4",
         ("--kv_heads", 2, "--dtype", "bfloat16", "--pack", "documents"), 0.98, 1.05),
    full("h100:1x1x8", "data=2,fsdp=4", ("--accumulate", 2, "--remat", "full"), 1.0, 1.3),
    slow("v5e:2x4", "pipe=2,tensor=4",
         ("--microbatches", 4, "--remat", "selective", "--accumulate", 2), 1.2, 1.4),
    full("v5e:2x4", "expert=2,tensor=4", ("--experts", 8, "--kv_heads", 2), 1.05, 1.15),
    full("v5e:2x2", "fsdp=2,tensor=2", ("--batch", 64, "--remat", "full"), 1.2, 1.4),   # in strips
    full("v5e:2x2", "fsdp=2,tensor=2", (
        "--model", "transformer", "--window", 128, "--local_layers", "lg", "--attn_softcap", 30,
        "--pack", "documents"), 0.9, 1.1),
    full("v5e:2x2", "fsdp=2,seq=2", ("--pack", "documents", "--remat", "full"), 1.1, 1.4),
    full("h100:1x1x2", "fsdp=2", ("--model", "transformer", "--window", 128), 0.8, 1.0),
    full("v4:2x2x2", "fsdp=2,pipe=2,tensor=2", (), 1.5, 2.5),
    full("v4:2x2x2", "fsdp=8", ("--dtype", "float32"), 0.9, 1.1),
    full("v5e:2x4", "fsdp=2,pipe=2,tensor=2", ("--microbatches", 4), 1.1, 1.4),
    full("v5e:2x4", "pipe=2,tensor=4", ("--schedule", "1f1b", "--chunks", 2, "--microbatches", 4,
                                        "--layers", 8), 1.8, 2.6),
    full("v5e:2x4", "data=2,fsdp=8", ("--slices", 2), 1.0, 1.1),
    full("v5e:2x2", "fsdp=2,tensor=2", ("--optimizer", "muon"), 1.0, 1.4)])
def test_a_program_for_absent_chips_sends_what_is_expected(tmp_path, chips, mesh, changes, least,
                                                           most):
    """A compiler that turns a reduce-scatter into an all-reduce, say; a step without the kernel, or
    without the documents. Bytes of each kind and axis must agree to 2% (and the printed digits),
    except for scalars; and nothing is written."""
    done = command("--topology", chips, "--mesh", mesh, "--layers", 4, "--d_model", 512,
                   "--heads", 4, "--vocab_size", 2048, "--seq_len", 512, "--batch", 16, *changes,
                   cwd=tmp_path, env=compiler_of(chips, changes))
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.iterdir())
    rows = [(read_size(sent), read_size(expected) if expected else 0.0)
            for sent, expected in re.findall(
                r"^sends +([\d.]+ \w+) per device.*expected: (?:([\d.]+ \w+) in|none)",
                done.stdout, re.M)]
    rows += [(0.0, read_size(expected)) for expected in re.findall(
        r"^sends +nothing.*expected: ([\d.]+ \w+) in", done.stdout, re.M)]
    assert len(rows) >= (0 if "float32" in changes else 2 if chips == "h100:1x1x2" else 3)
    total = sum(sent for sent, _ in rows)
    for sent, expected in rows:
        assert abs(sent - expected) <= max(0.02 * expected, 0.01 * total), done.stdout
        assert abs(sent - expected) <= 0.03 * expected + 200, done.stdout
    kernel = "splash" if chips.startswith("v") else "cuDNN"
    has_kernel = re.search(f"^attend   .*by the {kernel} kernel", done.stdout, re.M)
    assert bool(has_kernel) == ("float32" not in changes)
    assert ("kernel, within documents" in done.stdout) == ("documents" in changes)
    assert done.stdout.count("(expected: ") == done.stdout.count("sends ") or "float32" in changes
    assert "it fits" in done.stdout and "mfu at most" in done.stdout
    share = float(re.search(r"([\d.]+) times the usual count", done.stdout)[1])
    assert least < share < most, done.stdout


# -------------------------------------------------------------------------------------------
# --bench

@pytest.mark.full
def test_bench_trains_and_keeps_nothing(tmp_path, text):
    """A folder left behind by a benchmark, which the next run would continue."""
    done = command(*SMALL, "--bench", "--mesh", "data=2", "--data", text, "--pack", "documents",
                   cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loader   a batch in [\d.]+ ms .* adds -?[\d.]+% to a step", done.stdout)
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert set(numbers) == {"tokens_per_second", "step_seconds", "model_flops_per_second",
                            "matmul_flops_per_second", "peak_bytes", "first_step_seconds"}
    assert all(value > 0 for value in numbers.values())
    assert numbers["tokens_per_second"] * numbers["step_seconds"] == pytest.approx(4 * 32, rel=1e-3)
    assert not list(tmp_path.iterdir())


# The sources train these in float32 with AdamW: RedCoast's table 1, on two GPUs of 10 GB, four of
# 40 GB, two and sixteen hosts of TPU v4; the notebooks' model with all three axes, on eight GPUs of
# 24 GB (they measured 8.5 GB). We compile for GPUs that the compiler knows, and compare the peak.
@pytest.mark.full
@pytest.mark.parametrize("chips, most, words", [
    ("h100:1x1x2", 10, "--model gpt2-large --mesh fsdp=2 --batch 2 --seq_len 1024"),
    ("h100:1x1x2", 10, "--model bart-large --mesh fsdp=2 --batch 2 --seq_len 1024"),
    ("h100:1x1x4", 40, "--model llama-7b --mesh fsdp=4 --batch 4 --seq_len 1024"),
    ("h100:1x1x4", 40, "--model gptj-6b --mesh fsdp=4 --batch 4 --seq_len 1024"),
    ("h100:1x1x8", 8.5, "--model 1.2b --mesh fsdp=2,pipe=2,tensor=2 --schedule 1f1b --batch 128 "
                        "--microbatches 16 --seq_len 1024"),
    ("v4:2x2x2", 32 * 1.0737, "--model t5-xxl --mesh fsdp=8 --batch 8 --seq_len 512"),
    ("v4:2x2x2", 32 * 1.0737, "--model opt-13b --mesh fsdp=8 --batch 8 --seq_len 1024"),
    ("v4:4x4x4", 32 * 1.0737, "--model opt-66b --mesh fsdp=16,tensor=4 --batch 64 --seq_len 512")])
def test_what_the_sources_train_fits_where_they_train_it(tmp_path, chips, most, words):
    """A model that only fits when it is compiled for larger devices; bytes that no formula has."""
    done = command("--topology", chips, "--dtype", "float32", "--remat", "full", *words.split(),
                   file="shard.py", cwd=tmp_path, env=compiler_of(chips, (), False))
    assert done.returncode == 0, done.stderr[-2000:]
    peak = float(re.search(r"peak ([\d.]+) GiB a device", done.stdout)[1])
    assert peak * 1.0737 < most, done.stdout[-2000:]
    rows = re.findall(r"^sends +([\d.]+ [MG]B) per device.*expected: ([\d.]+ [MG]B|none)",
                      done.stdout, re.M)
    assert len(rows) >= (2 if chips[0] == "h" else 0), done.stdout      # (no formulas for v4)
    for sent, expected in rows:
        assert abs(read_size(sent) / read_size(expected) - 1) < 0.03, done.stdout
