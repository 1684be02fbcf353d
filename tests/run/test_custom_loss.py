"""Custom losses: on every mesh they have the values of one device, or are refused before anything
is written."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import data
import model
import shard
import train
from tests.common import full, net, refuses, slow
from tests.helpers import all_losses, build, learn, losses_of, make, mesh_of, program_of, tokens_of
from tests.readme import block
from zigzag.core import edited as tested
from zigzag.core.mesh import mesh_sizes
from zigzag.disk.batches import batch_shapes
from zigzag.parallel import attention
from zigzag.parallel.jaxprs import DIFFERENTIATED, names_in
from zigzag.run import custom_loss
from zigzag.run.evaluation import predict_all
from zigzag.run.task import Task


def pairs(count=64, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=16).astype(np.float32), rng.normal(size=16).astype(np.float32))
            for _ in range(count)]


def perceptron(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (16, 320)) / 4, "bias": jnp.zeros(320),
            "scale": jnp.ones(320), "down": jax.random.normal(b, (320, 16)) / 16}


def through_perceptron(p, x):
    return (jnp.tanh(x @ p["up"] + p["bias"]) * p["scale"]) @ p["down"]


def errors(p, b):
    return ((through_perceptron(p, b["x"]) - b["y"]) ** 2).sum(-1)


def a_sum(p, b):
    return errors(p, b).sum(), len(b["x"])


def in_batch_softmax(p, b):
    logits = through_perceptron(p, b["x"]) @ b["y"].T
    return -jnp.trace(jax.nn.log_softmax(logits)), len(b["x"])


def batch_statistics(p, b):
    h = b["x"] @ p["up"]
    h = jnp.tanh((h - h.mean(0)) / (h.std(0) + 0.1))
    return jnp.sum((h @ p["down"] - b["y"]) ** 2), len(b["x"])


def gentle_coupling(p, b):
    return errors(p, b).sum() * (1 + 1e-3 * jnp.tanh(b["x"].sum())), len(b["x"])


def hardest(p, b):
    return jax.lax.top_k(errors(p, b), min(6, len(b["x"])))[0].sum(), 6


def a_step_of_learning(p, b):
    def of_one(x, y):
        def error(p):
            return jnp.mean((through_perceptron(p, x) - y) ** 2)

        return error(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(error)(p)))

    return jax.vmap(of_one)(b["x"], b["y"]).sum(), len(b["x"])


def recurrent(p, b):
    """A loop that begins with zeros (which varying types do not allow on a mesh), a search, and a
    target without a gradient."""
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(0.5 * h + x @ p["up"][:4]), None),
                        jnp.zeros((len(b["x"]), 320)), b["x"].reshape(-1, 4, 4).swapaxes(0, 1))
    weight = 1 + 0.1 * jnp.searchsorted(jnp.linspace(-1, 1, 8), jax.lax.stop_gradient(h[:, 0]))
    return jnp.sum(((h @ p["down"] - b["y"]) ** 2).sum(-1) * weight), len(b["x"])


def two_stacks(p, b):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    (x, _), (y, _) = jax.lax.scan(layer, b["x"], p["a"]), jax.lax.scan(layer, b["y"], p["b"])
    return jnp.sum((x - y) ** 2), len(b["x"])


def stacks(key):
    return {"a": jax.random.normal(key, (4, 16, 16)) / 8,
            "b": jax.random.normal(key, (2, 16, 16)) / 8}


def norms(p):
    return sum(jnp.sum(w ** 2) for w in jax.tree.leaves(p))


def statistics_beside_a_metric(p, b):
    """A loss with a metric that is NaN, for which the whole check was once off."""
    none = jnp.sum(b["x"] > 99)
    return *batch_statistics(p, b), {"errors": errors(p, b)[:1].sum(), "of_none": none / none}


def branches(p, b):
    """A branch that only some groups of devices take: a collective over tensor inside it waited for
    the others for ever."""
    def of_one(row):
        x, y = row
        taken = jax.lax.cond(x[0] > 0, lambda h: h, lambda h: jnp.roll(h, 3),
                             jnp.tanh(x @ p["up"]))
        tried, _ = jax.lax.while_loop(lambda s: s[1] < 3 * jnp.abs(y[0]),
                                      lambda s: (s[0] * 0.9, s[1] + 1), (y, 0.0))
        return jnp.sum((taken @ p["down"] - tried) ** 2)

    return jax.lax.map(of_one, (b["x"], b["y"])).sum(), len(b["x"])


# -------------------------------------------------------------------------------------------
# Custom losses that call shard.py

OWN = make(layers=4, eval_every=10)     # (trained in parts here: 16 rows, --accumulate 2)
NET = OWN.network


def MASK(query, key):
    return (key["slot"][:, None, :] <= query["slot"][:, :, None])[:, None]


def own_block(causal, mask, head, schedule="gpipe", all_time=False):
    """A loss with the transformer's weights and attention of its own, through pipelined_loss."""
    def embed(p, batch):
        return shard.embed_lookup(p["embed"], batch["tokens"]) * NET.d_model**0.5

    def block(w, x, i, batch):
        q, k, v = shard.columns(model.norm(x, w["attn_norm"], NET), w["wq"], w["wk"], w["wv"])
        info = {"slot": jnp.broadcast_to(shard.slots_of(q), q.shape[:2])}
        a = shard.attend(attention.softmax_attention, q, k, v, mask, info, info,
                         attention.AttendOptions(causal))
        x = x + shard.row((a, w["wo"]))
        up, = shard.columns(model.norm(x, w["mlp_norm"], NET), w["w_up"])
        return x + shard.row((jax.nn.gelu(up), w["w_down"])), None

    def loss(p, b, specs=None):
        others = {k: w for k, w in p.items() if k != "layers"}
        return shard.pipelined_loss(embed, block, head, others, p["layers"],
                                    b, specs and specs["layers"],
                                    shard.Options("none", 2, schedule),
                                    all_time=all_time)

    return loss


