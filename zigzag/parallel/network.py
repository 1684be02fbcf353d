"""`Network`: everything the machinery needs to know about a kind of model. That is a config class,
a weight table, a loss, and functions that answer questions about a config. model.py defines the
plain decoder; published/ defines all other networks.

The table and the loss determine the weights' initial values, counts and sharding.

    network_of          find the network for a config
    network_of_record   find a run's network from its config.json
    config_of_run       read the config of a run's network
    describe            describe which network a config uses, and why
    network_of_loss            find the network whose built-in loss a function is
"""

import dataclasses
import functools
import json
import sys
from typing import Any, Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.core.errors import (
    ConfigError,
    check_length,
    nearest_divisor,
)
from zigzag.core.mesh import is_spec, make_mesh, spec_axes, with_shardings
from zigzag.core.options import check_values, flag, options, without
from zigzag.core.parts import part
from zigzag.disk.checkpoint import run_config, run_record
from zigzag.parallel import low_rank
from zigzag.parallel.remat import remat_of
from zigzag.parallel.rotary import check_rotary, scaling_type
from zigzag.parallel.rule import plan_sharding
from zigzag.parallel.table import (
    attention_flops,
    first_values,
    padded,
    parameters,
    product_flops,
)

Params = dict[str, Any]

# {name for --model: fields of model.Config}: model.py's block in three sizes: tiny, as large as
# GPT-2 small, and 1.2 billion parameters.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "124m": dict(layers=12, d_model=768, heads=12, d_ff=2048, vocab_size=50257, seq_len=1024,
                 tied=True),
    "1.2b": dict(layers=24, d_model=2048, heads=16, d_ff=5504, vocab_size=32000, seq_len=2048)}


