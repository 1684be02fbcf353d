"""Cases for test_options.py: every option of every published family's configuration, each varied
by itself from a few tiny models.

A case is a base (a tiny model of transformers) with edits of its config.json, {path: new value}
with paths like "rope_theta" or "text_config.hidden_size". It is `made` (transformers makes a model
from the fields and saves it, with fitting shapes) or `edited` (the base is saved, and its
config.json changed by hand). The values of an option are derived from its present value and its
name, so a new option in a new version of transformers has cases at once. Tables below have values
that no rule finds: kinds of rotary positions, names of classes, other names of the same key.
"""

import copy
import dataclasses
import functools
import json
import zlib

from tests.common import peer
from tests.published import (
    test_encoder_families,
    test_families,
    test_masks,
    test_pairs_families,
    test_pictures,
    test_two_towers,
)


class Removed:
    """The value of a key that is removed from config.json, so that the class's default holds."""
    def __repr__(self):
        return "(removed)"


REMOVED = Removed()


# -------------------------------------------------------------------------------------------
# Bases

@dataclasses.dataclass(frozen=True)
class Base:
    name: str
    family: str             # a model_type
    model: str              # the class that its folder is of
    fields: dict            # what its configuration is made of
    kind: str               # decoder, encoder, picture, pair, clip, blip2, swin, sam or masks: what
                            # it is given, and what is compared
    rank: int               # 0: the first of its family, with which every field is varied; 1: the
                            # first with its head, with which those of its own class are; 2:
                            # another, with which these are, each to fewer values

    def config(self, **fields):
        """A configuration of transformers, with other fields."""
        transformers = peer("transformers")
        fields = copy.deepcopy({**self.fields, **fields})
        if self.family == "sam":
            return transformers.SamConfig(vision_config=fields.pop("vision_config"), **fields)
        return getattr(transformers, self.model).config_class(**fields)


CAUSAL = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def _bases():
    """The tiny models of the other tests, and those for pretraining."""
    found = [(name, CAUSAL.get(kind, f"{kind}ForCausalLM"), fields, "decoder")
             for name, (kind, fields) in test_families.CASES.items() if name != "chatglm"]
    encoders = dict(test_encoder_families.CASES)
    text, albert = test_encoder_families.text, test_encoder_families.ALBERT
    encoders |= {
        "bert pretraining": text("Bert", "ForPreTraining"),
        "bert pretraining untied": text("Bert", "ForPreTraining", 3, tie_word_embeddings=False),
        "roberta untied": text("Roberta", "ForMaskedLM", 3, tie_word_embeddings=False),
        "albert untied": text("Albert", "ForMaskedLM", 3, **albert, tie_word_embeddings=False),
        "albert pretraining": text("Albert", "ForPreTraining", 3, **albert)}
    found += [(name, model, fields,
               "picture" if test_encoder_families.is_picture(name) else "encoder")
              for name, (model, fields) in encoders.items()]
    found += [(name, f"{kind}ForConditionalGeneration", fields, "pair")
              for name, (kind, fields) in test_pairs_families.CASES.items() if name != "t5 deep"]
    found += [(name, "CLIPModel" if name.startswith("clip") else "Blip2ForConditionalGeneration",
               fields, name.split()[0]) for name, fields in test_two_towers.CASES.items()]
    found += [(name, model, fields, name.split()[0])
              for name, (model, fields) in test_pictures.CASES.items()]
    found += [(name, "SamModel", fields, "masks") for name, fields in test_masks.CASES.items()]
    return found


BASES = [name for name, *_ in _bases()]     # (known without transformers)


@functools.cache
def bases():
    """{name: base} of all bases. (A family is a model_type.)"""
    done, seen = {}, set()
    for name, model, fields, kind in _bases():
        family = getattr(peer("transformers"), model).config_class.model_type
        rank = 0 if family not in seen else 1 if model not in seen else 2
        done[name] = Base(name, family, model, fields, kind, rank)
        seen |= {family, model}
    return done


# -------------------------------------------------------------------------------------------
# Cases

@dataclasses.dataclass(frozen=True)
class Case:
    base: str
    edits: tuple            # of (path, value)
    way: str                # made or edited

    def __str__(self):
        edits = ", ".join(f"{path}={_shown(value)}" for path, value in self.edits)
        return f"{self.base}: {edits or 'as it is'} ({self.way})"

    @property
    def number(self):
        """A number that is the same in each process and in each version."""
        return zlib.crc32(str(self).encode())

    @property
    def key(self):
        return self.edits[0][0] if self.edits else ""


