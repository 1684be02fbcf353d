"""Edits of the five files: some that change nothing about the work, and some that cost something.

An edit is a list of (file, old text, new text); it replaces all occurrences of the old text.
"""

NORM = "    x32 = x.astype(jnp.float32)\n"
QKV = 'q, k, v = shard.columns(h, w["wq"], w["wk"], w["wv"])'
MLP = 'return shard.row((swiglu(*shard.columns(h, w["w_gate"], w["w_up"])), w["w_down"]))'
SWIGLU = "def swiglu(gate, up):\n    return jax.nn.silu(gate) * up\n\n\n"
IDS = '''def _vocab_ids(head):
    head = jax.tree.leaves(head)[0]
    first = lax.axis_index("tensor") * head.shape[1] if is_tensor_split(head) else 0
    return first + jnp.arange(head.shape[1])


'''
HITS = 'return with_hits(total, jnp.sum(batch["weights"]), hits, config)'
EXP_SUM = ("    exp_sum = jnp.exp(logits - top[..., None]).sum(-1)"
           "                          # [B, T]\n")
TARGET = ("    # If this were an indexed lookup, some compilers would send its gradient between "
          "devices.\n    target = jnp.where(vocab_ids == targets[..., None], logits, 0).sum(-1)"
          "      # [B, T]\n")
ATTENTION = '''    h = norm(x, w["attn_norm"], c)
    q, k, v = shard.columns(h, w["wq"], w["wk"], w["wv"])       # [B, T, H, N], [B, T, K, N] twice
    q, k = (rotary(a, batch["positions"], c) for a in (q, k))
    y = shard.row((attend(q, k, v), w["wo"]))
'''
HELPER = '''def attention(w, x, batch, attend, c):
    h = norm(x, w["attn_norm"], c)
    q, k, v = shard.columns(h, w["wq"], w["wk"], w["wv"])
    q, k = (rotary(a, batch["positions"], c) for a in (q, k))
    return shard.row((attend(q, k, v), w["wo"]))


def block(w, x, i, batch, attend, c):
'''
SCATTER = '    y = lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)  # [B, T/n, D]\n'
LINEAR = "    return [linear(x, w, dtype) for w in weights]\n\n\n@labelled\ndef row"

# {name: edit}
HARMLESS = {
    "a comment": [("model.py", NORM, "    # In float32, because squares overflow.\n\n" + NORM)],
    "many comments": [("shard.py", "import functools\n", "# More.\n" * 40 + "import functools\n")],
    "a docstring": [("model.py", '"""Run one layer: the', '"""Run just one\n    layer: the')],
    "a variable": [("model.py", f'h = norm(x, w["attn_norm"], c)\n    {QKV}',
                    f'hidden = norm(x, w["attn_norm"], c)\n    {QKV.replace("(h", "(hidden")}')],
    "a variable of shard.py": [("shard.py", "top[..., None]", "most[..., None]"),
                               ("shard.py", "    top = lax", "    most = lax"),
                               ("shard.py", 'lax.pmax(top, "tensor") if split_vocab else top',
                                'lax.pmax(most, "tensor") if split_vocab else most'),
                               ("shard.py", "target >= top", "target >= most"),
                               ("shard.py", "jnp.log(exp_sum) + top", "jnp.log(exp_sum) + most")],
    "a variable of train.py": [("train.py", "divisor", "count_or_one")],
    "a function": [("model.py", "swiglu", "gated_silu")],
    "a function called twice": [("model.py", "norm(x", "root_mean_square(x")],
    "a function of shard.py": [("shard.py", "_vocab_ids", "_ids_here")],
    "a function in a function": [("model.py", "embed_tokens", "into_the_stream")],
    "the function of a layer": [("model.py", "layer(w, x, i, batch", "one_layer(w, x, i, batch"),
                                ("model.py", "partial(layer, c", "partial(one_layer, c")],
    "order of functions": [("model.py", SWIGLU, ""),
                           ("model.py", '@shard.recomputable("mlp")\ndef mix',
                            SWIGLU + '@shard.recomputable("mlp")\ndef mix')],
    "order of functions of shard.py": [
        ("shard.py", IDS, ""), ("shard.py", "def vocab_logits", IDS + "def vocab_logits")],
    "order of statements": [("shard.py", EXP_SUM + TARGET, TARGET + EXP_SUM)],
    "order of products": [
        ("model.py", QKV, 'k, q, v = shard.columns(h, w["wk"], w["wq"], w["wv"])')],
    "order of a table": [
        ("model.py", '              "mlp_norm": make("L/pipe D")}', "              }"),
        ("model.py", 'layers = {"attn_norm": make("L/pipe D"),',
         'layers = {"mlp_norm": make("L/pipe D"), "attn_norm": make("L/pipe D"),')],
    "order of a sum": [
        ("model.py", 'x = x + shard.dropout(y, c.dropout, batch.get("seeds"), 2 * i)\n',
         'x = shard.dropout(y, c.dropout, batch.get("seeds"), 2 * i) + x\n')],
    "order of a product": [("model.py", "jax.nn.silu(gate) * up", "up * jax.nn.silu(gate)")],
    "order of metrics": [("train.py", '"loss": loss_sum / divisor, "lr": rate,',
                          '"lr": rate, "loss": loss_sum / divisor,')],
    "a helper": [("model.py", ATTENTION, "    y = attention(w, x, batch, attend, c)\n"),
                 ("model.py", "def block(w, x, i, batch, attend, c):\n", HELPER)],
    "a helper that's gone": [("model.py", "swiglu(*shard.columns(h, w[\"w_gate\"], w[\"w_up\"]))",
                              "(lambda g, u: jax.nn.silu(g) * u)(*shard.columns(h, w[\"w_gate\"], "
                              "w[\"w_up\"]))")],
    "a loop": [("shard.py", LINEAR, '''    products = []
    for w in weights:
        products.append(linear(x, w, dtype))
    return products


@labelled
def row''')],
    "no loop": [("model.py", 'q, k = (rotary(a, batch["positions"], c) for a in (q, k))',
                 'q = rotary(q, batch["positions"], c)\n    k = rotary(k, batch["positions"], c)')],
    "a square": [("model.py", "jnp.mean(x32 * x32, -1,", "jnp.mean(jnp.square(x32), -1,")],
    "names for steps": [("train.py", "return optax.chain(optax.clip_by_global_norm(config.clip), ",
                         "clip = optax.clip_by_global_norm(config.clip)\n"
                         "    return optax.chain(clip, ")],
}