def everywhere(query, key):
    return jnp.ones((len(query["slot"]), 1, query["slot"].shape[1], key["slot"].shape[1]), bool)


def each_token(p, x, batch):
    total, _ = shard.token_loss(model.norm(x, p["norm"], NET), p["head"], batch["targets"],
                                batch["weights"], NET.vocab_size)
    return total, jnp.sum(batch["weights"])


def of_labels(logits, batch):
    """The log probability of each row's label."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]


def pooled(p, x, batch):
    x = model.norm(x, p["norm"], NET).mean(1)
    return -jnp.sum(of_labels(x @ p["head"][:, :8], batch)), jnp.sum(batch["one"])


def pooled_by_weights(p, x, batch):
    x = shard.whole_time(model.norm(x, p["norm"], NET)).mean(1)
    rows = of_labels(x @ p["head"][:, :8], batch)
    return -jnp.sum(rows * batch["weights"].sum(1)), jnp.sum(batch["weights"])


def classified(p, x, batch):
    """A classifier of the first token; its count is the number of rows, whatever the weights."""
    first = shard.whole_time(model.norm(x, p["norm"], NET))[:, :1]
    logits = shard.vocab_logits(first, p["head"], 61)[:, 0, :8]
    return -jnp.sum(of_labels(logits, batch)), jnp.sum(batch["one"])


def first_token(whole):
    """A loss of only the first token, picked from all of the time or from a device's part."""
    def head(p, x, batch):
        x = (shard.whole_time(x) if whole else x)[:, :1]
        x = model.norm(x, p["norm"], NET)
        total, _ = shard.token_loss(x, p["head"], batch["targets"][:, :1], batch["weights"][:, :1],
                                    NET.vocab_size)
        return total, jnp.sum(batch["weights"][:, :1])

    return own_block(True, MASK, head, all_time=whole)


def a_step_of_the_transformers(p, b, specs=None):
    def of_one(row):
        row = jax.tree.map(lambda x: x[None], row)

        def mean(p):
            s, c = net.loss(p, row, OWN, specs)
            return s / c

        return mean(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(mean)(p)))

    return jax.vmap(of_one)({k: b[k] for k in ("tokens", "targets", "weights")}).sum(), len(
        b["tokens"])


def own_masks(p, b, specs=None):
    return net.loss(p, {**b, "weights": b["weights"] * b["mask"]}, OWN, specs)


def penalised(p, b, specs=None):
    s, c = net.loss(p, b, OWN, specs)
    return s + 1e-2 * c * norms(p), c


VECTORS = dict(init=perceptron, collate=lambda e: dict(zip("xy", map(np.stack, zip(*e)))),
               examples=pairs(), held_out=pairs(13, 9))
TOKENS = dict(init=lambda key: net.init(OWN, key), examples=tokens_of(OWN),
              held_out=tokens_of(OWN, 13, 5), collate=lambda e: {
                  **data.collate(e, 16), "label": np.array([x[0] % 8 for x in e]),
                  "one": np.ones(len(e), "float32"),
                  "mask": (np.stack(e)[:, :-1] % 3 == 0).astype("float32")})
INSIDE = "takes a gradient inside itself"
# What differs, on which axes or parts, and what a loss must be.
SUM, POOLS = (
    rf"{where}.*: this loss differs from one device's: .* by [\d.inf]+%.*{what}"
    for where, what in (("^--", "must be a sum over rows"), ("^--mesh", "use shard.py for")))