def _shown(value):
    return value if value is REMOVED else json.dumps(value, sort_keys=True)


def changed(record, edits):
    """A config.json, or fields of one, with these edits."""
    record = copy.deepcopy(record)
    for path, value in edits:
        *outer, last = path.split(".")
        inside = record
        for name in outer:
            if not isinstance(inside.get(name), dict):
                inside[name] = {}
            inside = inside[name]
        if value is REMOVED:
            inside.pop(last, None)
        else:
            inside[last] = copy.deepcopy(value)
    return record


# -------------------------------------------------------------------------------------------
# Values

ACTS = ("relu", "gelu_new", "gelu", "silu", "quick_gelu", "gelu_10", "tanh", "gelu_pytorch_tanh")
# By the end of a name, values of an option that is null.
NULLS = {
    ("_id", "_ids", "_index"): [5], ("cap", "capping"): [20.0], ("window", "_length"): [7],
    ("theta", "base", "freq"): [100.0], ("scale", "factor", "eps", "scalar", "value"): [0.5],
    ("drop", "dropout", "prob"): [0.1], ("_types", "_layers", "indexes", "tokens"): [[0]],
    ("size", "dim", "heads", "rank", "inner", "num", "positions", "attn"): [6, 24],
    ("act", "activation"): ["relu"]}
# By name, values that no rule finds.
NAMED = {
    "problem_type": ["regression", "multi_label_classification", "single_label_classification"],
    "position_embedding_type": ["relative_key", "relative_key_query", "rotary", "zz"],
    "feed_forward_proj": ["gated-gelu", "gated-silu", "gated-relu", "relu", "gelu", "gelu_new",
                          "silu", "gated-gelu_new", "gated-gated-gelu"],
    "dense_act_fn": ["relu", "gelu_new", "silu"],
    "pruned_heads": [{"0": [0]}, {}], "attention_types": [
        [[["local"], 4]], [[["global"], 4]], [[["local", "global"], 2]], [[["global"], 2]]],
    "attention_layers": [["local"] * 4, ["global"] * 4, ["local", "global"] * 2, ["local"]],
    "id2label": [{"0": "a", "1": "b", "2": "c"}, {"0": "a"}, {}], "label2id": [{"a": 0, "b": 1}],
    "num_labels": [1, 3], "dtype": ["bfloat16", "float16"], "torch_dtype": ["bfloat16"],
    "quantization_config": [{"bits": 4}, {"quant_method": "bitsandbytes", "load_in_4bit": True}],
    "mlp_only_layers": [[0], [1], [0, 1], [7], []], "global_attn_indexes": [[], [0], [0, 1, 9]],
    "topk_method": ["greedy", "group_limited_greedy"], "scoring_func": ["softmax"],
    "per_layer_config": [{"0": {"sliding_window": 3}}], "depths": [[1, 1], [2], [2, 2]],
    "num_heads": [[6, 3], [3], 3, 4, 0], "image_size": [32, 50, [32, 40]], "patch_size": [2, 7],
    # (With weights of size 1 scores are in the hundreds: rounding decides which token wins, and the
    # -100 that transformers adds where a token of Swin must not look hides little.)
    "initializer_range": [0.03, 0.0], "initializer_factor": [0.5, 0.0], "init_std": [0.03, 0.0],
    "experts_implementation": ["eager", "zz"], "_attn_implementation": ["eager", "sdpa"],
    "attn_implementation": ["sdpa"], "transformers_version": ["4.30.0", "5.0.0", "9.9.9"],
}


