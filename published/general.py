"""The general transformer's options, their derived values, and the combinations that `check`
rejects.

Each field of Config is an option of transformer.py and a flag of train.py. The comment next to it
is the flag's help text.
"""

import dataclasses
import math
from typing import Any

import jax
from jax import Array

from published import record, stems
from published.llama import PLAIN_OPTIONS
from published.record import Fields, Record, as_config
from zigzag.core.errors import ConfigError, fill_in
from zigzag.core.options import check_values, flag
from zigzag.parallel.network import (
    ComputeOptions,
    check_heads,
    check_published,
    of_decoders,
    refuse_rows,
)
from zigzag.parallel.rotary import check_rotary, scaling_type

Batch = dict[str, Array]
Shapes = dict[str, jax.ShapeDtypeStruct]    # of a batch


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """A model's options. Each field is also a flag; 0 often means that other fields set it."""
    layers: int = flag(4, least=1)  # number of layers
    d_model: int = flag(128, least=1)  # width of the residual stream
    heads: int = flag(8, least=1)  # query heads
    kv_heads: int = 0             # key/value heads; 0: same as heads
    head_dim: int = 0             # width of a head; 0: d_model / heads
    d_ff: int = 0                 # width of the MLP; 0: 8/3 of d_model, up to a multiple of 64
    vocab_size: int = 0           # ids in the vocabulary; 0: as many as the data's tokenizer has
    seq_len: int = flag(128, least=1)  # tokens in a training example: the context length
    tied: bool = False            # one table for both the token embedding and the head
    parallel_block: bool = False  # attention and MLP read the same norm and are added together
    parallel_norms: int = flag(1, one_of=(1, 2))
                                  # norms of a parallel block; 2: the MLP has its own
    causal: bool = True           # tokens can't see later tokens; false (an encoder): they see all
    encoder_layers: int = 0       # layers of an encoder that the decoder attends to; 0: no encoder
    encoder_heads: int = 0        # heads of the encoder; 0: same as --heads
    encoder_d_ff: int = 0         # width of the encoder's MLP; 0: --d_ff
    source_len: int = 0           # tokens that the encoder reads per example; 0: --seq_len
    stem: str = flag("tokens", one_of=("tokens", "patches", "frames"))
                                  # input: tokens, patches (of images) or frames (of sound)
    image_size: int = flag(224, least=1)  # side of an image, in pixels
    patch_size: int = flag(16, least=1)  # side of a patch, in pixels
    channels: int = flag(3, least=1)  # numbers per pixel, or per frame of sound
    token_types: int = 0          # number of token types, each with its own embedding; 0: none
    task_types: int = 0           # number of task types, each with its own embedding; 0: none
    head: str = flag("tokens", one_of=("tokens", "masked", "classes", "none"))
                                  # prediction: tokens, masked (tokens, with BERT's head), classes
                                  # (one per row) or none
    labels: int = 0               # number of classes; 1: predict a number per row (regression)
    pool: str = flag("first", one_of=("first", "last", "mean"))
                                  # input of the classifier: first or last (token), or mean (of
                                  # patches)
    pool_dense: bool = False      # a dense layer with tanh before the classifier
    head_scale: float = 0.0       # factor on the head's input; 0: none
    layer_groups: int = 0         # number of groups of layers that share weights; 0: each layer has
                                  # its own
    layer_scale: bool = False     # a learned factor on the output of attention and of the MLP
    residual_scale: float = flag(1.0, least=-math.inf)
                                  # factor on the output of attention and of the MLP
    norm: str = flag("rms", one_of=("rms", "layer"))  # rms, or layer (LayerNorm with a bias)
    norm_eps: float = 1e-6        # epsilon of the norms
    norm_place: str = flag("pre", one_of=("pre", "post", "out", "sandwich"))
                                  # norms: pre, post (after the sum), out (on the output of
                                  # attention and MLP, before the sum) or sandwich (pre and out)
    embed_norm: bool = False      # a norm after the embedding
    qk_norm: bool = False         # RMSNorm of every query and key head
    qk_norm_wide: bool = False    # qk_norm over all heads of a token together
    activation: str = flag("silu", one_of=("silu", "gelu", "gelu_tanh", "quick_gelu", "relu"))
                                  # activation of the MLP: silu, gelu, gelu_tanh, quick_gelu or relu
    gated: bool = True            # a gated MLP: the activation multiplies a second product
    biases: str = ""              # which products have a bias, comma-separated: embed, qkv (or
                                  # qv), out, mlp, head
    positions: str = flag("rotary",
        one_of=("rotary", "learned", "fixed", "sinusoidal", "alibi", "alibi16", "none"))
                                  # rotary, learned, fixed (a table, not trained), sinusoidal,
                                  # alibi, alibi16 (in bfloat16) or none
    relative: str = flag("", one_of=("", "buckets", "grid"))
                                  # learned distance bias on the scores: buckets (T5), grid (BEiT)
    relative_buckets: int = flag(32, least=2)  # number of distance buckets
    relative_distance: int = flag(128, least=2)
                                  # the last bucket holds this distance and all larger ones
    relative_shared: bool = True  # share one table of these biases across all layers
    pad_id: int = flag(-1, least=-2)
                                  # positions skip tokens with this id; -1: count all tokens, -2:
                                  # count all that the mask keeps
    rope_theta: float = 10000.0   # RoPE base
    rope_scaling: str = ""        # as published, in JSON: {"rope_type": "linear", "factor": 2}
    rotary_dim: int = 0           # width of the rotated part of a head; 0: all of it
    rotary_layers: str = ""       # which layers have rotary positions, as a repeating pattern
                                  # (rrrn: three with, one without); empty: all
    position_rows: int = 0        # rows of the learned position table; 0: as many as seq_len needs
    position_offset: int = 0      # row of the table for position 0
    window: int = 0               # keys that a query sees, including its own; 0: all earlier ones
    local_layers: str = ""        # which layers have the window, as a repeating pattern (lllg:
                                  # three with, one without); empty: all
    local_theta: float = 0.0      # RoPE base of layers with the window; 0: rope_theta, scaled
    embed_dim: int = 0            # width of the embedding and the head; 0: d_model
    embed_scale: float = 0.0      # factor on the embedding; 0: square root of d_model
    attn_scale: float = 0.0       # factor on the scores; 0: head_dim ** -0.5
    attn_softcap: float = 0.0     # soft cap on the scores (by tanh); 0: none
    logit_softcap: float = 0.0    # soft cap on the logits (by tanh); 0: none
    q_rank: int = 0               # latent attention: width of the queries' latent; 0: d_model
    kv_rank: int = 0              # width of the keys' and values' latent; 0: no latent attention
    v_head_dim: int = 0           # width of a head's values; 0: head_dim
    dropout: float = 0.0          # dropout rate on the outputs of attention and MLP, in training
    experts: int = 0              # experts in each MLP; 0: a dense MLP
    experts_per_token: int = flag(2, least=1)  # experts that each token visits
    shared_experts: int = 0       # additional experts that every token visits
    expert_d_ff: int = 0          # width of an expert; 0: d_ff
    dense_layers: int = 0         # number of initial layers with a dense MLP instead of experts
    expert_every: int = flag(1, least=1)  # after the dense_layers, every n-th layer has experts
    router: str = flag("softmax", one_of=("softmax", "sigmoid"))
                                  # softmax, or sigmoid with a bias for choosing experts
    router_norm: bool = True      # normalize a token's routing weights to sum to 1
    router_scale: float = flag(1.0, least=-math.inf)  # factor on the routing weights
    expert_groups: int = flag(1, least=1)  # groups of experts: a token first chooses groups
    groups_per_token: int = flag(1, least=1)  # groups that a token chooses
    balance: float = 0.01         # weight of the loss that keeps each layer's experts equally busy
    balance_bias: bool = False    # lower the bias of busy experts instead (--router sigmoid)
    router_z: float = 0.001       # weight of the loss that keeps each layer's router logits small

    def __post_init__(self) -> None:
        check(self)

    @property
    def side(self) -> int:
        """The number of patches along an image's side."""
        return self.image_size // self.patch_size

    @property
    def expert_layers(self) -> int:
        """The number of entries in the main stack: if the model has experts, each has a layer with
        experts, and the expert_every - 1 layers before it."""
        return (self.layers - self.dense_layers) // self.expert_every

    @property
    def own_stem(self) -> str:
        """The input of the main layer stack. In an encoder-decoder this is tokens, and `stem` is
        the encoder's input."""
        return "tokens" if self.encoder_layers else self.stem


