"""The flags that `python train.py --help` shows, and their groups.

A flag that no table here names is shown with the model, if it is a field of model.Config, else with
training. So a fork's new flag needs no line here.
"""

import dataclasses
from typing import Any, Sequence

# The flags that most runs need.
EVERYDAY = {
    "data": ("data", "seq_len", "batch", "vocab_size"),
    "training": ("steps", "epochs", "lr", "warmup", "decay", "weight_decay", "clip", "optimizer",
                 "accumulate", "dropout", "dtype", "seed"),
    "model": ("model", "init_from", "lora_rank", "layers", "d_model", "heads", "kv_heads", "d_ff",
              "tied", "experts"),
    "mesh": ("shards", "mesh", "remat", "zero", "microbatches", "schedule", "topology", "bench"),
    "saving": ("out", "change", "save_every", "eval_every", "keep", "best", "sample_prompts",
               "log", "plot"),
}
# The flags that only --help all shows.
RARE = {
    "data": ("weights", "held_out", "pack", "fields", "metric", "beams"),
    "training": ("cooldown", "decay_steps", "first_share", "final_share", "beta1", "beta2",
                 "max_skipped", "kernel", "sum_dtype"),
    "model": ("head_dim", "norm_eps", "rope_theta", "rope_scaling", "embed_scale",
              "experts_per_token", "balance", "router_z", "published"),
    "mesh": ("chunks", "override", "fsdp_min", "step", "check", "profile"),
    "saving": ("eval_first", "eval_tokens", "sample_temperature", "verify", "save"),
    "hosts": ("coordinator", "processes", "process_id", "distributed", "patience"),
}
LAST = ("python train.py --help all shows every flag; --model NAME --help adds those of the "
        "network of NAME")


def groups_of(plain: type, run: type, networks: Sequence[Any] = (), everything: bool = False
              ) -> dict[str, Sequence[str]]:
    """{group: names of flags}: the fields of the plain decoder's configuration (`plain`), of a
    run's (`run`), and the further fields of these networks."""
    def names(cls):
        return [f.name for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(f.default)]

    groups = {group: list(EVERYDAY.get(group, ())) for group in RARE}
    known = {name for table in (EVERYDAY, RARE) for row in table.values() for name in row}
    groups["model"] += [name for name in names(plain) if name not in known]
    groups["training"] += [name for name in names(run) if name not in known]
    if everything:
        groups = {group: [*names, *RARE[group]] for group, names in groups.items()}
    shown = {*names(plain), *names(run)}
    for network in networks:
        own = [name for name in names(network.config) if name not in shown]
        groups[f"options of the network {network.name}"] = own
        shown.update(own)
    return groups
