"""The same loss, gradient and weights on every mesh: drawn meshes, and the table of the pages."""

import functools
import itertools

import jax
import numpy as np
import pytest

import model
import train
from tests.common import check_network
from tests.helpers import assert_same_copies, assert_same_gradient, make, run_updates
from tests.parts import of_the_whole
from tests.readme import LOSS_PAGES, LOSSES
from zigzag.core.errors import ConfigError
from zigzag.core.flags import parse_flags
from zigzag.core.mesh import AXES, make_mesh

# -------------------------------------------------------------------------------------------
# Drawn meshes

# Every factorisation of 8 devices over the six axes, and every way of going through the layers.
SHAPES = [dict(zip(AXES, sizes)) for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES))
          if np.prod(sizes) == 8]
MODELS = [dict(), dict(tied=True, parallel_block=True, kv_heads=2),
          dict(experts=8, shared_experts=1),
          dict(dropout=0.1, experts=4, parallel_block=True)]
# What tensor does not divide: heads that each device has whole, and key heads that are repeated.
UNDIVIDED = [
    ("fsdp=2,tensor=4", dict(heads=6, head_dim=4, layers=2), dict(accumulate=2)),
    ("pipe=2,tensor=4", dict(heads=6, head_dim=4, kv_heads=3, layers=4),
     dict(schedule="interleaved", chunks=2, microbatches=2)),
    ("seq=2,tensor=4", dict(heads=9, head_dim=4, kv_heads=3, layers=2, d_ff=60), dict(zero=1)),
    ("expert=2,tensor=4", dict(heads=6, head_dim=4, layers=2, experts=4, parallel_block=True),
     dict(remat="full")),
    ("data=2,tensor=4", dict(heads=12, head_dim=4, kv_heads=6, layers=2, tied=True), {}),
    ("pipe=2,seq=2,tensor=2", dict(heads=3, head_dim=4, layers=2, experts=4, d_ff=30),
     dict(schedule="1f1b", microbatches=2)),
]


def everything(**changes):
    """8 heads, and no clipping."""
    return make(**{**dict(heads=8, head_dim=4, batch=16, clip=1e9), **changes})


def draws(count, seed=0):
    """Meshes with what else a run may choose, at random: (mesh, model, the rest)."""
    rng, drawn = np.random.default_rng(seed), []
    while len(drawn) < count:
        mesh = SHAPES[rng.integers(len(SHAPES))]
        what = dict(MODELS[rng.integers(len(MODELS))], layers=8 if mesh["pipe"] == 8 else 4)
        rest = dict(remat=rng.choice(["none", "selective", "full"]).item(),
                    accumulate=int(rng.choice([1, 2])), zero=int(rng.choice([0, 1, 2])))
        if mesh["pipe"] > 1:
            rest |= dict(microbatches=int(rng.choice([1, 2])),
                         schedule=rng.choice(["gpipe", "interleaved", "1f1b"]).item())
            some = rest["zero"] or rest["remat"] == "selective"
            rest |= dict(chunks=2) if rest["schedule"] == "interleaved" or (
                rest["schedule"] == "1f1b" and some) else {}
        text = ",".join(f"{a}={n}" for a, n in mesh.items() if n > 1)
        try:
            check_network(everything(**what, **rest), make_mesh(**mesh))
        except ConfigError:
            continue
        drawn.append((text, what, rest))
    return drawn


DRAWN = draws(44)


def parameters():
    """One at each start and in .ci/run, the rest in .ci/full."""
    return [pytest.param(*case, marks=[] if case is UNDIVIDED[0] else pytest.mark.full, id=" ".join(
        [case[0], *(f"{k}={v}" for k, v in {**case[1], **case[2]}.items())]))
        for case in DRAWN + UNDIVIDED]


@functools.cache
def on_one_device(what):
    return run_updates(everything(**dict(what)), "", 20)[0]


def assert_same_losses(run, want):
    """To the rounding that Adam magnifies. Two experts that a token likes equally, to seven digits,
    are a discontinuity: where one choice falls differently, seen in the loads, it is another run
    from there on."""
    for i, (loss, load, wanted, usual) in enumerate(zip(run.losses, run.loads, want.losses,
                                                        want.loads, strict=True)):
        moved = np.abs(np.subtract(load, usual)).sum() / 2
        if moved > 0.1:
            assert i > 2 and moved <= 2, (i, moved)
            return
        assert loss == pytest.approx(wanted, rel=5e-5 if i else 2e-6), i


@pytest.mark.parametrize("mesh, what, rest", parameters())
def test_any_mesh_trains_the_same_model(mesh, what, rest):
    """Gradients scaled by a mesh's size hide behind Adam; copies whose gradients were not summed
    drift apart; a collective that is not entered by all gives other numbers each time."""
    run, again = run_updates(everything(**what, **rest), mesh, 20, times=2)
    want = on_one_device(tuple(what.items()))
    assert_same_losses(run, want)
    assert_same_gradient(run.gradient, want.gradient)
    assert_same_copies(run.params)
    assert again[:2] == run[:2]
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(run.params), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all()


@of_the_whole
def test_every_axis_and_choice_is_drawn():
    """An edit of the draw that leaves something out."""
    assert len({m for m, *_ in DRAWN}) >= 25
    for axis in AXES:
        assert sum(axis in m for m, *_ in DRAWN) >= 10
        for what in MODELS:
            assert any(axis in m and what.items() <= w.items() for m, w, _ in DRAWN), (axis, what)
    for choice in (dict(schedule="1f1b"), dict(schedule="interleaved"), dict(schedule="gpipe"),
                   dict(schedule="1f1b", chunks=2), dict(remat="full"), dict(zero=1),
                   dict(zero=2, accumulate=2),
                   dict(remat="selective"), dict(accumulate=2)):
        assert sum(choice.items() <= r.items() for *_, r in DRAWN) >= 3


# -------------------------------------------------------------------------------------------
# The table of the loss by layout, in docs/parallelism.md; README has some of its rows

ROWS, SHORT = (LOSSES.findall(page.read_text()) for page in LOSS_PAGES)


def run_layout(flags):
    """The twenty updates of a row of the table, and its configuration."""
    given, _ = parse_flags((model.Config, train.Config), flags.split())
    mesh = given.pop("mesh", "")
    config = everything(layers=8, **given)
    return run_updates(config, mesh, 20)[0], config


def test_the_pages_have_their_tables():
    """A table whose form changed is no longer read; README's rows have other numbers than those
    that are tested."""
    flags = " ".join(row[1] for row in ROWS)
    assert len(ROWS) >= 10 and all(f"{axis}=" in flags for axis in AXES)
    assert len(SHORT) == 2 and set(SHORT) < set(ROWS)


@pytest.mark.full
@pytest.mark.parametrize("flags, first, last", [
    pytest.param(*row[1:], id=row[0], marks=[] if i == 7 else pytest.mark.slow if i % 3 == 0
                 else pytest.mark.full) for i, row in enumerate(ROWS)])
def test_the_table_of_loss_by_layout(flags, first, last):
    """A published number that is no longer true. (An edit of the model changes them all:
    python -m tests.readme writes
    the table anew.)"""
    run, config = run_layout(flags)
    assert run.losses[0] == pytest.approx(float(first), rel=2e-6)
    if config.network.experts:
        assert_same_losses(run, on_one_device((("layers", 8), ("experts", 8))))
    else:
        assert run.losses[-1] == pytest.approx(float(last), rel=5e-5)
