"""Config fields for new models.

    PRESETS             published shapes by name
    fields_of_preset    --model NAME
"""

import difflib
from typing import Any

from published.record import Fields
from zigzag.core.errors import ConfigError
from zigzag.parallel.network import PRESETS as OF_DECODER
from zigzag.parallel.network import resized

# Options that a family's models share. None of these families scales its embedding.
GPT2 = dict(vocab_size=50257, seq_len=1024, norm="layer", norm_eps=1e-5, positions="learned",
            activation="gelu_tanh", gated=False, biases="qkv,out,mlp", tied=True, embed_scale=1.0)
OPT = {**GPT2, "vocab_size": 50272, "seq_len": 2048, "activation": "relu", "position_offset": 2,
       "position_rows": 2050}
LLAMA = dict(vocab_size=32000, seq_len=2048, embed_scale=1.0, norm_eps=1e-5)
LLAMA2 = {**LLAMA, "seq_len": 4096}
LLAMA3 = {**LLAMA, "vocab_size": 128256, "seq_len": 8192, "rope_theta": 500000.0, "kv_heads": 8}
QWEN3 = dict(vocab_size=151936, seq_len=40960, embed_scale=1.0, rope_theta=1e6, qk_norm=True,
             kv_heads=8, head_dim=128)

# Encoders, with the head that their published parameter count includes: the masked language model's
# for BERT and its relatives, and 1,000 classes for image encoders.
BERT = dict(vocab_size=30522, seq_len=512, causal=False, norm="layer", norm_eps=1e-12,
            norm_place="post", embed_norm=True, positions="learned", token_types=2,
            activation="gelu", gated=False, biases="qkv,out,mlp,head", tied=True, embed_scale=1.0,
            head="masked")
ROBERTA = {**BERT, "vocab_size": 50265, "norm_eps": 1e-5, "token_types": 1, "pad_id": 1,
           "position_offset": 2}
ALBERT = {**BERT, "vocab_size": 30000, "embed_dim": 128, "layer_groups": 1,
          "activation": "gelu_tanh", "biases": "embed,qkv,out,mlp,head"}
VIT = dict(stem="patches", causal=False, norm="layer", norm_eps=1e-12, positions="learned",
           activation="gelu", gated=False, biases="embed,qkv,out,mlp", head="classes", labels=1000)
BEIT = {**VIT, "positions": "none", "relative": "grid", "relative_shared": False,
        "biases": "embed,qv,out,mlp", "layer_scale": True, "pool": "mean"}
# Encoder-decoders. T5 1.0 uses its scaled embedding as the head. T5 1.1 has an untied head and
# gated MLPs.
T5 = dict(vocab_size=32128, seq_len=512, embed_scale=1.0, positions="none", relative="buckets",
          attn_scale=1.0, head_dim=64)
T5_1 = {**T5, "activation": "relu", "gated": False, "tied": True}
T5_11 = {**T5, "activation": "gelu_tanh"}
BART = dict(vocab_size=50265, seq_len=1024, norm="layer", norm_eps=1e-5, norm_place="post",
            embed_norm=True, embed_scale=1.0, positions="learned", position_offset=2,
            activation="gelu", gated=False, biases="qkv,out,mlp,head", tied=True)
WHISPER = dict(vocab_size=51865, seq_len=448, source_len=1500, stem="frames", channels=80,
               norm="layer", norm_eps=1e-5, embed_scale=1.0, positions="learned",
               activation="gelu", gated=False, biases="qv,out,mlp", tied=True)


def _shape(family: Fields, layers: int, d_model: int, heads: int, d_ff: int = 0,
           **others: Any) -> Fields:
    return {**family, "layers": layers, "d_model": d_model, "heads": heads,
            "d_ff": d_ff or 4 * d_model, **others}


def _pair(family: Fields, layers: int, d_model: int, *sizes: int, **others: Any) -> Fields:
    """Return an encoder-decoder with `layers` layers in the encoder and as many in the decoder."""
    scale = {"head_scale": d_model**-0.5} if family is T5_1 else {}
    return _shape(family, layers, d_model, *sizes, encoder_layers=layers, **scale, **others)


