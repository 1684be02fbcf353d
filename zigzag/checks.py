"""What is refused before anything is compiled, with the numbers, and the nearest that would do.

    check_config      values of the configuration, each by itself and beside others
    check_batch       a batch that does not divide over the mesh
    check_model       a transformer that pipe, seq or expert cannot split
    check_overrides   --override, of any weights
    check_corpus      data that is too short, or has other ids
"""

import dataclasses
import re
from typing import Any, Sequence

from jax.sharding import PartitionSpec as P

from zigzag.errors import (
    ConfigError,
    check_at_least,
    did_you_mean,
    fill_in,
    nearest_divisor,
    nearest_multiple,
)
from zigzag.mesh import BATCH_AXES, by_path, entry_axes, mesh_sizes, row_groups
from zigzag.positions import check_rotary
from zigzag.rule import apply_overrides, parse_overrides

MODEL_ONE_OF = {
    "dtype": ("", "float32", "bfloat16"), "remat": ("none", "selective", "full"),
    "schedule": ("gpipe", "interleaved", "1f1b"), "sum_dtype": ("", "float32"),
    "norm": ("rms", "layer"), "norm_place": ("pre", "post", "sandwich"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu"), "router": ("softmax", "sigmoid"),
    "positions": ("rotary", "learned", "sinusoidal", "alibi", "alibi16", "none")}
BIASES = ("qkv", "out", "mlp", "head")
ONE_OF = {"step": ("shard_map", "jit"), "verify": ("on", "off"), "optimizer": ("adamw", "muon")}


def check_model_config(c: Any) -> None:
    """Fill in what follows from the rest of a model.Config, and refuse what no model can be."""
    check_at_least(c, layers=1, d_model=1, heads=1, kv_heads=0, head_dim=0, d_ff=0, vocab_size=0,
                   seq_len=1, experts=0, experts_per_token=1, shared_experts=0, balance=0,
                   router_z=0, microbatches=1, chunks=1, norm_eps=0, rotary_dim=0, position_rows=0,
                   position_offset=0, window=0, local_theta=0, embed_dim=0, embed_scale=0,
                   attn_scale=0, attn_softcap=0, logit_softcap=0, q_rank=0, kv_rank=0,
                   v_head_dim=0, expert_d_ff=0, dense_layers=0, expert_groups=1,
                   groups_per_token=1, lora_rank=0)
    if not c.head_dim and c.d_model % c.heads:
        near = nearest_divisor(c.d_model, c.heads)
        raise ConfigError(f"--d_model {c.d_model} does not divide by --heads {c.heads}; the "
                          f"nearest that does is --heads {near}, or give --head_dim")
    fill_in(c, kv_heads=c.heads, head_dim=c.d_model // c.heads,
            d_ff=-(-c.d_model * 8 // (3 * 64)) * 64)
    if c.positions == "learned":
        fill_in(c, position_rows=c.seq_len + c.position_offset)
    if c.heads % c.kv_heads:
        raise ConfigError(f"--heads {c.heads} does not divide by --kv_heads {c.kv_heads}")
    turned = c.rotary_dim or c.head_dim
    if c.positions == "rotary" and (turned % 2 or turned > min(c.head_dim, 2**16)):
        raise ConfigError(f"--head_dim {c.head_dim} and --rotary_dim {c.rotary_dim}: rotary "
                          f"positions need an even part of a head, of at most {2**16}")
    if not 0 <= c.dropout < 1:
        raise ConfigError(f"--dropout {c.dropout}: at least 0 and below 1")
    if not c.rope_theta > 1:
        raise ConfigError(f"--rope_theta {c.rope_theta}: must be above 1")
    if c.positions == "rotary":
        check_rotary(c)
    for name, known in MODEL_ONE_OF.items():
        if (value := getattr(c, name)) not in known:
            raise ConfigError(f"--{name} {value}: expected {', '.join(filter(None, known))}"
                              + did_you_mean(value, known))
    if c.positions == "learned" and c.seq_len + c.position_offset > c.position_rows:
        raise ConfigError(f"--seq_len {c.seq_len}: there are learned positions for only "
                          f"{c.position_rows - c.position_offset} tokens (--position_rows)")
    if wrong := set(filter(None, c.biases.split(","))) - set(BIASES):
        raise ConfigError(f"--biases {c.biases}: {min(wrong)} is not among {', '.join(BIASES)}")
    if set(c.local_layers) - set("lg"):
        raise ConfigError(f"--local_layers {c.local_layers}: expected a letter for each layer, l "
                          f"(with the window) or g (without)")
    _check_parts(c)


def _check_parts(c):
    """Refuse parts of a model that do not go together."""
    if c.experts and c.experts_per_token > c.experts:
        raise ConfigError(f"--experts_per_token {c.experts_per_token}: there are only --experts "
                          f"{c.experts}")
    for name in ("shared_experts", "dense_layers"):
        if getattr(c, name) and not c.experts:
            raise ConfigError(f"--{name} {getattr(c, name)}: give --experts too; a dense MLP is as "
                              f"wide as --d_ff says")
    if c.dense_layers >= c.layers:
        raise ConfigError(f"--dense_layers {c.dense_layers}: must be below --layers {c.layers}")
    if c.experts % c.expert_groups or c.groups_per_token > c.expert_groups:
        raise ConfigError(f"--expert_groups {c.expert_groups}: must divide --experts {c.experts}, "
                          f"and be at least --groups_per_token {c.groups_per_token}")
    if c.expert_groups > 1 and c.experts < 2 * c.expert_groups:
        raise ConfigError(f"--expert_groups {c.expert_groups}: a group is chosen by its best two "
                          f"experts; there are only --experts {c.experts}")
    if c.experts and not c.gated:
        raise ConfigError("--gated false: experts are gated")
    if c.parallel and c.norm_place != "pre":
        raise ConfigError(f"--norm_place {c.norm_place}: a --parallel block has "
                          f"its norms before it")
    if c.parallel_norms not in (1, 2):
        raise ConfigError(f"--parallel_norms {c.parallel_norms}: expected 1 or 2")
    if c.kv_rank and (c.parallel or c.qk_norm or c.positions != "rotary"
                      or c.rotary_dim in (0, c.head_dim) or "qkv" in c.biases
                      or c.kv_heads != c.heads):
        raise ConfigError(f"--kv_rank {c.kv_rank}: latent attention has rotary positions in a part "
                          f"of a head (--rotary_dim below --head_dim), as many --kv_heads as "
                          f"--heads, no --qk_norm, no biases of qkv, and no --parallel block")
    if c.local_theta and not c.window:
        raise ConfigError(f"--local_theta {c.local_theta}: is for layers with a --window")
    if c.window > 2**30:
        raise ConfigError(f"--window {c.window}: expected at most {2**30}")
    if c.q_rank and not c.kv_rank:
        raise ConfigError(f"--q_rank {c.q_rank}: give --kv_rank too")
    if c.v_head_dim not in (0, c.head_dim) and not c.kv_rank:
        raise ConfigError(f"--v_head_dim {c.v_head_dim}: another width than --head_dim is for "
                          f"latent attention (--kv_rank)")


def check_config(c: Any) -> None:
    """Refuse what a train.Config cannot be, beyond what model.Config refuses."""
    check_at_least(c, steps=1, batch=1, accumulate=1, warmup=0, shards=0, zero=0, save_every=0,
                   eval_every=0, keep=1, max_skipped=1, processes=0, process_id=-1, patience=1,
                   profile=0, lr=0, weight_decay=0, clip=1e-30, seed=0, fsdp_min=0)
    for name, known in ONE_OF.items():
        if (value := getattr(c, name)) not in known:
            raise ConfigError(f"--{name} {value}: expected {' or '.join(known)}"
                              + did_you_mean(value, known))
    if c.batch % c.accumulate:
        raise ConfigError(f"--batch {c.batch} does not divide into --accumulate {c.accumulate} "
                          f"parts")
    if c.sum_dtype and c.step == "jit":
        raise ConfigError(f"--sum_dtype {c.sum_dtype}: with --step jit the compiler chooses; give "
                          f"--step shard_map")
    if "://" in c.out:
        folder = c.out.split("://")[1].split("/")[-1] or "out"
        raise ConfigError(f"--out {c.out}: object stores are not supported yet; give a folder that "
                          f"every process sees, {folder} for example")
    if c.chunks > 1 and c.schedule != "interleaved":
        raise ConfigError(f"--chunks {c.chunks}: only --schedule interleaved has more than one")
    if c.schedule == "interleaved" and c.chunks == 1:
        raise ConfigError("--schedule interleaved: give --chunks, of at least 2")
    if c.zero not in (0, 1):
        raise ConfigError(f"--zero {c.zero}: expected 0, or 1 (optimizer state split over data); "
                          f"for weights and gradients too, --mesh fsdp=N")
    parse_overrides(c.override)
    if c.mesh != "auto":
        mesh_sizes(c.mesh, c.shards)
    _check_hosts(c)


def _check_hosts(c):
    given = bool(c.coordinator), c.processes > 0, c.process_id >= 0
    if any(given) and not all(given):
        raise ConfigError("several processes need all of --coordinator HOST:PORT, --processes N "
                          "and --process_id I (from 0), or --distributed alone where SLURM, Open "
                          "MPI or a TPU pod knows them")
    if all(given) and c.distributed:
        raise ConfigError("--distributed finds out by itself what --coordinator says: give one of "
                          "them")
    if c.coordinator and not (re.fullmatch(r"\S+:\d{1,5}", c.coordinator)
                              and 0 < int(c.coordinator.rsplit(":", 1)[1]) < 2**16):
        raise ConfigError(f"--coordinator {c.coordinator}: expected HOST:PORT, where process 0 "
                          f"listens")
    if all(given) and c.process_id >= c.processes:
        raise ConfigError(f"--process_id {c.process_id}: with --processes {c.processes} they are 0 "
                          f"to {c.processes - 1}")


def check_batch(c: Any, mesh: Any) -> None:
    """Refuse a batch that does not divide over the mesh, of any loss."""
    sizes, groups = mesh.shape, row_groups(mesh)
    parts = groups * c.accumulate
    if c.batch % parts:
        axes = " x ".join(a for a in BATCH_AXES if sizes[a] > 1) or "data"
        raise ConfigError(f"--batch {c.batch} does not divide among {groups} groups of devices "
                          f"({axes}) x {c.accumulate} accumulated parts = {parts}; the nearest "
                          f"that does is --batch {nearest_multiple(parts, c.batch)}")
    idle = [f"{a}={sizes[a]}" for a in ("pipe", "seq") if sizes[a] > 1]
    if c.step == "jit" and idle:
        raise ConfigError(f"mesh axis {' and '.join(idle)}: with --step jit a compiler splits no "
                          f"work over it, and every device would do all of it; give its devices "
                          f"to data, fsdp, expert or tensor")
    rows = c.batch // parts
    if rows % c.microbatches:
        raise ConfigError(f"--microbatches {c.microbatches} does not divide the {rows} rows that a "
                          f"device has at a time; the nearest that does is --microbatches "
                          f"{nearest_divisor(rows, c.microbatches)}")


def check_model(c: Any, mesh: Any) -> None:
    """Refuse a transformer that the mesh cannot split. (What tensor does not divide is whole.)"""
    sizes = mesh.shape
    if c.dense_layers and sizes["pipe"] > 1:
        raise ConfigError(f"mesh axis pipe={sizes['pipe']}: stages have layers that are alike, and "
                          f"--dense_layers {c.dense_layers} are not like the others; give its "
                          f"devices to data, fsdp, expert or tensor")
    if c.experts % sizes["expert"]:
        raise ConfigError(f"mesh axis expert={sizes['expert']} does not divide --experts "
                          f"{c.experts}; the nearest that does is "
                          f"expert={nearest_divisor(c.experts, sizes['expert'])}")
    stages, ring, chunks = sizes["pipe"], sizes["seq"], c.chunks
    with_chunks = f" x --chunks {chunks}" if chunks > 1 else ""
    _check_length(f"pipe={stages}{with_chunks}", "layers", c.layers, stages * chunks)
    if stages > 1:
        _check_length(f"pipe={stages}", "seq_len", c.seq_len, stages * ring,
                      " (what follows the layers is shared out by time)")
    if ring > 1:
        _check_length(f"seq={ring}", "seq_len", c.seq_len, 2 * ring,
                      " (each device has an early and a late part)")


def _check_length(axis, name, value, parts, why=""):
    if value % parts:
        raise ConfigError(f"mesh axis {axis}: --{name} {value} does not divide into {parts}{why}; "
                          f"the nearest that does is --{name} {nearest_multiple(parts, value)}")


def check_overrides(texts: Sequence[str], params: Any, mesh: Any,
                    others: Sequence[tuple[str, P]] = ()) -> list[tuple[str, P]]:
    """--override, and `others` that code gave, as the rule takes them."""
    overrides = [*parse_overrides(texts), *others]
    for pattern, spec in overrides:
        for entry in spec:
            if len(entry_axes(entry)) > 1:
                raise ConfigError(f"override {pattern!r}: {'+'.join(entry)} on one dimension; give "
                                  f"one axis a dimension")
    shapes = {path: leaf.shape for path, leaf in by_path(params).items()}
    apply_overrides(shapes, overrides, dict(mesh.shape))
    return overrides


def check_corpus(config: Any, corpus: Any) -> Any:
    """Refuse a corpus that this configuration cannot learn from. Gives the configuration with the
    corpus' vocabulary."""
    ids = corpus.tokenizer.vocab_size
    if config.vocab_size and config.vocab_size < ids:
        raise ConfigError(f"--vocab_size {config.vocab_size}: the data has {ids} ids")
    if len(corpus.train) <= config.seq_len:
        raise ConfigError(f"--seq_len {config.seq_len}: the data has only {len(corpus.train)} "
                          f"tokens to learn from; give more data or a --seq_len below "
                          f"{len(corpus.train)}")
    return dataclasses.replace(config, vocab_size=config.vocab_size or ids)