# {name: (loss, its arguments, {axis that it cannot have ("": any split of the rows): why})}
THEIRS = {
    "a sum": (a_sum, VECTORS, {"pipe": "shard.pipelined_loss", "seq": "shard.attend"}),
    "coupled rows": (in_batch_softmax, VECTORS, {"": SUM}),
    "batch statistics": (batch_statistics, VECTORS, {"": SUM}),
    "a gentle coupling": (gentle_coupling, VECTORS, {"": SUM}),
    "the hardest of a batch": (hardest, VECTORS, {"": SUM}),
    "statistics beside a metric": (statistics_beside_a_metric, VECTORS, {"": SUM}),
    "branches": (branches, VECTORS, {}),
    "a mean": (lambda p, b: (errors(p, b).mean(), 1), VECTORS, {"": SUM}),
    "a constant count": (lambda p, b: (errors(p, b).sum(), 1), VECTORS, {"": SUM}),
    "a penalty": (lambda p, b: (errors(p, b).sum() + norms(p), len(b["x"])), VECTORS, {"": SUM}),
    "one scalar": (lambda p, b: errors(p, b).mean(), VECTORS, {"": "two scalars"}),
    "a count of zero": (lambda p, b: (0 * errors(p, b).sum(), 0 * b["x"].sum()), VECTORS, {}),
    "a step of learning": (a_step_of_learning, VECTORS, {}),
    "a loop, a search, a stop": (recurrent, VECTORS, {}),
    "two stacks": (two_stacks, {**VECTORS, "init": stacks}, {}),
    "attention both ways": (own_block(False, everywhere, each_token), TOKENS, {}),
    "attention both ways, 1F1B": (own_block(False, everywhere, each_token, "1f1b"), TOKENS, {}),
    "a pooled loss": (own_block(True, MASK, pooled), TOKENS,
                      {"pipe": POOLS, "seq": "the number of rows", "tensor": POOLS}),
    "a pooled loss by weights": (own_block(True, MASK, pooled_by_weights, all_time=True), TOKENS,
                                 {}),
    "a classifier": (own_block(False, everywhere, classified, all_time=True), TOKENS, {}),
    # (A first token that each stage would pick from its own part of the time.)
    "a head that does not say that it needs all time": (
        own_block(False, everywhere, classified), TOKENS, {"pipe": "give pipelined_loss all_time"}),
    "a classifier, 1F1B": (own_block(False, everywhere, classified, "1f1b", True), TOKENS, {}),
    "the first of all tokens": (first_token(True), TOKENS, {}),
    "the first of a part": (first_token(False), TOKENS,
                            {"pipe": POOLS, "seq": "divides by", "tensor": POOLS}),
    "a step of the transformer's": (a_step_of_the_transformers, TOKENS,
                                    {"pipe": INSIDE, "seq": INSIDE}),
    "masks of its own": (own_masks, TOKENS, {}),
    "a penalty by its count": (penalised, TOKENS, {"pipe": POOLS,
                                                   "tensor": "must use them"}),
    "a count of places": (lambda p, b, specs=None: (net.loss(p, b, OWN, specs)[0],
                                                    b["tokens"].size), TOKENS,
                          {"seq": "is a constant, the number of rows"}),
}


@functools.cache
def theirs(name, mesh="", **changes):
    """The losses of a custom loss in 20 steps and two evaluations."""
    loss, given, _ = THEIRS[name]
    return all_losses(learn(dataclasses.replace(OWN, batch=16, **changes), mesh, loss=loss,
                            **given)[0])


ADVICE = "any loss that is a sum over rows|not a mean"


# {name: the meshes of its longer cases}
MESHES = {
    "coupled rows": ["data=2"],
    "batch statistics": ["tensor=2"],
    "a gentle coupling": ["fsdp=2"],
    "the hardest of a batch": ["data=2"],
    "statistics beside a metric": ["data=2"],
    "a mean": ["data=4"],
    "a constant count": ["expert=2"],
    "a penalty": ["fsdp=2,tensor=2"],
    "one scalar": ["data=2"],
    "a count of zero": ["data=2"],
    "a step of learning": ["data=2,fsdp=2,tensor=2"],
    "a loop, a search, a stop": ["fsdp=4,tensor=2", "expert=2,data=2"],
    "two stacks": ["data=2,fsdp=2"],
    "attention both ways": ["seq=2", "fsdp=2,tensor=2", "seq=4,tensor=2"],
    "a pooled loss": ["pipe=2", "seq=2", "tensor=2"],
    "the first of a part": ["tensor=2"],
    "a step of the transformer's": ["pipe=2", "fsdp=2,tensor=2", "seq=2"],
    "a count of places": ["seq=2", "pipe=2"],
    "a classifier": ["seq=2", "pipe=4", "pipe=2,tensor=2", "data=2,pipe=2,seq=2", "seq=4",
                     "fsdp=2,seq=2,tensor=2", "pipe=2"],
    "a classifier, 1F1B": ["pipe=2,seq=2", "pipe=4"],
    "a pooled loss by weights": ["seq=2", "data=2,seq=2"],
    "attention both ways, 1F1B": ["pipe=2,seq=2", "pipe=2,tensor=2"],
    "the first of all tokens": ["data=2,tensor=2", "pipe=2"],
    "masks of its own": ["pipe=2,seq=2", "fsdp=2,tensor=2"],
    "a penalty by its count": ["fsdp=2", "fsdp=2,tensor=2", "pipe=2"],
}


@pytest.mark.parametrize("name, mesh", [
    ("a sum", "pipe=2"), ("a sum", "data=2,seq=2"), ("branches", "data=2,tensor=2"),
    ("a head that does not say that it needs all time", "pipe=2"),
    *(full(name, mesh) for name, meshes in MESHES.items() for mesh in meshes)])