def resized(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a preset's fields, minus the fields that depend on a width in `given`."""
    dropped = {"kv_heads", "head_dim"} if {"d_model", "heads"} & given.keys() else set()
    dropped |= {"d_ff"} if "d_model" in given else set()
    return without(fields, *dropped)


@dataclasses.dataclass(frozen=True)
class ComputeOptions:
    """How to compute a network. These options don't change results, except for rounding and which
    weights are trained. This is the base class of every network's config."""
    # training
    dtype: str = flag("", one_of=("", "float32", "bfloat16", "float16"), same=True)
                                  # compute in float32, bfloat16 or float16 (a loss scale follows
                                  # from the gradients); empty: float32 on CPU, else bfloat16
    # mesh
    remat: str = flag("none", check=remat_of)
                                  # activation checkpointing, what to recompute in the backward
                                  # pass: none, selective, full, full:0.5 (half of the layers),
                                  # attention, mlp, attention,mlp; or offload: keep each layer's
                                  # input in host memory
    microbatches: int = flag(1, least=1)
                                  # micro-batches: cut a device's rows into this many parts for
                                  # the pipeline
    schedule: str = flag("gpipe", one_of=("gpipe", "interleaved", "1f1b"))
                                  # pipeline schedule: gpipe, interleaved or 1f1b
    # model
    lora_rank: int = flag(0, same=True)     # LoRA: train only adapters of this rank; 0: all weights
    # mesh (rare)
    kernel: bool = True           # use the device's own (flash) attention kernel, if it has one
    chunks: int = flag(1, least=1, beside="schedule")
                                  # groups of consecutive layers per stage, unless it's gpipe
    overlap: bool = False         # send over tensor in parts, multiplying each part while the next
                                  # one travels
    sum_dtype: str = flag("", one_of=("", "float32"))
                                  # float32: fsdp sums gradients in float32, not dtype; sends more
    expert_room: float = flag(1.25, least=0.01)
                                  # room for tokens on their way to experts, as a multiple of what
                                  # equally likely experts need; tokens that don't fit travel in
                                  # further rounds
    # training (rare)
    accuracy: bool = False        # also log the fraction of targets that the model ranks first
    # model (rare)
    published: str = flag("", same=True, part="published")
                                  # config.json of the published model behind this one


def with_hits(total: Any, count: Any, hits: Any, c: Any) -> tuple:
    """Return what a network's loss returns: (sum, count), plus, with --accuracy, the total weight
    of the targets it predicted."""
    return (total, count, {"accuracy": hits}) if c.accuracy else (total, count)


def model_type(published: str) -> Any:
    """Return the model_type in a published model's config.json, "" if the text is empty, or None if
    it isn't a config.json."""
    try:
        return json.loads(published or '{"model_type": ""}')["model_type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def check_published(c: Any) -> None:
    """Reject a `published` that isn't a config.json; another program may have written the run."""
    if not isinstance(model_type(c.published), str):
        raise ConfigError(f"--published {c.published:.80}: expected the config.json of a published "
                          f"model, with its model_type")


def facts_of_network(config: type) -> list[str]:
    """Return the options of a network's config that must stay the same when a run resumes: all
    except the ComputeOptions fields that don't change results."""
    return [name for name, option in options(config).items()
            if option.same or name not in options(ComputeOptions)]


# The options that may change when a run resumes.
COMPUTED = tuple(name for name, option in options(ComputeOptions).items() if not option.same)


def check_heads(c: Any) -> None:
    """Reject a d_model that isn't divisible by the heads, unless head_dim is set."""
    if not c.head_dim and c.d_model % c.heads:
        near = nearest_divisor(c.d_model, c.heads)
        raise ConfigError(f"--d_model {c.d_model} does not divide by --heads {c.heads}; the "
                          f"nearest that does is --heads {near}, or give --head_dim")


# Rows (option, whether its value is invalid, why) for refuse_rows.
Rows = list[tuple[str, Any, str]]


def refuse_rows(c: Any, rows: Rows) -> None:
    """Raise a ConfigError for the first invalid option in `rows`."""
    for name, is_wrong, why in rows:
        if is_wrong:
            raise ConfigError(f"--{name} {getattr(c, name)}: {why}")


def of_decoders(c: Any) -> Rows:
    """Return the checks on option values that all decoders share."""
    return [
        ("heads", c.heads % (c.kv_heads or c.heads), f"does not divide by --kv_heads {c.kv_heads}"),
        ("rope_theta", not c.rope_theta > 1, "must be above 1"),
        ("dropout", c.dropout >= 1, "expected at least 0 and below 1"),
        ("experts_per_token", 0 < c.experts < c.experts_per_token,
         f"there are only --experts {c.experts}")]


def check_decoder(c: Any) -> None:
    """Reject options that the plain decoder doesn't support."""
    check_values(c)
    check_published(c)
    check_heads(c)
    head_dim, kind = c.head_dim or c.d_model // c.heads, scaling_type(c.rope_scaling)
    refuse_rows(c, [
        *of_decoders(c),
        ("head_dim", head_dim % 2 or head_dim > 2**16,
         f"rotary positions need an even one, of at most {2**16}, not {head_dim}"),
        ("rope_scaling", kind not in ("default", "linear", "llama3"),
         "the plain decoder has linear and llama3; --model transformer has the others")])
    check_rotary(c, head_dim)


def check_stack(c: Any, mesh: Any, time_of_stages: bool = True, time_is_padded: bool = False
                ) -> None:
    """Reject a layer stack that the mesh can't split. The tensor axis is never a reason: a weight
    it doesn't divide stays whole. `time_of_stages` means that the stages share the head's tokens;
    `time_is_padded` means that the network pads sequences, so any length works."""
    sizes = mesh.shape
    if c.experts % sizes["expert"]:
        raise ConfigError(f"mesh axis expert={sizes['expert']} does not divide --experts "
                          f"{c.experts}; the nearest that does is "
                          f"expert={nearest_divisor(c.experts, sizes['expert'])}")
    stages, ring = sizes["pipe"], sizes["seq"]
    with_chunks = f" x --chunks {c.chunks}" if c.chunks > 1 else ""
    check_length(f"pipe={stages}{with_chunks}", "layers", c.layers, stages * c.chunks)
    if time_is_padded:
        return
    if stages > 1 and time_of_stages:
        check_length(f"pipe={stages}", "seq_len", c.seq_len, stages * ring,
                     " (stages split the head's work along the sequence)")
    if ring > 1:
        check_length(f"seq={ring}", "seq_len", c.seq_len, 2 * ring,
                     " (each device has an early and a late part)")


def check_tensor(c: Any, mesh: Any, specs: Any) -> None:
    """Reject a tensor axis that splits none of the model's weights, because each device along it
    would do all of the work. `specs` are the weights' specs."""
    size = mesh.shape["tensor"]
    if size > 1 and not any("tensor" in spec_axes(spec)
                            for spec in jax.tree.leaves(specs, is_leaf=is_spec)):
        heads = getattr(c, "heads", 1)
        raise ConfigError(f"mesh axis tensor={size} divides no weight of this model, nor its "
                          f"{heads} heads, so each device would do all of the work; the nearest "
                          f"that divides the heads is tensor={nearest_divisor(heads, size)}")


class CacheLayer(NamedTuple):
    """The shape of a single layer's cache."""
    widths: dict[str, int]  # {array: its head width}
    heads: int              # the number of heads in each array
    window: int = 0         # the maximum number of keys a query sees; 0: all earlier ones
    source: tuple[str, ...] = ()    # source arrays that it also holds; encode_source computes them,
                            # and their names begin with cross
    weights: tuple[str, ...] = ("wq", "wk", "wv")   # the weights that produce the heads


class Traffic(NamedTuple):
    """What a decoder's blocks send over tensor, for forecast/traffic.py."""
    pairs: int = 2          # per layer, pairs of a gather into a block and a reduction out of it
    beside: bool = False    # whether an expert block has a second branch besides the experts
    head_norms: bool = False    # whether queries and keys have a norm over all heads


def expert_share(config: Any) -> float:
    """Return the fraction of the experts that each token visits, or 1 if there are none."""
    experts = getattr(config, "experts", 0)
    return config.experts_per_token / experts if experts else 1.0


def _none(config):
    return None


# {name: network} for every network imported so far, from model.py and published/.
NETWORKS: dict[str, "Network"] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A kind of model: its name, config class, weights and functions. A comment a, b -> c describes
    a function of (a, b) that returns c."""
    name: str                           # the name in a run's config.json
    config: type                        # the config class, a subclass of ComputeOptions
    weight_table: Callable              # config -> a tree of table.Weight
    loss: Callable                      # params, batch, config[, specs] -> sum, count[, others]
    batch_shapes: Callable              # config, rows -> shapes of a batch
    apply: Callable | None = None       # params, tokens, config, ... -> logits: `forward`, below
    families: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #                                     {model_type: how to read and write published models}
    check: Callable = check_stack       # config, mesh: rejects a config that the mesh can't split

    # Generation: None if the network doesn't generate text.
    extend: Callable | None = None      # a decoding step with a cache; see model.extend
    head_logits: Callable | None = None     # params, x [B, T, D], config -> logits [B, T, V]
    cache_layer: Callable | None = None     # config, i -> layer i's CacheLayer
    encode_source: Callable | None = None   # params, source, config, specs -> arrays for the caches
    gives: Callable = lambda config: "text"     # config -> its output; only "text" can generate
    max_positions: Callable = lambda config: sys.maxsize    # config -> the number of positions
    decoding_length: Callable = lambda config, tokens, slots: 0     # -> the length that the rotary
    #                                     scaling may depend on
    source_shape: Callable = _none      # config -> shape of a row for its encoder; (T,) means text
    source_ids: Callable = lambda config: ()    # config -> placeholder ids for the source, at the
    #                                     start of each row
    source_text: Callable = lambda config: ()   # config -> placeholder ids for the source, at the
    #                                     start of the text that its encoder also reads
    decoder_of: Callable | None = None  # a weight tree -> the same tree with the decoder's
    #                                     weights at the top level; None: they already are

    # Training
    limits: Callable = lambda config: {"tokens": config.vocab_size, "targets": config.vocab_size}
    #                                     config -> {array of a batch: upper bound on its ids}
    trained: tuple[str, ...] = ("seq_len", "dropout", "balance", "router_z")
    #                                     options that fine-tuning may change
    block_traffic: Callable = _none     # config -> Traffic, or None if there's no formula for it
    flops: Callable | None = None       # config, tokens, table -> training FLOPs; None: use the
    #                                     formula for decoders
    couples_rows: bool = False          # whether its loss compares a batch's rows with each other
    why: Callable = lambda config: ""   # config -> text: why this network, not the plain decoder

    def __post_init__(self) -> None:
        NETWORKS.setdefault(self.name, self)    # importing a network registers it

    def table(self, config: Any) -> Params:
        """Return the full weight table, with adapters if config.lora_rank is above 0."""
        return low_rank.with_adapters(self.weight_table(config), config.lora_rank)

    def init(self, config: Any, key: Array) -> Params:
        """Return new float32 weights, which depend on the key and the paths, not on the mesh."""
        table = self.table(config)
        if any(0 in w.shape for w in jax.tree.leaves(table)):
            raise ConfigError("vocab_size is 0: give data that set it, or --vocab_size")
        return first_values(table, key)

    def weight_shapes(self, config: Any) -> Params:
        return jax.eval_shape(lambda: self.init(config, jax.random.key(0)))

    def forward(self, params: Params, tokens: Array | None, config: Any, **more: Any) -> Array:
        """Return the logits [B, T, V] for tokens [B, T], or [T, V] for a single row [T]. `more` are
        the network's other input arrays (source, mask, positions ...) or None."""
        more = {name: x for name, x in more.items() if x is not None}
        if tokens is not None and (tokens := jnp.asarray(tokens)).ndim == 1:
            more = {name: jnp.asarray(x)[None] for name, x in more.items()}
            return self.forward(params, tokens[None], config, **more)[0]
        if "source" in more and self.source_shape(config) is None:
            raise ConfigError("this model has no encoder: give it no source")
        return self.apply(params, tokens, config, **more)

    def mesh_axes(self, config: Any) -> Params:
        """Return, for each weight, the mesh axis that its row names for each dimension, or ''."""
        return jax.tree.map(lambda w: w.mesh_axes, self.table(config))

    def parameters(self, config: Any) -> tuple[int, int]:
        """Return (the number of parameters, how many of them each token visits)."""
        return parameters(self.table(config), padded(config.vocab_size) - config.vocab_size,
                          expert_share(config))

    def training_flops(self, config: Any, tokens: int) -> float:
        """Return the FLOPs to train on that many tokens."""
        c, table = config, self.table(config)
        if self.flops:
            return self.flops(c, tokens, table)
        products = product_flops(table, expert_share(c), getattr(c, "tied", False))
        return tokens * (products + attention_flops(
            c.layers * c.seq_len, c.heads, c.head_dim, c.head_dim))

    def cache_layers(self, config: Any) -> list[CacheLayer]:
        return [self.cache_layer(config, i) for i in range(config.layers)]

    # Weights on a mesh

    def plan_weights(self, config: Any, mesh: Any, **options: Any) -> Params:
        """Return a rule.Decision for each weight: how the mesh splits it, and why."""
        return plan_sharding(
            lambda p, b: self.loss(p, b, config)[:2], self.weight_shapes(config),
            self.batch_shapes(config, 1), mesh=mesh, mesh_axes=self.mesh_axes(config),
            **options)

    def weight_specs(self, config: Any, mesh: Any) -> Params:
        return jax.tree.map(lambda d: d.spec, self.plan_weights(config, mesh))

    def places(self, config: Any, mesh: Any = None) -> Params:
        """Return the weights' shapes with their shardings on the mesh (None: on one device)."""
        mesh = mesh or make_mesh(devices=jax.devices()[:1])
        specs = self.weight_specs(config, mesh) if mesh.size > 1 else None
        return with_shardings(self.weight_shapes(config), specs, mesh)


def network_of(config: Any) -> Network:
    """Return the network for a config (a network's or a run's). If several networks share the
    config class, pick the one that has the published model's family, otherwise the first."""
    config = getattr(config, "network", config)
    known = [network for network in NETWORKS.values() if network.config is type(config)]
    if not known:
        raise TypeError(f"{type(config)} is not the Config of a registered network")
    kind = model_type(config.published) if len(known) > 1 else ""
    return next((network for network in known if kind in network.families), known[0])


def network_of_record(record: dict[str, Any]) -> Network:
    """Return a run's network, given its config.json."""
    name = record.get("network")
    if name not in NETWORKS:        # importing the part registers its networks
        part("published", f"config.json: nothing here defines the network {name!r:.80}")
    if name not in NETWORKS:
        raise ConfigError(f"config.json: the network {name!r:.80} is not known; expected one of "
                          f"{', '.join(NETWORKS)}")
    return NETWORKS[name]


def config_of_run(folder: str, flag: str = "--run") -> Any:
    """Read the config of a run's network."""
    return run_config(folder, network_of_record(run_record(folder, flag)).config, flag)


def describe(config: Any) -> str:
    """Return a description of which network a config uses, and why."""
    network, config = network_of(config), getattr(config, "network", config)
    place = f"{network.name} ({network.loss.__module__.replace('.', '/')}.py)"
    return f"{place}: {why}" if (why := network.why(config)) else place


def network_of_loss(config: Any, loss: Callable) -> Network | None:
    """Return the config's network if `loss` is that network's own, as run/task.py makes it. The
    tests compare such a loss with a single device. Return None for any other loss, even a wrapper:
    that is a custom loss, and a run checks it against a single device before the first step."""
    network = network_of(config)
    return network if isinstance(loss, functools.partial) and loss.func is network.loss else None


def flops_of_update(config: Any) -> float:
    """Return the FLOPs per update of a run with this config."""
    return network_of(config).training_flops(config.network, config.batch * config.network.seq_len)
