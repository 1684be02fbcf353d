"""The options of the general transformer, their derived values, and the combinations that are
refused.

A field is an option of transformer.py and a flag of train.py; the comment beside it is the flag's
help.
"""

import dataclasses
import math
from typing import Any

from networks import stems
from zigzag.core.errors import ConfigError, fill_in
from zigzag.core.options import check_values, flag
from zigzag.hub.llama import PLAIN_OPTIONS
from zigzag.weights.network import Computed, check_heads, check_published
from zigzag.weights.positions import check_rotary, scaling_type


@dataclasses.dataclass(frozen=True)
class Config(Computed):
    """The options of a model. Each field is also a flag; 0 often means derived from the others."""
    layers: int = flag(4, least=1)  # how many blocks
    d_model: int = flag(128, least=1)  # width of the residual stream
    heads: int = flag(8, least=1)  # query heads
    kv_heads: int = 0             # key/value heads; 0: same as heads
    head_dim: int = 0             # width of a head; 0: d_model / heads
    d_ff: int = 0                 # width of the MLP; 0: 8/3 of d_model, up to a multiple of 64
    vocab_size: int = 0           # ids in the vocabulary; 0: those of the data's tokenizer
    seq_len: int = flag(128, least=1)  # tokens in a training example: the context length
    tied: bool = False            # one table for both the embedding of tokens and the head
    parallel_block: bool = False  # attention and MLP read the same norm and are added together
    parallel_norms: int = flag(1, one_of=(1, 2))
                                  # norms of a parallel block; 2: the MLP has its own
    causal: bool = True           # a token sees only earlier ones; false (an encoder): all
    encoder_layers: int = 0       # layers of an encoder that the decoder attends to; 0: no encoder
    encoder_heads: int = 0        # heads of the encoder; 0: same as --heads
    encoder_d_ff: int = 0         # width of the encoder's MLP; 0: --d_ff
    source_len: int = 0           # tokens that the encoder reads in an example; 0: --seq_len
    stem: str = flag("tokens", one_of=("tokens", "patches", "frames"))
                                  # input: tokens, patches (of pictures) or frames (of sound)
    image_size: int = flag(224, least=1)  # pixels of a picture's side
    patch_size: int = flag(16, least=1)  # pixels of a patch's side
    channels: int = flag(3, least=1)  # numbers in a pixel, or in a frame of sound
    token_types: int = 0          # number of token types, each with its own embedding; 0: none
    head: str = flag("tokens", one_of=("tokens", "masked", "classes", "none"))
                                  # prediction: tokens, masked (tokens, by BERT's head), classes
                                  # (one for each row) or none
    labels: int = 0               # number of classes; 1: a number for each row (regression)
    pool: str = flag("first", one_of=("first", "last", "mean"))
                                  # input of the classifier: first or last (token), or mean (of
                                  # patches)
    pool_dense: bool = False      # a dense layer with tanh before the classifier
    head_scale: float = 0.0       # factor on the head's input; 0: none
    layer_groups: int = 0         # number of layers with weights of their own, each used several
                                  # times; 0: all layers
    layer_scale: bool = False     # a learned factor on the output of attention and of the MLP
    residual_scale: float = flag(1.0, least=-math.inf)
                                  # factor on the output of attention and of the MLP
    norm: str = flag("rms", one_of=("rms", "layer"))  # rms, or layer: LayerNorm, with a bias
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
    biases: str = ""              # the products with a bias, comma-separated: embed, qkv (or qv),
                                  # out, mlp, head
    positions: str = flag("rotary",
        one_of=("rotary", "learned", "fixed", "sinusoidal", "alibi", "alibi16", "none"))
                                  # rotary, learned, fixed (a table, not trained), sinusoidal,
                                  # alibi, alibi16 (in bfloat16) or none
    relative: str = flag("", one_of=("", "buckets", "grid"))
                                  # learned bias of scores by distance: buckets (T5) or grid (BEiT)
    relative_buckets: int = flag(32, least=2)  # number of buckets of distances
    relative_distance: int = flag(128, least=2)
                                  # the last bucket has all distances from this one on
    relative_shared: bool = True  # one table of these biases for all layers
    pad_id: int = flag(-1, least=-2)
                                  # positions count only tokens other than this id; -1: all tokens,
                                  # -2: all that the mask keeps
    rope_theta: float = 10000.0   # RoPE base
    rope_scaling: str = ""        # as published, in JSON: {"rope_type": "linear", "factor": 2}
    rotary_dim: int = 0           # width of the rotated part of a head; 0: all of it
    rotary_layers: str = ""       # which layers have rotary positions, a pattern that repeats
                                  # (rrrn: three with, one without); empty: all
    position_rows: int = 0        # rows of the table of learned positions; 0: as seq_len needs
    position_offset: int = 0      # table row of position 0
    window: int = 0               # keys that a query sees, its own included; 0: all before it
    local_layers: str = ""        # which layers have the window, a pattern that repeats (lllg:
                                  # three with, one without); empty: all
    local_theta: float = 0.0      # RoPE base of layers with the window; 0: rope_theta, scaled
    embed_dim: int = 0            # width of the embedding and the head; 0: d_model
    embed_scale: float = 0.0      # factor on the embedding; 0: the root of d_model
    attn_scale: float = 0.0       # factor on the scores; 0: head_dim ** -0.5
    attn_softcap: float = 0.0     # bound on the scores, by tanh; 0: none
    logit_softcap: float = 0.0    # bound on the logits, by tanh; 0: none
    q_rank: int = 0               # latent attention: width of the queries' latent; 0: d_model
    kv_rank: int = 0              # width of the latent of keys and values; 0: no latent attention
    v_head_dim: int = 0           # width of a head's values; 0: head_dim
    dropout: float = 0.0          # share of each block's output dropped in training
    experts: int = 0              # experts in each MLP; 0: a dense MLP
    experts_per_token: int = flag(2, least=1)  # experts that each token visits
    shared_experts: int = 0       # additional experts that every token visits
    expert_d_ff: int = 0          # width of an expert; 0: d_ff
    dense_layers: int = 0         # number of first layers with a dense MLP instead of experts
    router: str = flag("softmax", one_of=("softmax", "sigmoid"))
                                  # softmax, or sigmoid with a bias for the choice of experts
    router_norm: bool = True      # normalize a token's routing weights to a sum of 1
    router_scale: float = flag(1.0, least=-math.inf)  # factor on the routing weights
    expert_groups: int = flag(1, least=1)  # groups of experts: a token first chooses among these
    groups_per_token: int = flag(1, least=1)  # groups that a token chooses
    balance: float = 0.01         # weight of the loss that keeps each layer's experts equally busy
    router_z: float = 0.001       # weight of the loss that keeps each layer's router logits small

    def __post_init__(self) -> None:
        check(self)

    @property
    def own_stem(self) -> str:
        """The input of the main stack of layers: tokens, if there is an encoder (which has `stem`).
        """
        return "tokens" if self.encoder_layers else self.stem