def test_a_custom_loss_is_right_or_refused(name, mesh):
    """A custom loss that silently has other values on other meshes, or ends inside jax: coupled
    rows, a pooled loss in a pipeline, an inner gradient under fsdp and in its evaluation, a
    bidirectional encoder on a ring."""
    sizes = mesh_sizes(mesh)
    says = next((why for axis, why in THEIRS[name][2].items()
                 if axis == "" or sizes.get(axis, 1) > 1), None)
    if says:
        with refuses(says) as e:
            theirs(name, mesh, accumulate=2)
        assert "\n" not in str(e.value) and re.search(ADVICE, str(e.value))
        return
    got, want = theirs(name, mesh, accumulate=2), theirs(name)
    assert np.isfinite(got).all() and len(got) == 22
    # A small loss is a difference of logits that are not small, so its rounding error is the first
    # loss's. (A classifier's loss ends at a seventieth of the first; 0.9e-6 of the first was seen.)
    assert got == pytest.approx(want, rel=5e-5, abs=2e-6 * abs(want[0]))
    assert got[0] == pytest.approx(want[0], rel=2e-6)


def compared(p, b):
    """The loss of docs/tasks.md that compares each row with all rows of the batch."""
    there = dict(shard=shard, jax=jax, jnp=jnp, vectors=lambda p, b: (
        b["y"], through_perceptron(p, b["text"])))
    exec(block("docs/tasks.md", "shard.all_rows(texts"), there)
    return there["loss"](p, {"y": b["y"], "text": b["x"]})


@pytest.mark.parametrize("mesh", [full("data=4"), "data=2,fsdp=2,tensor=2", full("fsdp=2,expert=2"),
                                  full("tensor=2")])
def test_a_loss_may_compare_all_rows(mesh):
    """A row compared with those of its own device; a gradient that other devices' comparisons do
    not add to; a last batch of held-out rows (five, after eight) that is cut on a mesh and not on
    one device. Parts of a batch would be compared among themselves."""
    def losses(mesh, **changes):
        return all_losses(learn(make(batch=8, **changes), mesh, loss=compared, **VECTORS)[0])

    got, want = losses(mesh), losses("")
    assert got == pytest.approx(want, rel=5e-5) and got[0] == pytest.approx(want[0], rel=2e-6)
    with refuses(f"{SUM}.*accumulate 1"):
        losses(mesh, accumulate=2)


def noisy(seeds):
    """a_sum, with noise from these seeds of a batch's rows."""
    def loss(p, b):
        noise = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (16,)))(seeds(b))
        return a_sum(p, {**b, "x": b["x"] + noise})

    return loss


def numbers(b):
    return jnp.arange(len(b["x"]))


def table(p, b):
    return jnp.sum(errors(p, b) * jnp.linspace(0.5, 2, 16)[:len(b["x"])]), len(b["x"])


def neighbours(p, b):
    return jnp.sum((b["x"] * jnp.roll(through_perceptron(p, b["x"]), 1, 0)) ** 2), len(b["x"])


def drawn_outside(p, b):
    return jnp.sum(errors(p, b) * np.random.uniform(0.5, 2)), len(b["x"])


def coupled_where_held_out(p, b):
    return a_sum(p, b) if "seeds" in b else batch_statistics(p, b)


def coupled_in_a_block(p, b, specs=None):
    """Statistics over the rows of a microbatch."""
    def block(w, x, i, batch):
        return x + jnp.tanh((x - x.mean(0)) @ w["wq"][:, 0] @ w["wo"][0]), None

    def head(p, x, batch):
        logp = jax.nn.log_softmax(x @ p["head"])
        return (-jnp.take_along_axis(logp, batch["targets"][..., None], -1).sum(),
                batch["targets"].size)

    return shard.pipelined_loss(
        lambda p, batch: p["embed"][batch["tokens"]], block, head,
        {k: p[k] for k in ("embed", "head")}, p["layers"], b, specs and specs["layers"],
        shard.Options(microbatches=2))


def counted_over_all_time(p, b, specs=None):
    s, _ = net.loss(p, b, OWN, specs)
    return s, shard.sum_over_time(jnp.sum(b["weights"]))


@pytest.mark.parametrize("loss, mesh, changes, says", [
    full(noisy(lambda b: b.get("seeds", numbers(b))), "data=2", {},
     "--mesh data=2: this loss differs .*the held-out sum by .*'seeds'"),
    full(noisy(numbers), "", dict(accumulate=2),
         f"{SUM}.*--accumulate 1"),
    full(lambda p, b, specs=None: table(p, b), "data=2", {}, SUM),
    full(neighbours, "data=2", {}, SUM),
    full(coupled_where_held_out, "data=2", {}, "the held-out sum by"),
    (drawn_outside, "data=2", {}, "not a function of its weights and its batch: .*np.random"),
    full(coupled_in_a_block, "pipe=2", dict(microbatches=2),
         "--microbatches 2: this loss .*a sum over rows"),
    (counted_over_all_time, "seq=2", {}, "or a sum over the whole sequence"),
    (lambda p, b: (errors(p, b).reshape(2, 8).sum(), len(b["x"])), "data=2", {},
     "works for 16 rows, but not for 8"),
    (noisy(lambda b: b["seeds"]), "", {}, r"batch\['seeds'\], which a held-out batch does not"),
    (lambda p, b: (errors(p, b), len(b["x"])), "", {}, r"it returned \(.*\[16\].*\)")],
    ids=["noise held out", "noise", "table", "neighbours", "held out", "outside", "microbatches",
         "count", "rows", "seeds", "each row"])
