"""Compiles the training step and the generation of one token, and writes what XLA says of both.

    python -P accounts/compile_once.py FILE [flags of train.py]

accounts/against.py runs this file once for each of two trees, with the tree in PYTHONPATH. The tree
may be older than this file, so it relies only on train.parse, train.compile_step and, for the
token, on a few functions of sample.py's engine. FILE becomes a JSON object: {"step": ..., "token":
...}. A program that doesn't compile is {"error": why}.
"""

import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import train

# The sizes of a compiled program's memory, as jax names them.
SIZES = ("argument", "output", "alias", "temp", "host_temp")


def mesh_in(compiled):
    return next(x.mesh for x in jax.tree.leaves(compiled.input_shardings) if hasattr(x, "mesh"))


def facts_of(compiled):
    """Return the facts that a comparison needs, as JSON values."""
    mesh, memory = mesh_in(compiled), compiled.memory_analysis()
    return {"text": compiled.as_text(), "mesh": dict(mesh.shape),
            "device_kind": mesh.devices.flat[0].device_kind,
            "memory": {"peak_memory_in_bytes": memory.peak_memory_in_bytes, **{
                name: getattr(memory, name) for name in (f"{x}_size_in_bytes" for x in SIZES)}}}


def compiled_token(config, mesh):
    """Compile the decoding of one token: one row for each device, with a context of seq_len."""
    # Loaded here, because an older tree may lack some of these.
    sample, programs, decoding, passes = map(importlib.import_module, (
        "sample", "zigzag.commands.programs", "zigzag.generate.decoding",
        "zigzag.generate.passes"))
    model, rows = programs.resolved(config, mesh).network, mesh.size
    with jax.set_mesh(mesh):
        engine = sample.engine_of(model)
        params = engine.places(mesh)
        cache = jax.eval_shape(lambda: engine.empty_cache(rows, model.seq_len, model.dtype))
        ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
        state = {**decoding.before_ids(np.zeros((rows, 3), np.uint32), ()), "start": ids,
                 "slot": np.int32(0), "newest": ids}
        return passes.decode.lower(engine, params, cache, state, np.int32(1), 1, model.seq_len,
                                   decoding.GREEDY, sample.draw).compile()


def main(file, words):
    config = train.parse(words)
    step = train.compile_step(config)
    found = {"step": facts_of(step)}
    try:
        found["token"] = facts_of(compiled_token(config, mesh_in(step)))
    except Exception as e:      # not a decoder, or an older tree, whose functions differ
        found["token"] = {"error": f"{type(e).__name__}: {e}"}
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    train.run_main(lambda: main(sys.argv[1], sys.argv[2:]))