PRESETS: dict[str, Fields] = {
    **OF_DECODER,
    "transformer": {},      # the general network, with options from flags
    # The model from the UvA notebook on 3D parallelism, which trains on random tokens. The notebook
    # has 1,152 more parameters: a copy of the query and key norms' scales per device and shard.
    "uva3d": dict(layers=6, d_model=256, heads=8, d_ff=1024, vocab_size=100, seq_len=8,
                  parallel_block=True, qk_norm=True, positions="learned", activation="gelu_tanh",
                  gated=False, biases="out,mlp,head", embed_scale=1.0, dropout=0.1,
                  remat="full", microbatches=8),
    "gpt2": _shape(GPT2, 12, 768, 12), "gpt2-medium": _shape(GPT2, 24, 1024, 16),
    "gpt2-large": _shape(GPT2, 36, 1280, 20), "gpt2-xl": _shape(GPT2, 48, 1600, 25),
    "opt-125m": _shape(OPT, 12, 768, 12),
    "opt-350m": _shape(OPT, 24, 1024, 16, embed_dim=512, norm_place="post"),
    "opt-1.3b": _shape(OPT, 24, 2048, 32), "opt-2.7b": _shape(OPT, 32, 2560, 32),
    "opt-6.7b": _shape(OPT, 32, 4096, 32), "opt-13b": _shape(OPT, 40, 5120, 40),
    "opt-30b": _shape(OPT, 48, 7168, 56), "opt-66b": _shape(OPT, 64, 9216, 72),
    "gptj-6b": _shape(GPT2, 28, 4096, 16, vocab_size=50400, seq_len=2048, positions="rotary",
                      rotary_dim=64, biases="mlp,head", tied=False, parallel_block=True),
    "llama-7b": _shape(LLAMA, 32, 4096, 32, 11008), "llama-13b": _shape(LLAMA, 40, 5120, 40, 13824),
    "llama-33b": _shape(LLAMA, 60, 6656, 52, 17920),
    "llama-65b": _shape(LLAMA, 80, 8192, 64, 22016),
    "llama2-7b": _shape(LLAMA2, 32, 4096, 32, 11008),
    "llama2-13b": _shape(LLAMA2, 40, 5120, 40, 13824),
    "llama-70b": _shape(LLAMA2, 80, 8192, 64, 28672, kv_heads=8),
    "llama3-8b": _shape(LLAMA3, 32, 4096, 32, 14336),
    "llama3-70b": _shape(LLAMA3, 80, 8192, 64, 28672),
    "llama3-405b": _shape(LLAMA3, 126, 16384, 128, 53248),
    "mixtral-8x7b": _shape(LLAMA2, 32, 4096, 32, 14336, kv_heads=8, experts=8, rope_theta=1e6),
    "qwen3-0.6b": _shape(QWEN3, 28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _shape(QWEN3, 28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _shape(QWEN3, 36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _shape(QWEN3, 36, 4096, 32, 12288), "qwen3-14b": _shape(QWEN3, 40, 5120, 40, 17408),
    "qwen3-32b": _shape(QWEN3, 64, 5120, 64, 25600),
    "qwen3-30b-a3b": _shape(QWEN3, 48, 2048, 32, 6144, kv_heads=4, experts=128,
                            experts_per_token=8, expert_d_ff=768),
    "deepseek-v3": _shape(
        LLAMA, 61, 7168, 128, 18432, vocab_size=129280, seq_len=4096, norm_eps=1e-6, head_dim=192,
        rotary_dim=64, q_rank=1536, kv_rank=512, v_head_dim=128, dense_layers=3, experts=256,
        experts_per_token=8, shared_experts=1, expert_d_ff=2048, router="sigmoid",
        router_scale=2.5, expert_groups=8, groups_per_token=4),
    "bert-base": _shape(BERT, 12, 768, 12), "bert-large": _shape(BERT, 24, 1024, 16),
    "roberta-base": _shape(ROBERTA, 12, 768, 12), "roberta-large": _shape(ROBERTA, 24, 1024, 16),
    "albert-base": _shape(ALBERT, 12, 768, 12), "albert-large": _shape(ALBERT, 24, 1024, 16),
    "albert-xlarge": _shape(ALBERT, 24, 2048, 16), "albert-xxlarge": _shape(ALBERT, 12, 4096, 64),
    "vit-base": _shape(VIT, 12, 768, 12), "vit-large": _shape(VIT, 24, 1024, 16),
    "vit-huge": _shape(VIT, 32, 1280, 16, patch_size=14),
    "beit-base": _shape(BEIT, 12, 768, 12), "beit-large": _shape(BEIT, 24, 1024, 16),
    "t5-small": _pair(T5_1, 6, 512, 8), "t5-base": _pair(T5_1, 12, 768, 12),
    "t5-large": _pair(T5_1, 24, 1024, 16), "t5-3b": _pair(T5_1, 24, 1024, 32, 16384, head_dim=128),
    "t5-11b": _pair(T5_1, 24, 1024, 128, 65536, head_dim=128),
    # Version 1.1, the only one that comes in the sizes xl and xxl.
    "t5-small-v1.1": _pair(T5_11, 8, 512, 6, 1024), "t5-base-v1.1": _pair(T5_11, 12, 768, 12, 2048),
    "t5-large-v1.1": _pair(T5_11, 24, 1024, 16, 2816), "t5-xl": _pair(T5_11, 24, 2048, 32, 5120),
    "t5-xxl": _pair(T5_11, 24, 4096, 64, 10240),
    "bart-base": _pair(BART, 6, 768, 12), "bart-large": _pair(BART, 12, 1024, 16),
    "whisper-tiny": _pair(WHISPER, 4, 384, 6), "whisper-base": _pair(WHISPER, 6, 512, 8),
    "whisper-small": _pair(WHISPER, 12, 768, 12), "whisper-medium": _pair(WHISPER, 24, 1024, 16),
    "whisper-large": _pair(WHISPER, 32, 1280, 20), "whisper-large-v2": _pair(WHISPER, 32, 1280, 20),
    "whisper-large-v3": _pair(WHISPER, 32, 1280, 20, vocab_size=51866, channels=128),
}


def fields_of_preset(name: str, given: Fields) -> Fields:
    """Return a preset's fields, minus the fields that depend on a width in the `given` flags."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, 5, 0)
        raise ConfigError(f"--model {name}: no folder with a published model and no preset has "
                          f"this name; the nearest of the {len(PRESETS)} in published/presets.py "
                          f"are {', '.join(nearest)}")
    return resized(PRESETS[name], given)