def test_a_refusal_says_what_the_cause_is(loss, mesh, changes, says):
    """Noise by a row's number was said to be code that picks positions of the time; a batch norm in
    a pipeline, too; np.random, to be a loss that is not a sum. A refusal says what splits the
    batch, what differs, and by how much."""
    given = TOKENS if loss in (coupled_in_a_block, counted_over_all_time) else VECTORS
    with refuses(says):
        learn(make(layers=4, batch=16, **changes), mesh, loss=loss, **given)


KEY, MASK = jax.random.key(0), np.array([np.nan, 1], "float32")


def of_odd_constants(p, b):
    """By numpy, a random key is not equal to itself, nor an array with NaN. And a loop that can be
    traced in bfloat16 alone."""
    def add(h, row):
        return h + row, None

    h, _ = jax.lax.scan(add, jnp.zeros(16, "bfloat16"), b["x"].astype("bfloat16") @ p["up"][:, :16])
    noise = jax.random.normal(jax.random.fold_in(KEY, 1), (16,))
    each, _ = shard.all_rows(jnp.where(jnp.isnan(MASK).any(), 1, 2) * b["x"] * noise, b["x"])
    return jnp.sum(h.astype("float32")) + jnp.sum(each), len(b["x"])


def drawn_outside_by_a_function_of_shard(p, b):
    return drawn_outside(p, {**b, "x": shard.all_rows(b["x"], b["x"])[0]})


def test_one_device_has_nothing_to_be_compared_with(monkeypatch):
    """A comparison that takes minutes for a big model, and a batch that was never made; a loss that
    is refused only because a constant of it is odd; np.random, which nothing else finds there."""
    monkeypatch.setattr(custom_loss, "_find_difference", None)
    config, lines = make(batch=16, steps=1, dtype="bfloat16"), []
    learn(config, "", lines, loss=of_odd_constants, **VECTORS)
    assert not any("as on one device" in line for line in lines)
    with refuses("not a function of its weights"):
        learn(config, "", loss=drawn_outside_by_a_function_of_shard, **VECTORS)
    with refuses("not callable"):  # (the comparison was taken away)
        learn(config, "data=2", loss=of_odd_constants, **VECTORS)


def test_a_custom_pipeline_may_have_more_stages_than_model_py_has_layers():
    """A start that divides by the layers of a model that is not trained."""
    def loss(p, b, specs=None):
        sums = shard.pipelined_loss(
            lambda p, b: b["x"][:, None] @ p["into"],
            lambda w, x, i, b: (x + jnp.tanh(x @ w), None),
            lambda p, x, b: (jnp.sum((x.mean((1, 2)) - b["x"].sum(-1)) ** 2), len(b["x"])),
            {"into": p["into"]}, p["layers"], b, specs and specs["layers"],
            shard.Options(microbatches=2), all_time=True)
        return sums[:2]

    def init(key):
        return {"into": jax.random.normal(key, (2, 16)),
                "layers": 0.1 * jax.random.normal(key, (8, 16, 16))}

    rows = [np.float32([i, 1]) for i in range(64)]
    want, found = (losses_of(learn(
        make(layers=2, batch=16, steps=2, microbatches=2), mesh, init=init, loss=loss,
        collate=lambda rows: {"x": np.stack(rows)}, examples=rows)[0]) for mesh in ("", "pipe=8"))
    assert len(want) == 2 and found == pytest.approx(want, rel=1e-5)


@pytest.mark.full
def test_noise_by_the_seeds_of_a_batch_trains_anywhere():
    """The way out that a refusal names is refused, too."""
    loss = noisy(lambda b: b.get("seeds", (1000 * jnp.abs(b["x"][:, 0])).astype("uint32")))
    one, other = (all_losses(learn(make(steps=3, batch=16, **more), mesh, loss=loss, **VECTORS)[0])
                  for mesh, more in (("", {}), ("data=2", dict(accumulate=2))))
    assert other == pytest.approx(one, rel=5e-5)


@pytest.mark.parametrize("name", ["coupled rows", slow("a penalty"), slow("a mean")])
def test_where_a_loss_is_refused_the_step_that_is_named_trains_it(name):
    """Its evaluation, too: batches of held-out examples are those of one device there."""
    assert theirs(name, "data=2,tensor=2", collectives="compiler") == pytest.approx(
        theirs(name), rel=5e-5)
    assert theirs(name, "tensor=2") == pytest.approx(theirs(name), rel=5e-5)


def test_a_refused_loss_leaves_nothing_behind(tmp_path):
    """A run that is refused after its folder was made blocks the next one."""
    loss, given, _ = THEIRS["coupled rows"]
    with refuses("--mesh data=2: .*--collectives compiler --accumulate 1"):
        learn(make(batch=16, out=str(tmp_path / "run")), "data=2", loss=loss, **given)
    assert not list(tmp_path.iterdir())


def run(loss, mesh, steps=3, batch=16, **given):
    rows, result = learn(make(steps=steps, batch=batch), mesh, loss=loss,
                         **{**VECTORS, "held_out": (), **given})
    return losses_of(rows), result.params, rows