# -------------------------------------------------------------------------------------------
# Derived values and refusals

BIASES = ("embed", "qkv", "qv", "out", "mlp", "head")


def check(c: Any) -> None:
    """Fill in the derived values of a Config, and refuse options that no model can have."""
    check_values(c)
    check_published(c)
    check_heads(c)
    fill_in(c, kv_heads=c.heads, head_dim=c.d_model // c.heads,
            d_ff=-(-c.d_model * 8 // (3 * 64)) * 64)
    if c.encoder_layers:
        fill_in(c, encoder_heads=c.heads, encoder_d_ff=c.d_ff, source_len=c.seq_len)
    if c.own_stem != "tokens":      # the picture or the sound decides the length
        object.__setattr__(c, "seq_len", stems.length(c))
    if c.positions in ("learned", "fixed"):
        fill_in(c, position_rows=_longest(c) + c.position_offset)
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
        check_rotary(c, c.rotary_dim)
    if c.positions == "learned" and _longest(c) + c.position_offset > c.position_rows:
        name = "seq_len" if c.seq_len == _longest(c) else "source_len"
        raise ConfigError(f"--{name} {_longest(c)}: there are learned positions for only "
                          f"{c.position_rows - c.position_offset} tokens (--position_rows)")
    if wrong := set(filter(None, c.biases.split(","))) - set(BIASES):
        raise ConfigError(f"--biases {c.biases}: {min(wrong)} is not among {', '.join(BIASES)}")
    if set(c.local_layers) - set("lg"):
        raise ConfigError(f"--local_layers {c.local_layers}: expected a letter for each layer, l "
                          f"(with the window) or g (without)")
    if set(c.rotary_layers) - set("rn"):
        raise ConfigError(f"--rotary_layers {c.rotary_layers}: expected a letter for each layer, r "
                          f"(with rotary positions) or n (without)")
    _check_parts(c)


def _longest(c):
    """The longest text that has positions: seq_len, or source_len if the source is text."""
    return max(c.seq_len, c.source_len if c.encoder_layers and c.stem == "tokens" else 0)


def _check_parts(c):
    """Refuse options that cannot be combined."""
    if c.parallel_block and "mlp" in c.remat:
        raise ConfigError(f"--remat {c.remat}: with --parallel_block attention and MLP are one; "
                          f"give --remat attention or full")
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
    _check_encoder(c)
    if c.experts and not c.gated:
        raise ConfigError("--gated false: experts are gated")
    if c.parallel_block and c.norm_place != "pre":
        raise ConfigError(f"--norm_place {c.norm_place}: a --parallel_block has "
                          f"its norms before it")
    if c.kv_rank and (c.parallel_block or c.qk_norm or c.positions != "rotary"
                      or c.rotary_dim in (0, c.head_dim) or "qkv" in c.biases
                      or c.kv_heads != c.heads):
        raise ConfigError(f"--kv_rank {c.kv_rank}: latent attention has rotary positions in a part "
                          f"of a head (--rotary_dim below --head_dim), as many --kv_heads as "
                          f"--heads, no --qk_norm, no biases of qkv, and no --parallel_block")
    if c.qk_norm_wide and not c.qk_norm:
        raise ConfigError("--qk_norm_wide true: give --qk_norm true too")
    if c.rotary_layers and c.positions != "rotary":
        raise ConfigError(f"--rotary_layers {c.rotary_layers}: is for --positions rotary")
    if c.local_theta and not c.window:
        raise ConfigError(f"--local_theta {c.local_theta}: is for layers with a --window")
    if c.window > 2**30:
        raise ConfigError(f"--window {c.window}: expected at most {2**30}")
    if c.q_rank and not c.kv_rank:
        raise ConfigError(f"--q_rank {c.q_rank}: give --kv_rank too")
    if c.v_head_dim not in (0, c.head_dim) and not c.kv_rank:
        raise ConfigError(f"--v_head_dim {c.v_head_dim}: another width than --head_dim is for "
                          f"latent attention (--kv_rank)")


def _check_encoder(c):
    """Refuse what no encoder, or encoder-decoder, can be."""
    if c.head == "classes" and c.causal and c.pool != "last":
        raise ConfigError("--head classes: the class is read off the first token, which sees only "
                          "itself while --causal is true; give --pool last or --causal false")
    if c.pool == "last" and (c.head != "classes" or c.own_stem != "tokens"):
        raise ConfigError("--pool last: is for --head classes of tokens")
    if c.head == "classes" and not c.labels:
        raise ConfigError("--head classes: give --labels, the number of classes")
    if c.head == "classes" and c.encoder_layers:
        raise ConfigError("--head classes: is for one stack of layers, without --encoder_layers")
    if c.encoder_layers and (c.experts or c.parallel_block or c.kv_rank or c.layer_groups
                             or not c.causal):
        raise ConfigError(f"--encoder_layers {c.encoder_layers}: goes with causal layers of one "
                          f"half after the other, without experts, latent attention or groups")
    if c.encoder_layers and c.encoder_heads != c.heads and c.d_model % c.encoder_heads:
        raise ConfigError(f"--encoder_heads {c.encoder_heads}: must divide --d_model {c.d_model}, "
                          f"or be --heads {c.heads}")
    half = c.relative_buckets // 2
    if c.relative == "buckets" and not (2 <= half <= 2**11 and half < c.relative_distance <= 2**20):
        raise ConfigError(f"--relative_buckets {c.relative_buckets} --relative_distance "
                          f"{c.relative_distance}: expected 4 to {2**12} buckets, and a distance "
                          f"above half as many, up to {2**20}")
    if c.layer_groups and (c.layers % c.layer_groups or c.causal or c.dense_layers):
        raise ConfigError(f"--layer_groups {c.layer_groups}: must divide --layers {c.layers}, of "
                          f"an encoder (--causal false)")
    if c.own_stem == "frames" and c.causal:     # (an encoder itself has causal=False)
        raise ConfigError("--stem frames: give --encoder_layers; text follows from sound")
    if c.own_stem != "tokens" and (c.causal or c.head not in ("classes", "none")):
        raise ConfigError(f"--stem {c.stem}: pictures and sound have --causal false, and --head "
                          f"classes or none")
    if c.stem == "patches" and c.patch_size > c.image_size:
        raise ConfigError(f"--patch_size {c.patch_size}: expected at most --image_size "
                          f"{c.image_size}")
    if c.head == "classes" and (c.experts or c.pool == "mean" and c.stem != "patches"):
        raise ConfigError("--head classes: goes without --experts, and --pool mean is for --stem "
                          "patches")
    if c.relative == "grid" and c.own_stem != "patches":
        raise ConfigError("--relative grid: is for --stem patches")
    if not c.causal and (c.window or c.positions.startswith("alibi")):
        raise ConfigError("--causal false: an encoder has no --window, and no ALiBi")


def lacking(fields: dict[str, Any]) -> list[str]:
    """The names of the fields of a Config that the plain decoder lacks and that differ
    from their defaults. (PLAIN_OPTIONS, not model.Config, says what it has: a fork's own option may
    have the name of another one here.)"""
    usual = {f.name: f.default for f in dataclasses.fields(Config)}
    found = [name for name, value in fields.items()
             if name in usual and name not in PLAIN_OPTIONS and value != usual[name]]
    kind = scaling_type(fields.get("rope_scaling", ""))
    return found + ["rope_scaling"] * (kind not in ("default", "linear", "llama3"))