def values_of(name, value, few=False):
    """Other values of an option whose value is `value`."""
    last = name.rsplit(".", 1)[-1]
    if last in NAMED and not (last == "num_heads" and few):
        found = NAMED[last]
    elif isinstance(value, bool):
        found = [not value]
    elif value is None:
        found = next((values for ends, values in NULLS.items() if last.endswith(ends)), None)
        if found is None:
            found = [True] if last.startswith(("use_", "is_", "do_", "tie_")) else [True, 3, 0.5]
    elif isinstance(value, int):
        found = [value + 1, 2 * value, value // 2, 0, 1]
    elif isinstance(value, float):
        found = [value * 1.5, 0.0, 0.25, 1]
    elif isinstance(value, str):
        found = list(ACTS) if value in ACTS else ["zz", value.upper()]
    elif isinstance(value, list):
        found = [value[::-1], value[:1], value + value[-1:], [], 3]
        if value and isinstance(value[0], (int, float)):
            found.insert(0, [v + 1 for v in value])
    elif isinstance(value, dict):
        found = [{}, {"zz": 1}]
    else:
        found = []
    found = found[:2] if few else found
    if value is not None:
        found = [*found, None]
    return [v for v in found if json.dumps(v) != json.dumps(value)]


def layer_types(layers):
    local, full = "sliding_attention", "full_attention"
    return [[local] * layers, [full] * layers, ([full, local] * layers)[:layers],
            ([local, full] * layers)[:layers], [full] * (layers + 1), ["zz"],
            ["chunked_attention"] * layers, [local, None], []]


# -------------------------------------------------------------------------------------------
# Keys that a configuration does not have by itself

# What another version wrote, what other families have, and what nobody knows.
FOREIGN = dict(
    head_dim=[16, None], sliding_window=[7, 0, None], use_sliding_window=[True],
    max_window_layers=[1], window=[5], window_size=[5], attn_logit_softcapping=[20.0],
    final_logit_softcapping=[20.0], query_pre_attn_scalar=[7], use_cache=[False],
    sliding_window_pattern=[2, 3], _sliding_window_pattern=[2], use_bidirectional_attention=[True],
    attention_bias=[True], mlp_bias=[True], qkv_bias=[True], bias=[True], use_qk_norm=[True],
    clip_qkv=[0.5], logit_scale=[2.0], logits_scaling=[2.0], embedding_multiplier=[2.0],
    residual_multiplier=[0.5], attention_multiplier=[0.3], scale_embedding=[True],
    scale_decoder_outputs=[False, True], num_key_value_heads=[1], num_kv_heads=[1],
    is_causal=[False], is_decoder=[True, False], add_cross_attention=[True],
    cross_attention_hidden_size=[24], is_encoder_decoder=[True], tie_encoder_decoder=[True],
    tie_word_embeddings=[True, False], torchscript=[True], pruned_heads=[{"0": [0]}],
    chunk_size_feed_forward=[1, 7], problem_type=["regression"], use_bfloat16=[True],
    finetuning_task=["zz"], task_specific_params=[{"a": 1}], prefix=["a"], max_length=[9],
    min_length=[3], do_sample=[True], num_beams=[3], temperature=[0.5], top_k=[3], top_p=[0.5],
    repetition_penalty=[1.5], no_repeat_ngram_size=[2], bad_words_ids=[[[1]]],
    suppress_tokens=[[1]], forced_bos_token_id=[3], forced_eos_token_id=[3], sep_token_id=[3],
    decoder_start_token_id=[3], pad_token_id=[0, 7, -1], bos_token_id=[7], eos_token_id=[7, [7, 8]],
    unk_token_id=[7], return_dict=[False], output_attentions=[True], output_hidden_states=[True],
    tokenizer_class=["zz"], classifier_dropout=[0.3], initializer_range=[0.5],
    attention_dropout=[0.5], pretraining_tp=[2], slow_but_exact=[True],
    gradient_checkpointing=[True],
    per_layer_config=[{"0": {"sliding_window": 3}}], quantization_config=[{"bits": 4}],
    auto_map={"zz": ["a.B"]}, dtype=["bfloat16"], torch_dtype=["float16"], zz_unknown=[1, None],
    output_router_logits=[True], router_jitter_noise=[0.1], router_aux_loss_coef=[0.5],
    num_nextn_predict_layers=[1], ep_size=[2], aux_loss_alpha=[0.5], seq_aux=[True],
    attention_softmax_in_fp32=[True], n_embed=[24], seq_length=[32], n_head_kv=[2],
    layer_norm_elementwise_affine=[False], _remove_final_layer_norm=[True], enable_bias=[False],
    n_inner=[24], intermediate_size=[24], num_labels=[3, 1], adapters=[{"a": 1}],
    _name_or_path=["zz"],
    rotary=[False], rotary_dim=[4], rotary_pct=[0.25], rotary_emb_base=[100], rope_ratio=[2.0],
    normalize_before=[True], add_final_layer_norm=[True], normalize_embedding=[False],
    static_position_embeddings=[True], add_bias_logits=[True], extra_pos_embeddings=[3],
    hidden_act=["relu"], hidden_activation=["relu"], activation_function=["relu"],
    layerdrop=[0.5], mask_time_prob=[0.5], apply_spec_augment=[True], use_weighted_layer_sum=[True],
    is_gated_act=[True, False], dense_act_fn=["relu"], tie_encoder_decoder_=[True])

HEADS = ("Model", "ForCausalLM", "LMHeadModel", "ForSequenceClassification", "ForMaskedLM",
         "ForTokenClassification", "ForQuestionAnswering", "ForPreTraining", "DoubleHeadsModel",
         "ForConditionalGeneration", "ForImageClassification", "ForMultipleChoice", "EncoderModel",
         "ForNextSentencePrediction", "LMHeadModel", "ForMaskedImageModeling", "Backbone",
         "ForSemanticSegmentation", "TextModel", "VisionModel", "TextModelWithProjection",
         "VisionModelWithProjection", "ForImageTextRetrieval", "QFormerModel", "Decoder",
         "ForAudioClassification")


def other_classes(base):
    """The names of the classes of a base's family that transformers has."""
    transformers = peer("transformers")
    kind = max((base.model.removesuffix(end) for end in HEADS if base.model.endswith(end)),
               key=lambda kind: -len(kind))
    return [f"{kind}{end}" for end in dict.fromkeys(HEADS)
            if f"{kind}{end}" != base.model and hasattr(transformers, f"{kind}{end}")]


# -------------------------------------------------------------------------------------------
# Rotary positions

def rope_specs(half, spare=16):
    """Kinds of scaling for heads of which `half` pairs are turned. What is published of each, and
    what is only possible: numbers that are zero, given twice, missing or of another kind."""
    lists = dict(short_factor=[1.0 + 0.5 * i for i in range(half)],
                 long_factor=[2.0 + 0.5 * i for i in range(half)])
    long, at = dict(rope_type="longrope", **lists), dict(original_max_position_embeddings=spare)
    yarn = dict(rope_type="yarn", factor=4.0, **at)
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **at)
    linear, dynamic = dict(rope_type="linear", factor=4.0), dict(rope_type="dynamic", factor=4.0)
    return [
        None, {}, dict(rope_type="default"), dict(rope_type="zz", factor=2.0), dict(factor=2.0),
        linear, dict(type="linear", factor=4.0), {**linear, "type": "dynamic"},
        {**linear, "factor": 1.0}, {**linear, "factor": 0.5}, {**linear, "factor": "4"},
        {**linear, "zz_unknown": 1}, dict(rope_type="linear"), {**linear, **at},
        {**linear, "attention_factor": 0.7}, {**linear, "partial_rotary_factor": 0.5},
        dynamic, {**dynamic, **at}, {**dynamic, "attention_factor": 0.7}, dict(rope_type="dynamic"),
        yarn, dict(type="yarn", factor=4.0, **at), dict(rope_type="yarn", factor=4.0),
        {**yarn, "attention_factor": 0.7}, {**yarn, "attention_factor": 0.0},
        {**yarn, "attention_factor": None}, {**yarn, "beta_fast": 16, "beta_slow": 2},
        {**yarn, "beta_fast": 0, "beta_slow": 0}, {**yarn, "beta_fast": None},
        {**yarn, "truncate": False}, {**yarn, "mscale": 0.7, "mscale_all_dim": 0.3},
        {**yarn, "mscale": 0.7}, {**yarn, "mscale": 0.0, "mscale_all_dim": 0.3},
        {**yarn, "mscale_all_dim": 0.3}, {**yarn, "mscale": 0.7, "mscale_all_dim": 0.3,
                                         "attention_factor": 0.7},
        {**yarn, "partial_rotary_factor": 0.5}, {**yarn, "factor": None},
        {**yarn, "finetuned": True},
        llama3, {**llama3, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {**llama3, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
        {**llama3, "attention_factor": 0.7}, dict(rope_type="llama3", factor=8.0),
        {**llama3, "original_max_position_embeddings": None}, {**llama3, "low_freq_factor": 0},
        long, {**long, **at}, {**long, **at, "factor": 8.0}, {**long, "factor": 8.0},
        {**long, **at, "attention_factor": 0.7}, {**long, **at, "attention_factor": 0.0},
        {**long, **at, "short_mscale": 0.7, "long_mscale": 0.6}, {**long, **at, "factor": 1.0},
        {**long, **at, "long_factor": [2.0]}, dict(rope_type="longrope", **at),
        {"type": "longrope", **lists, **at}, {"type": "su", **lists, **at},
        {**long, **at, "rope_type": "yarn", "factor": 4.0}, {**long, **at, "rope_type": "default"},
        {**long, **at, "rope_type": "linear", "factor": 4.0},
        dict(rope_type="default", partial_rotary_factor=0.5),
        dict(rope_type="default", zz_unknown=1),
        dict(rope_type="proportional", partial_rotary_factor=0.5),
        {"full_attention": linear, "sliding_attention": dict(rope_type="default")},
        {"full_attention": dict(rope_type="default", rope_theta=700.0),
         "sliding_attention": dict(rope_type="default", rope_theta=70.0)},
        {"full_attention": dict(rope_type="default", rope_theta=700.0),
         "sliding_attention": {**linear, "rope_theta": 70.0}},
        {"full_attention": {**yarn, "rope_theta": 700.0}, "sliding_attention": None},
        {"full_attention": None, "sliding_attention": dict(rope_type="default", rope_theta=70.0)},
        {"full_attention": dict(rope_type="default", rope_theta=700.0)},
    ]


TOP = dict(original_max_position_embeddings=8)
ROPE_KEYS = dict(rope_theta=[700.0, 0, None, 3], partial_rotary_factor=[0.5, 0.0, None],
                 original_max_position_embeddings=[8, None], attention_factor=[0.7],
                 rope_local_base_freq=[70.0], max_position_embeddings=[16, 32],
                 rope_interleave=[False, True], rotary_pct=[0.25], rotary_emb_base=[100])


def _half(base, config):
    """How many pairs of a head are turned."""
    fields = {**config.to_dict(), **base.fields}
    width = fields.get("qk_rope_head_dim") or fields.get("head_dim") or (
        fields["hidden_size"] // fields["num_attention_heads"])
    share = fields.get("rotary_pct") or fields.get("partial_rotary_factor") or (
        0.5 if base.family == "glm" else 1.0)
    return int(width * share) // 2


def rope_edits(base, config):
    """Edits of a config.json of either version: scaling as version 4 has it, beside what is there
    and in its place; as version 5 has it; some of them with a length at the top too."""
    for spec in rope_specs(_half(base, config)):
        spec4 = {k: v for k, v in (spec or {}).items() if k != "rope_theta"} if spec else spec
        yield (("rope_scaling", spec4),)
        yield (("rope_scaling", spec4), ("rope_parameters", REMOVED), ("rope_theta", 500.0))
        if spec is not None and speaks_5():
            has = "full_attention" in spec or "rope_theta" in spec
            yield (("rope_parameters", spec if has else {**spec, "rope_theta": 500.0}),
                   ("rope_scaling", REMOVED), ("rope_theta", REMOVED))
            yield (("rope_parameters", spec), ("rope_theta", 500.0))
        kind = (spec or {}).get("rope_type")
        if kind in ("yarn", "llama3", "longrope", "dynamic") and "zz_unknown" not in spec:
            extra = tuple(TOP.items())
            yield (("rope_scaling", spec4), *extra)
            if speaks_5():
                yield (("rope_parameters", {**spec, "rope_theta": 500.0}), *extra)
    for name, values in ROPE_KEYS.items():
        for value in values:
            yield ((name, value),)
            if speaks_5():
                yield ((f"rope_parameters.{name}", value),)


def speaks_5():
    """Whether this is a transformers that reads rope_parameters."""
    return int(peer("transformers").__version__.split(".")[0]) >= 5


# -------------------------------------------------------------------------------------------
# All of them

# The fields of every configuration that change what some class computes.
TELLING = {"tie_word_embeddings", "architectures", "is_decoder", "add_cross_attention", "id2label",
           "num_labels", "is_encoder_decoder", "pruned_heads", "problem_type"}


@functools.cache
def usual_names():
    """The fields that every configuration has."""
    transformers = peer("transformers")
    kind = getattr(transformers, "PreTrainedConfig", None) or transformers.PretrainedConfig
    return {*kind().to_dict()}


def _is_nested(config, name):
    """Whether a field is a configuration by itself."""
    return hasattr(getattr(config, name, None), "to_diff_dict")


def _fields_edits(base, config):
    """Edits of each field of a configuration and of the configurations inside it."""
    for name, value in config.to_dict().items():
        if name in usual_names() - TELLING and base.rank:
            continue
        if name == "layer_types":
            for kinds in layer_types(config.num_hidden_layers):
                yield ((name, kinds),)
        elif _is_nested(config, name):
            inner = getattr(config, name)
            for path, part in inner.to_dict().items():
                # (Parts need no cases for the other fields of every configuration, forty names in
                # each of three parts: the whole has cases for these above.)
                if path in usual_names() - TELLING:
                    continue
                for v in values_of(path, part, base.rank == 2):
                    yield ((f"{name}.{path}", v),)
            for v in (None, {}, REMOVED):
                yield ((name, v),)
            yield ((f"{name}.zz_unknown", 1),)
            continue
        elif isinstance(value, dict) and name not in NAMED:
            yield from _inside(name, value, base.rank == 2)
        if name != "architectures" and not (name == "layer_types"):
            for v in values_of(name, value, base.rank == 2):
                yield ((name, v),)
        yield ((name, REMOVED),)


def _inside(name, record, few):
    """Edits inside a field that is a dict, and in dicts inside it."""
    for path, value in record.items():
        path = f"{name}.{path}"
        if isinstance(value, dict):
            yield from _inside(path, value, few)
        for v in (*values_of(path, value, few), REMOVED):
            yield ((path, v),)


def _other_edits(base, config):
    """Other names for the same, other classes, and keys that its class does not have."""
    has = config.to_dict()
    for name, real in getattr(config, "attribute_map", {}).items():
        if isinstance(has.get(real), (int, str, bool)):
            yield ((name, has[real]), (real, REMOVED))
            value = values_of(real, has[real])[:2]
            for v in value:
                yield ((name, v),)
                yield ((name, v), (real, REMOVED))
    for name, values in FOREIGN.items():
        if name not in has:
            for v in values:
                yield ((name, v),)
    if "layer_types" not in has:
        for kinds in layer_types(2)[:3]:
            yield (("layer_types", kinds),)


def _class_edits(base):
    for name in other_classes(base):
        yield (("architectures", [name]),)
    for names in (None, [], ["zz"], [base.model, "zz"], base.model):
        yield (("architectures", names),)


def _special_edits(base):
    """Edits of several fields that belong together."""
    if base.name == "bloom":
        yield (("slow_but_exact", True), ("pretraining_tp", 2))
    if base.family == "qwen2":
        yield (("use_sliding_window", False),)
        yield (("layer_types", REMOVED), ("max_window_layers", 0))
        yield (("layer_types", REMOVED), ("use_sliding_window", False))
    if "t5" in base.name:
        at = "" if base.family == "t5" else "text_config."
        for tied in (True, False):
            for scaled in (True, False):
                yield ((f"{at}tie_word_embeddings", tied), (f"{at}scale_decoder_outputs", scaled))
    if base.family == "gpt_neo":
        yield (("attention_types", REMOVED), ("attention_layers", ["local"] * 4))
    if base.family == "gemma3_text":
        yield (("layer_types", REMOVED), ("sliding_window_pattern", 2))
        yield (("layer_types", REMOVED), ("_sliding_window_pattern", 3))
        yield (("layer_types", REMOVED),)


@functools.cache
def cases_of(name):
    """All cases of a base, itself first."""
    base = bases()[name]
    config = base.config()
    edits = [*_fields_edits(base, config), *_special_edits(base)]
    if base.rank < 2:
        edits += _class_edits(base)
    if base.rank == 0:
        edits += _other_edits(base, config)
        if base.kind == "decoder" and {"rope_theta", "rope_parameters", "rotary_emb_base"} & {
                *config.to_dict()}:
            edits += rope_edits(base, config)
    own = {*config.to_dict()} - usual_names() | TELLING | {"rope_scaling"}
    unique = {}
    for each in edits:
        case = Case(name, tuple(each), "edited")
        unique.setdefault(str(case), case)
        # (With another key, transformers would save the edited one's value. And a part of only
        # defaults is a model of a billion weights.)
        is_large = _is_nested(config, case.key) and not each[0][1]
        if (len(each) == 1 and each[0][1] is not REMOVED and not is_large
                and case.key.split(".")[0] in own):
            case = dataclasses.replace(case, way="made")
            unique.setdefault(str(case), case)
    return [Case(name, (), "made"), *unique.values()]