@pytest.mark.full
def test_weights_of_16_bits_or_of_no_elements_train():
    """Both ended inside jax."""
    def of_16(key):
        return jax.tree.map(lambda w: w.astype("bfloat16"), perceptron(key))

    def empty(key):
        return {**perceptron(key), "none": jnp.zeros((4, 0))}

    one, mesh = (run(a_sum, mesh, init=of_16)[0] for mesh in ("", "data=2,tensor=2"))
    assert mesh == pytest.approx(one, rel=2e-2)
    assert run(a_sum, "fsdp=2", init=empty)[0] == pytest.approx(run(a_sum, "")[0])


@pytest.mark.full
def test_a_loss_may_print_and_distil(capfd):
    """A print inside the loss, and what an earlier run gave back, off its mesh: each ended inside
    jax."""
    def prints(p, b):
        jax.debug.print("one is {}", jnp.float32(1))
        return a_sum(p, b)

    want, params, _ = run(a_sum, "fsdp=2")
    assert run(prints, "data=2,tensor=2")[0] == pytest.approx(want)
    assert "one is 1.0" in capfd.readouterr().out

    def distils(teacher, p, b):
        made = through_perceptron(p, b["x"]) - through_perceptron(teacher, b["x"])
        return jnp.sum(made ** 2), len(b["x"])

    with refuses("jax.device_get copies them off.*--collectives compiler"):
        run(functools.partial(distils, params), "data=2")
    distils = functools.partial(distils, jax.device_get(params))
    assert run(distils, "data=2")[0] == pytest.approx(run(distils, "")[0])


def test_other_sums_may_be_arrays_that_add_up_over_rows():
    """A sum of each column is logged; one number for each row was cut to a device's rows."""
    def by_place(p, b):
        gaps = (through_perceptron(p, b["x"]) - b["y"]) ** 2
        return *a_sum(p, b), {"by_place": gaps.sum(0)}

    (one, *_), (other, *_) = (run(by_place, mesh)[2] for mesh in ("", "data=2"))
    assert len(one["by_place"]) == 16
    # (Arrays are logged with five decimals: rounding may differ by one of the last.)
    assert other["by_place"] == pytest.approx(one["by_place"], rel=1e-6, abs=1.1e-5)
    with refuses("what adds up over rows"):
        run(lambda p, b: (*a_sum(p, b), {"rows": errors(p, b)}), "data=2")


# -------------------------------------------------------------------------------------------
# How fine the check is

def with_table(key):
    return {**perceptron(key), "table": jax.random.normal(key, (20000, 64)), "q": jnp.eye(16)}


def rounded(p, b):
    made = through_perceptron(p, b["x"]).astype("bfloat16").astype("float32")
    return ((made - b["y"]) ** 2).sum(), len(b["x"])


def aside(p, b):
    logits = b["x"] @ p["q"] @ b["y"].T
    return errors(p, b).sum() - 3e-6 * jnp.trace(jax.nn.log_softmax(logits)), len(b["x"])


@pytest.mark.parametrize("wrong", [
    pytest.param(lambda p, b: (errors(p, b).sum() + 0.12, len(b["x"])), marks=pytest.mark.full),
    aside,
    pytest.param(lambda p, b: (rounded(p, b)[0] + 12, len(b["x"])), marks=pytest.mark.full)],
    ids=["plus", "aside", "rounded plus"])
@pytest.mark.full
def test_the_check_is_as_fine_as_rounding_lets_it_be(wrong):
    """A large table that nothing depends on, or one cast to 16 bits, hid sums that were wrong by a
    sixth; a leaf whose gradient is small learns as fast as others."""
    with refuses(SUM):
        run(wrong, "data=4", batch=8, init=with_table)


@pytest.mark.full
def test_a_right_loss_with_16_bits_in_it_passes():
    """A correct loss with some 16-bit numbers, refused by the bounds of float32."""
    one, mesh = (run(rounded, mesh, 2, 8, init=with_table)[0] for mesh in ("", "data=2,tensor=2"))
    assert mesh == pytest.approx(one, rel=1e-2)


@pytest.mark.full
def test_what_wraps_the_transformers_loss_is_another():
    """A wrapper of the transformer's loss taken for that loss itself, by its name or attributes."""
    ours = train.language(make())[1]

    @functools.wraps(ours)
    def wraps(p, b, specs=None):
        s, c, *_ = ours(p, b, specs=specs)
        return s + norms(p), c

    with refuses(SUM):
        learn(make(), "data=4", loss=wraps)


@pytest.mark.full
def test_rounds_of_experts_are_no_difference():
    """A loss refused because tokens travel to their experts in several rounds, and one device
    needs none."""
    config = make(steps=1, experts=4, expert_room=0.3)
    rows, _ = learn(config, "expert=2", loss=lambda p, b, specs=None: net.loss(
        p, b, config.network, specs, with_aux=True))
    assert rows[0]["expert_rounds"] > 1


def test_what_cannot_be_checked_is_said():
    lines = []
    learn(make(steps=1), "data=2", lines, loss=lambda p, b: (
        jnp.log(-1 - jnp.sum(p["up"] ** 2)) + errors(p, b).sum(), 8), **VECTORS)
    assert any("not checked" in line for line in lines)