Y = 'y, aux = mixture_of_experts(w, h, i, batch, c) if c.experts else (mlp(w, h), None)\n'
ATTENDED = 'y = shard.row((attend(q, k, v), w["wo"]))\n'

# {name: (edit, text of the line that the report must name)}
HARMFUL = {
    "a gather over tensor for each weight of the MLP": ([
        ("model.py", MLP, 'gate, = shard.columns(h, w["w_gate"])\n'
         '    up, = shard.columns(h * 1.0001, w["w_up"])\n'
         '    return shard.row((swiglu(gate, up), w["w_down"]))')], "shard.columns(h"),
    "a gather over tensor for queries": ([
        ("model.py", QKV, 'k, v = shard.columns(h, w["wk"], w["wv"])\n'
         '    q, = shard.columns(h * 1.0001, w["wq"])')], "shard.columns(h"),
    "a gather of the whole sequence": ([
        ("model.py", ATTENDED, ATTENDED + "    y = y + 1e-9 * shard.whole_time(h).mean()\n")],
        "shard.whole_time(h)"),
    "a gather of the block's sequence": ([
        ("model.py", Y, Y + "    y = y * shard.time_of_block(h * h).mean()\n")],
        "shard.time_of_block"),
    "a gather over fsdp of all rows": ([
        ("model.py", HITS, 'total += 1e-9 * shard.all_rows(x, batch["tokens"])[0].mean()\n'
         f'        {HITS}')], "shard.all_rows"),
    "a gather of weights in the step": ([
        ("train.py", "updates, new_opt = optimizer.update(grads, opt, params)",
         "whole = jax.lax.with_sharding_constraint(params, jax.tree.map(lambda _: P(), params))\n"
         "        updates, new_opt = optimizer.update(grads, opt, params)"),
        ("train.py", '"grad_norm": grad_norm,',
         '"grad_norm": grad_norm + 1e-9 * optax.tree.norm(whole),')], "with_sharding_constraint"),
    "a gather of gradients in the step": ([
        ("train.py", "        # Skip the update if the gradient",
         "        grads = jax.lax.with_sharding_constraint(grads, jax.tree.map(lambda _: P(), "
         "grads))\n\n        # Skip the update if the gradient")], "1 / divisor"),
    "a gather of logits": ([
        ("model.py", HITS, "total += 1e-9 * head_logits(params, x, config).mean()\n"
         f"        {HITS}")], "head_logits(params, x, config).mean()"),
    "a sum over tensor": ([
        ("model.py", Y, Y + '    if shard.is_tensor_split(h):\n'
         '        y = y * lax.psum(jnp.mean(h * h), "tensor")\n')], "lax.psum"),
    "a sum over fsdp": ([
        ("model.py", Y, Y + '    if "fsdp" in shard.varying(h):\n'
         '        y = y * lax.psum(jnp.mean(h * h), "fsdp")\n')], "lax.psum"),
    "a sum over tensor instead of a scatter": ([
        ("shard.py", SCATTER, '    y = local_part(lax.psum(y, "tensor"), 1)\n')], "lax.psum(y"),
    "a permutation over tensor": ([
        ("model.py", Y, Y + '    if shard.is_tensor_split(h):\n'
         '        y = y + 1e-9 * lax.ppermute(h, "tensor", [(0, 1), (1, 0)])\n')],
        "lax.ppermute"),
    "a lost remat": ([
        ("shard.py", "return scan_layers(body, x, (weights, xs), options.remat, gathers)",
         'return scan_layers(body, x, (weights, xs), "none", gathers)')], "scan_layers("),
    "a remat of less": ([
        ("shard.py", "return scan_layers(body, x, (weights, xs), options.remat, gathers)",
         'return scan_layers(body, x, (weights, xs), "selective", gathers)')], "scan_layers("),
    "weights gathered before the loop": ([
        ("shard.py", "    layer_specs = jax.tree.map(lambda s: P(*s[1:]), specs)\n",
         "    weights, specs = gather(weights, specs, options.sum_dtype), None\n"
         "    layer_specs = specs\n")], "gather(weights, specs"),
    "an MLP that tensor doesn't split": ([
        ("model.py", 'make("L/pipe D/fsdp F/tensor", into)', 'make("L/pipe D/fsdp F", into)'),
        ("model.py", 'make("L/pipe F/tensor D/fsdp", c.d_ff', 'make("L/pipe F D/fsdp", c.d_ff')],
        '"w_down": make('),
    "a weight that fsdp doesn't split": ([
        ("model.py", 'make("L/pipe F/tensor D/fsdp", c.d_ff', 'make("L/pipe F/tensor D", c.d_ff')],
        '"w_down": make('),
    "a head that tensor doesn't split": ([
        ("model.py", '"head": make("D/fsdp V/tensor", into)', '"head": make("D/fsdp V", into)')],
        '"head": make('),
    "an embedding that tensor doesn't split": ([
        ("model.py", '"embed": make("V/tensor D/fsdp", into)', '"embed": make("V D/fsdp", into)')],
        '"embed": make('),
    "an MLP computed twice": ([
        ("model.py", Y, Y.replace("(mlp(w, h),", "(mlp(w, h) + mlp(w, h * 0.01),"))],
        "mlp(w, h * 0.01)"),
    "attention computed twice": ([
        ("model.py", ATTENDED, 'y = shard.row((attend(q, k, v) + attend(q * 0.5, k, v), w["wo"]))\n'
         )], "attend(q * 0.5"),
    "keys computed twice": ([
        ("model.py", f"    {QKV}", f"    {QKV}\n"
         '    k = k + jnp.einsum("btkn,knm->btkm", k, jnp.ones((k.shape[2], 16, 16), k.dtype))')],
        "jnp.einsum"),
    "a loss computed twice": ([
        ("train.py", "            grads, = scatter(grads)\n",
         '            twice = {**part, "weights": 2 * part["weights"]}\n'
         "            again, _ = loss(whole, whole_frozen, twice)\n"
         "            grads, sums = scatter(grads)[0], (sums[0] + 1e-9 * again, *sums[1:])\n")],
        "again, _ = loss("),
    "a lookup by a product": ([
        ("shard.py", "    return into_stream([lookup(table, here, mode=\"fill\", fill_value=0,\n"
         "                               wrap_negative_indices=False)])\n",
         "    ids = jax.nn.one_hot(here, len(table), dtype=table.dtype)\n"
         "    return into_stream([ids @ table])\n")],
        "ids @ table"),
    "a loop over the vocabulary": ([
        ("model.py", HITS, "found = lax.map(lambda i: jnp.sum(x[0, 0] * i), "
         "jnp.arange(config.vocab_size))\n"
         f"        total += 1e-9 * found.sum()\n        {HITS}")], "lax.map"),
    "a loop over the sequence": ([
        ("shard.py", "chunks = chunks or loss_chunks(*x.shape[:2], vocabulary)",
         "chunks = 16")], "shard.token_loss"),
    "logits computed twice for a token": ([
        ("model.py", "    return logits[..., :config.vocab_size]\n",
         "    logits += shard.vocab_logits(*norm_and_head(params, 2 * x, config), "
         "config.vocab_size)\n    return logits[..., :config.vocab_size]\n")],
        "shard.vocab_logits"),
}

# Edits whose cost a CPU doesn't have, because it computes and sends bfloat16 as float32.
WIDER = {
    "a float32 MLP": ([
        ("model.py", MLP, MLP.replace('w["w_up"])', 'w["w_up"], dtype=jnp.float32)').replace(
            "return shard.row((", "h, dtype = h.astype(jnp.float32), h.dtype\n    "
            "return shard.row((").replace("w_down\"]))", "w_down\"])).astype(dtype)"))],
        "swiglu(*shard.columns(h"),
    "float32 attention": ([
        ("model.py", ATTENDED, "q, k, v = (a.astype(jnp.float32) for a in (q, k, v))\n"
         "    y = shard.row((attend(q, k, v), w[\"wo\"])).astype(x.dtype)\n")],
        "attend(q, k, v)"),
    "weights gathered in float32": ([
        ("shard.py", '        return w if "fsdp" not in spec else all_gather(\n'
         '            w, "fsdp", list(spec).index("fsdp"), spec, sum_dtype)',
         '        whole = w if "fsdp" not in spec else all_gather('
         'w.astype(jnp.float32), "fsdp", list('
         'spec).index("fsdp"), spec)\n'
         "        return whole.astype(w.dtype)")],
        "all_gather(w.as"),
}