# -------------------------------------------------------------------------------------------
# Derived values and refusals

BIASES = ("embed", "qkv", "qv", "out", "mlp", "head")


def check(c: Any) -> None:
    """Fill in a Config's derived values, and reject options that don't define a valid model."""
    check_values(c)
    check_published(c)
    check_heads(c)
    fill_in(c, kv_heads=c.heads, head_dim=c.d_model // c.heads,
            d_ff=-(-c.d_model * 8 // (3 * 64)) * 64)
    if c.encoder_layers:
        fill_in(c, encoder_heads=c.heads, encoder_d_ff=c.d_ff, source_len=c.seq_len)
    if c.own_stem != "tokens":      # the image or the sound determines the length
        object.__setattr__(c, "seq_len", stems.length(c))
    if c.positions in ("learned", "fixed"):
        fill_in(c, position_rows=_longest(c) + c.position_offset)
    refuse_rows(c, [*of_decoders(c), *_of_values(c), *_of_blocks(c), *_of_encoders(c)])
    if c.positions == "rotary":
        check_rotary(c, c.rotary_dim)


def _longest(c):
    """Return the longest text's length: seq_len, or source_len if the source is a longer text."""
    return max(c.seq_len, c.source_len if c.encoder_layers and c.stem == "tokens" else 0)


def _of_values(c):
    """Return the checks for single options, as rows for refuse_rows."""
    longest, turned = _longest(c), c.rotary_dim or c.head_dim
    rows = c.position_rows - c.position_offset
    return [
        ("head_dim", c.positions == "rotary" and (turned % 2 or turned > min(c.head_dim, 2**16)),
         f"rotary positions need an even part of a head, of at most {2**16}, but --rotary_dim is "
         f"{c.rotary_dim}"),
        ("seq_len" if c.seq_len == longest else "source_len",
         c.positions == "learned" and longest > rows,
         f"there are learned positions for only {rows} tokens (--position_rows)"),
        ("biases", set(c.biases.split(",")) - {"", *BIASES}, f"expected {', '.join(BIASES)}"),
        ("local_layers", set(c.local_layers) - set("lg"),
         "expected a letter for each layer, l (with the window) or g (without)"),
        ("rotary_layers", set(c.rotary_layers) - set("rn"),
         "expected a letter for each layer, r (with rotary positions) or n (without)"),
        ("window", c.window > 2**30, f"expected at most {2**30}")]


# {option: the option that it needs to have any effect}
NEEDS = {"shared_experts": "experts", "qk_norm_wide": "qk_norm", "local_theta": "window",
         "q_rank": "kv_rank"}


def _of_blocks(c):
    """Return the checks for block options that can't be combined, as rows for refuse_rows."""
    return [
        *((name, getattr(c, name) and not getattr(c, other), 
           f"give --{other}{' true' * (getattr(c, other) is False)} too")
          for name, other in NEEDS.items()),
        ("remat", c.parallel_block and "mlp" in c.remat,
         "with --parallel_block attention and MLP are one; give --remat attention or full"),
        ("dense_layers", c.dense_layers >= c.layers or c.dense_layers and not c.experts,
         f"must be below --layers {c.layers}; the other layers need --experts"),
        ("expert_every", c.expert_every > 1 and not c.experts
         or (c.layers - c.dense_layers) % c.expert_every,
         f"needs --experts, and must divide --layers minus --dense_layers "
         f"({c.layers} - {c.dense_layers})"),
        ("expert_groups", c.experts % c.expert_groups or c.groups_per_token > c.expert_groups
         or c.expert_groups > 1 and c.experts < 2 * c.expert_groups,
         f"must divide --experts {c.experts} into groups of two or more (a group is chosen by its "
         f"best two), and be at least --groups_per_token {c.groups_per_token}"),
        ("balance_bias", c.balance_bias and not (c.experts and c.router == "sigmoid"),
         "needs --experts and --router sigmoid, which has such biases"),
        ("gated", c.experts and not c.gated, "experts are gated"),
        ("norm_place", c.parallel_block and c.norm_place != "pre",
         "a --parallel_block has its norms before it"),
        ("kv_rank", c.kv_rank and (
            c.parallel_block or c.qk_norm or c.positions != "rotary" or "qkv" in c.biases
            or c.rotary_dim in (0, c.head_dim) or c.kv_heads != c.heads),
         "latent attention has rotary positions in a part of a head (--rotary_dim below "
         "--head_dim), as many --kv_heads as --heads, no --qk_norm, no biases of qkv, and no "
         "--parallel_block"),
        ("rotary_layers", c.rotary_layers and c.positions != "rotary", "needs --positions rotary"),
        ("v_head_dim", c.v_head_dim not in (0, c.head_dim) and not c.kv_rank,
         "must be --head_dim without latent attention (--kv_rank)")]


def _of_encoders(c):
    """Return the checks for encoders, encoder-decoders and classifiers, as rows for refuse_rows."""
    classes, half = c.head == "classes", c.relative_buckets // 2
    others = c.experts or c.parallel_block or c.kv_rank or c.layer_groups or not c.causal
    return [
        ("head", classes and c.causal and c.pool != "last",
         "the class is read from the first token, which sees only itself while --causal is true; "
         "give --pool last or --causal false"),
        ("pool", c.pool == "last" and (not classes or c.own_stem != "tokens"),
         "needs --head classes of a model that reads tokens"),
        ("head", classes and not c.labels, "give --labels, the number of classes"),
        ("head", classes and c.encoder_layers,
         "needs one stack of layers, without --encoder_layers"),
        ("encoder_layers", c.encoder_layers and others,
         "needs --causal true, without --experts, --parallel_block, --kv_rank and --layer_groups"),
        ("encoder_heads", c.encoder_layers and c.encoder_heads != c.heads
         and c.d_model % c.encoder_heads,
         f"must divide --d_model {c.d_model}, or be --heads {c.heads}"),
        ("relative_buckets", c.relative == "buckets" and not (
            2 <= half <= 2**11 and half < c.relative_distance <= 2**20),
         f"expected 4 to {2**12}, with a --relative_distance ({c.relative_distance}) above half of "
         f"it, up to {2**20}"),
        ("layer_groups", c.layer_groups and (c.layers % c.layer_groups or c.causal or c.experts),
         f"must divide the --layers {c.layers} of an encoder (--causal false) without --experts"),
        # An encoder's own Config has causal=False.
        ("stem", c.own_stem != "tokens" and (c.causal or c.head not in ("classes", "none")),
         "give --encoder_layers to generate text, or --causal false and --head classes or none"),
        ("patch_size", c.stem == "patches" and c.patch_size > c.image_size,
         f"expected at most --image_size {c.image_size}"),
        ("head", classes and (c.experts or c.pool == "mean" and c.stem != "patches"),
         "works without --experts, and --pool mean needs --stem patches"),
        ("relative", c.relative == "grid" and c.own_stem != "patches", "is for --stem patches"),
        ("causal", not c.causal and (c.window or c.positions.startswith("alibi")),
         "an encoder has no --window and no ALiBi")]


def lacking(fields: Fields) -> list[str]:
    """List the Config fields that differ from their defaults and that the plain decoder lacks. We
    look at PLAIN_OPTIONS instead of model.Config, because a fork may add an option that shares its
    name with a different option here."""
    usual = {f.name: f.default for f in dataclasses.fields(Config)}
    found = [name for name, value in fields.items()
             if name in usual and name not in PLAIN_OPTIONS and value != usual[name]]
    kind = scaling_type(fields.get("rope_scaling", ""))
    return found + ["rope_scaling"] * (kind not in ("default", "linear", "llama3"))


# -------------------------------------------------------------------------------------------
# Models with several transformers ("towers"). Each tower is a network of transformer.py with its
# own Config, built from config.json and the model's training options. The whole model uses its
# language tower's Config, so tokens, vocabulary and length keep their usual meaning.

# Options for training and execution, which every tower takes from the model.
TRAINED = ("dropout", "dtype", "remat", "kernel", "sum_dtype", "lora_rank")


def tower_sizes(r: Record) -> Fields:
    """Read the fields of a tower without a head and with biases everywhere."""
    return dict(record.tower(r, d_ff="intermediate_size"), embed_scale=1.0,
                biases="qkv,out,mlp", head="none")


def tower(c: Any, name: str, fields: Fields) -> Any:
    """Return the Config of model c's tower `name`."""
    return as_config(Config, f"config.json, {name}",
                     {**fields, **{option: getattr(c, option) for option in TRAINED if c}})


def check_axes(mesh: Any, why: str) -> None:
    """Reject the axes pipe, which needs identical layers, and seq, which needs one sequence."""
    for axis in ("pipe", "seq"):
        if (size := mesh.shape.get(axis, 1)) > 1:
            raise ConfigError(f"mesh axis {axis}={size}: {why}; give its devices to data, fsdp or "
                              f"tensor")