def test_what_types_do_not_allow_is_computed_as_on_one_device():
    """A loop that begins with zeros, in a loss with specs, which ended inside jax because of
    varying types."""
    lines = []
    one, mesh = (run(lambda p, b, specs=None: recurrent(p, b), mesh, 2, lines=lines)[0]
                 for mesh in ("", "data=2"))
    assert mesh == pytest.approx(one, rel=5e-5)
    assert sum("runs as on one device" in line for line in lines) == 1


def test_differences_are_counted_in_what_rounding_may_do():
    """A wrong tolerance. By hand: a share of the number, plus four times the measured rounding; NaN
    on both sides is equal, on one side infinitely far."""
    def times(name, *value):
        found = {name: custom_loss.Value(*map(np.float32, value)),
                 "the gradient of v": custom_loss.Value(*np.float32([0, 10, 0]))}
        return custom_loss._times_allowed(found, is_narrow=False)[name]

    def norm(a, b):
        return float(custom_loss._norm(jnp.float32(a), jnp.float32(b)))

    assert times("the count", 0, 4, 0) == 0
    assert times("the sum", 0.006, 100, 0) == pytest.approx(0.006 / (3e-5 * 100), rel=1e-2)
    assert times("the sum", 0.006, 100, 0.01) == pytest.approx(0.006 / 0.043, rel=1e-2)
    assert times("the gradient of w", 0.03, 10, 0.002) == pytest.approx(
        0.03 / (2e-4 * 10 + 0.008), rel=1e-3)
    assert times("the gradient of w", np.nan, 10, 0) == np.inf
    assert times("its other sum 'm'", norm(np.nan, np.nan), np.nan, np.nan) == 0
    assert times("the sum", norm(np.nan, 100), 100, 0) == np.inf
    assert norm(np.inf, np.inf) == 0 and norm(3, 1) == 2


def test_the_transformers_own_loss_is_not_checked_at_each_start(monkeypatch):
    """Commands for the transformer that compile twice."""
    monkeypatch.setattr(train, "check_loss", None)
    learn(make(steps=1), "data=2")
    with pytest.raises(TypeError):
        learn(make(steps=1), "data=2", loss=lambda p, b: net.loss(p, b, make()))


# -------------------------------------------------------------------------------------------
# The facts that a plan finds by tracing

def program_on(mesh, given, loss, **changes):
    """The program of these arguments of a task with this loss."""
    shapes = batch_shapes(8, given["collate"](given["examples"][:1]))
    return build(make(**changes), mesh_of(mesh), given["init"], loss, shapes)


def test_what_is_decayed_does_not_follow_from_the_rows_of_a_device():
    """A scale s that decays on eight devices and not on one: with one row, x * s has the shape of a
    product with a matrix."""
    def init(key):
        return {**perceptron(key), "scale": jnp.ones((1, 320))}

    for mesh in ("", "fsdp=8", "tensor=8", "data=4,tensor=2"):
        program = program_on(mesh, {**VECTORS, "init": init}, a_sum)
        matrices = {k for k, d in program.plan.decisions.items() if d.is_matrix}
        assert matrices == {"up", "down"}, mesh


def test_a_gradient_inside_a_loss_is_seen():
    """A gradient inside a loss that is not found, under jit or vmap; a stop_gradient that counts as
    one."""
    config = make()
    given = net.init(config, jax.random.key(0)), data.collate(tokens_of(config, 2), 16)

    def plain(p, b):
        return net.loss(p, b, config)[0]

    def inside(p, b):
        return optax.tree.norm(jax.grad(jax.jit(plain))(p, b))

    def stopped(p, b):
        return plain(jax.lax.stop_gradient(p), b)

    assert DIFFERENTIATED in names_in(inside, *given) >= {"pipelined_loss", "attend"}
    assert DIFFERENTIATED not in names_in(stopped, *given) >= {"pipelined_loss", "attend", "row"}


@pytest.mark.parametrize("loss, mode", [
    (a_sum, "untyped"), (a_step_of_the_transformers, "untyped"),
    (branches, "untyped, tensor whole"),
    (THEIRS["a pooled loss"][0], "by hand"), (own_masks, "by hand"),
    (lambda p, b, specs: a_sum(p, b), "typed")],
    ids=["none", "a gradient inside", "branches", "pooled", "masks", "specs"])
def test_how_a_loss_runs_follows_from_what_it_calls(loss, mode):
    """A loss that calls `columns` left to the compiler over tensor; one without `columns` that is
    not."""
    given = TOKENS if mode == "by hand" or loss is a_step_of_the_transformers else VECTORS
    for mesh, size in (("data=2,tensor=2", 2), ("data=2", 1)):
        program = program_on(mesh, given, loss)
        alone = mode == "untyped" and size == 1     # nothing is left to split
        assert program.plan.mode == ("untyped, tensor whole" if alone else mode), mesh
    assert program_on("data=2", given, loss, collectives="compiler").plan.mode == "jit"


def edited_mlp(w, h):
    """model.mlp after a fork's edit: minus the mean over the time, of which a device has a part."""
    return MLP(w, h - h.mean(1, keepdims=True))


MLP = model.mlp


@pytest.mark.full       # (.ci/run has the next tests, and the command in test_tested.py)
def test_check_compares_an_edited_model_with_one_device(monkeypatch):
    """An edit of the model that is right on one device and another model on a mesh. Without --check
    nothing compares our own loss at the start of a run."""
    config, lines = make(steps=2, check=True), []
    learn(config, "data=2,tensor=2", lines)
    assert any("match one device" in line for line in lines)
    monkeypatch.setattr(model, "mlp", edited_mlp)
    lines.clear()
    with refuses("tensor=2"):
        learn(config, "tensor=2", lines)
    rows, _ = learn(config, "", lines)                  # (one device is one device)
    assert any("match one device" in line for line in lines)
    assert rows != learn(make(steps=2), "tensor=2")[0]  # without --check it trains something else


def edited_since(text, asked):
    """In place of tested.why_untested: says this text, and adds what was asked to `asked`."""
    def why_untested(names):
        asked.append(names)
        return text

    return why_untested


@pytest.mark.full
def test_an_edited_model_is_compared_until_test_all_has_passed(monkeypatch):
    """A wrong edit that trains in silence to another loss; a right one that is refused, or no
    longer runs as the network's own; one device that compares itself with itself."""
    asked, lines, config = [], [], make(steps=2)
    monkeypatch.setattr(tested, "why_untested", edited_since("model.py was edited", asked))
    for mesh, changes in (("", {}), ("", dict(accumulate=2)),
                          ("tensor=2", dict(collectives="compiler"))):
        learn(make(steps=2, **changes), mesh, lines)
    assert not asked and not any("check  " in line for line in lines)
    rows, _ = learn(config, "data=2,tensor=2", lines)
    first, last = [line for line in lines if "check  " in line]
    assert asked == [["model.py", "shard.py", "train.py", *tested.MACHINERY]]
    assert first == ("check    model.py was edited: comparing the loss and its gradients with one "
                     "device's")
    assert re.fullmatch(r"check    .* match one device's \(\d+\.\d s\)", last)
    monkeypatch.setattr(tested, "why_untested", edited_since("", asked))
    assert learn(config, "data=2,tensor=2")[0][0]["loss"] == rows[0]["loss"]
    monkeypatch.setattr(tested, "why_untested", edited_since("model.py was edited", asked))
    monkeypatch.setattr(model, "mlp", edited_mlp)
    with refuses("--mesh tensor=2: .* on data and fsdp, and any"):
        learn(config, "tensor=2")
    learn(config, "")


def test_each_process_compares_what_one_of_them_finds_edited(monkeypatch):
    """Processes of which only some compare: the others never come to the collectives."""
    plan, asked = program_of(make(), "tensor=2").plan, []
    monkeypatch.setattr(tested, "why_untested", edited_since("", asked))
    monkeypatch.setattr(custom_loss, "process_allgather", lambda why: [why, "shard.py was edited"])
    assert custom_loss._why_untested(plan) == "shard.py was edited"
    other = program_of(make(norm="layer"), "tensor=2").plan
    custom_loss._why_untested(other)
    own = dataclasses.replace(plan.network, loss=edited_mlp)        # of a file of nobody's tests
    custom_loss._why_untested(dataclasses.replace(plan, network=own))
    assert [names[0] for names in asked] == ["model.py", "published", __file__]


@pytest.mark.full
def test_a_comparison_of_nothing_does_not_pass(monkeypatch):
    """"Those of one device" of a loss whose gradient is zero, so that nothing was compared."""
    monkeypatch.setattr(model, "norm_and_head", lambda params, x, c: (
        0 * x, jnp.zeros((c.d_model, 128))))
    lines = []
    learn(make(steps=1, check=True), "data=2", lines)
    assert any("is not checked on this mesh" in line for line in lines)
    assert not any("match one device" in line for line in lines)


def test_many_rows_of_three_numbers():
    """Wrong sums by jaxlib 0.10.2's kernels for a CPU (see core/chips.py), in the loss or in
    what is predicted."""
    x, w = (np.random.default_rng(s).normal(size=(s, 3)).astype(np.float32) for s in (40001, 3))

    def each_square(p, b):
        return jax.vmap(lambda row: jnp.sum((p["w"] @ row)**2))(b["x"])

    def squares(p, b):
        return jnp.sum(each_square(p, b)), jnp.float32(len(b["x"]))

    program = build(
        dataclasses.replace(OWN, batch=len(x)), mesh_of(""), lambda key: {"w": jnp.asarray(w)},
        squares, {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})
    with jax.set_mesh(program.mesh):
        found, *_ = program.evaluate({"w": w}, {"x": x}, {})
        task = Task(program.plan.init, lambda rows: {"x": np.stack(rows)}, squares, each_square,
                    held_out=x)
        each = predict_all(program, task, {"w": w}, len(x))
    want = ((x.astype(np.float64) @ w.T)**2).sum(1)
    assert float(found) == pytest.approx(want.sum(), rel=1e-5)
    assert each == pytest.approx(want, rel=1e-4, abs=1e-4)
