"""The step, the loop, checkpoints, the command line.

    python train.py --shards 4

    batch -> [ micro-batch -> loss -> gradient ] x accumulate -> one sum over devices -> AdamW
             \\__________________ shard_map: our collectives _______________/   \\_ the compiler's

`fit` is the loop. It takes the three functions of a task, and the command line at the end of
this file is only its first user:

    collate(examples) -> batch          a list of raw examples to a dict of arrays [B, ...]
    loss(params, batch) -> sum, count   over the batch; divided once, when all is summed (a third,
                                        a dict of other sums, is divided too, and logged)
    predict(params, batch) -> outputs   shown after each evaluation
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import faulthandler
import fcntl
import functools
import gc
import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence


def _begin_again() -> None:
    """With large pages, if this is a plain command: a CPU's step takes its memory anew each time, a fifth of its time in
    pages of 4 kB, and glibc (2.35 or later) takes large ones only where it was asked to before the process began."""
    given, flags = os.environ.get("GLIBC_TUNABLES", ""), sys.orig_argv[1:len(sys.orig_argv) - len(sys.argv)]
    plain = sys.orig_argv[1:] == flags + sys.argv and all(re.match("-[^mc]", flag) for flag in flags)
    if sys.platform == "linux" and plain and "hugetlb" not in given and "ZIGZAG_AGAIN" not in os.environ:
        asked = ":".join(filter(None, (given, "glibc.malloc.hugetlb=1")))
        with contextlib.suppress(OSError):
            os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": asked, "ZIGZAG_AGAIN": "1"})


if __name__ == "__main__" and "__file__" in globals():
    _begin_again()

import jax          # noqa: E402
import jax.numpy as jnp
import numpy as np
import optax
from jax._src import distributed        # the processes' store of keys has no public name
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

import data
import model
import sample
import shard
from shard import Refused


@dataclasses.dataclass(frozen=True)
class Config(model.Config):
    """python train.py [--shards N] [--data PATH ...]: train a transformer on any machine"""
    # The model's fields come first: a run's configuration serves wherever a model's does.
    model: str = "tiny"             # a preset to begin from; other flags change it
    data: tuple[str, ...] = ()      # text files, folders of them, or one folder made by data.py
    out: str = "out"                # folder of the run; the same command again continues it
    steps: int = 900                # updates
    batch: int = 8                  # examples in an update, over all devices
    accumulate: int = 1             # parts that a batch is cut into, one after the other
    lr: float = 0.0                 # peak learning rate; 0: 0.5 / d_model
    warmup: int = 0                 # updates until the peak; 0: a twentieth of steps
    weight_decay: float = 0.1       # of matrices; scales and biases have none
    clip: float = 1.0               # largest norm of all gradients together
    optimizer: str = "adamw"        # or muon, for the matrices of the layers
    seed: int = 0                   # of the weights, the order of the data and dropout
    shards: int = 0                 # size of the tensor axis
    mesh: str = ""                  # axis=size,...; data takes the devices that are left; or auto
    override: tuple[str, ...] = ()  # REGEX=axis,-,axis: where weights live; of several that match the last wins
    step: str = "shard_map"         # or jit: everything left to the compiler, as a control
    sum_dtype: str = ""             # float32: fsdp adds up gradients in it, not in dtype (a third more is sent)
    zero: int = 0                   # 1: optimizer state split over data
    save_every: int = 0             # updates between checkpoints; 0: a fifth of steps
    eval_every: int = 0             # updates between evaluations; 0: a fifth of steps
    keep: int = 3                   # checkpoints that are kept
    verify: str = "on"              # checksums of a checkpoint that is read: on or off
    max_skipped: int = 10           # updates in a row without a finite gradient that end a run
    topology: str = ""              # compile for hardware that is not here (v5e:4x4, h100:1x2x8), and say what comes of it
    bench: bool = False             # how fast it trains here; keeps nothing on disk
    profile: int = 0                # of so many steps a trace for Perfetto, in out/profile
    coordinator: str = ""           # many hosts: HOST:PORT where process 0 listens
    processes: int = 0              # how many processes there are, each with the same command
    process_id: int = -1            # which of them this is, from 0
    distributed: bool = False       # many hosts by SLURM, Open MPI, Kubernetes or on a TPU pod
    patience: int = 120             # seconds that other processes may be late, beyond the usual

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in dict(steps=1, batch=1, accumulate=1, warmup=0, shards=0,
                                zero=0, save_every=0, eval_every=0,
                                keep=1, max_skipped=1, processes=0, process_id=-1,
                                patience=1, profile=0, lr=0, weight_decay=0, clip=1e-30, seed=0).items():
            value = getattr(self, name)
            if not (value >= least and math.isfinite(value)):
                raise Refused(f"--{name} {value}: must be a number of at least {least:g}")
        if self.batch % self.accumulate:
            raise Refused(f"--batch {self.batch} does not divide into --accumulate "
                          f"{self.accumulate} parts")
        if self.step not in ("shard_map", "jit"):
            raise Refused(f"--step {self.step}: expected shard_map or jit"
                          + shard.nearest(self.step, ("shard_map", "jit")))
        if self.sum_dtype not in ("", "float32"):
            raise Refused(f"--sum_dtype {self.sum_dtype}: expected float32, or nothing for the precision of --dtype"
                          + shard.nearest(self.sum_dtype, ("float32",)))
        if self.sum_dtype and self.step == "jit":
            raise Refused(f"--sum_dtype {self.sum_dtype}: with --step jit the compiler chooses; give --step shard_map")
        if "://" in self.out:
            raise Refused(f"--out {self.out}: object stores are not supported yet; give a folder that every process sees, "
                          f"{self.out.split('://')[1].split('/')[-1] or 'out'} for example")
        _overrides(self.override)
        if self.verify not in ("on", "off"):
            raise Refused(f"--verify {self.verify}: expected on or off")
        if self.chunks > 1 and self.schedule != "interleaved":
            raise Refused(f"--chunks {self.chunks}: only --schedule interleaved has more than one")
        if self.schedule == "interleaved" and self.chunks == 1:
            raise Refused("--schedule interleaved: give --chunks, of at least 2")
        if self.zero not in (0, 1):
            raise Refused(f"--zero {self.zero}: expected 0, or 1 (optimizer state split over data); "
                          f"for weights and gradients too, --mesh fsdp=N")
        if self.optimizer not in ("adamw", "muon"):
            raise Refused(f"--optimizer {self.optimizer}: expected adamw or muon"
                          + shard.nearest(self.optimizer, ("adamw", "muon")))
        if self.mesh != "auto":
            shard.mesh_sizes(self.mesh, self.shards)
        self._check_hosts()
        for name, value in (("lr", 0.5 / self.d_model), ("warmup", max(1, self.steps // 20)),
                            ("save_every", max(1, self.steps // 5)),
                            ("eval_every", max(1, self.steps // 5))):
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    def _check_hosts(self) -> None:
        given = bool(self.coordinator), self.processes > 0, self.process_id >= 0
        if any(given) and not all(given):
            raise Refused("several processes need all of --coordinator HOST:PORT, --processes N and --process_id "
                          "I (from 0), or --distributed alone where SLURM, Open MPI or a TPU pod knows them")
        if all(given) and self.distributed:
            raise Refused("--distributed finds out by itself what --coordinator says: give one of them")
        if self.coordinator and not (re.fullmatch(r"\S+:\d{1,5}", self.coordinator)
                                     and 0 < int(self.coordinator.rsplit(":", 1)[1]) < 2**16):
            raise Refused(f"--coordinator {self.coordinator}: expected HOST:PORT, where process 0 listens")
        if all(given) and self.process_id >= self.processes:
            raise Refused(f"--process_id {self.process_id}: with --processes {self.processes} they are 0 to "
                          f"{self.processes - 1}")


class Fault(RuntimeError):
    """What went wrong while running, in one line: exit status 1."""


# What decides a run's numbers. To continue it these must be what they were; the rest (how long,
# where, how often it is saved) may change.
SAME = tuple(f.name for f in dataclasses.fields(model.Config)
             if f.name not in ("remat", "microbatches", "schedule", "chunks")) + (
    "data", "batch", "lr", "weight_decay", "clip", "optimizer", "seed")


# What says only where a process is, and is no part of the run.
HOSTS = ("coordinator", "processes", "process_id", "distributed", "patience")
# What is asked of one start of it.
ASKED = ("topology", "bench", "profile")


# -------------------------------------------------------------------------------------------
# The step

class Program(NamedTuple):
    """Everything compiled or ready to be, for one configuration on one mesh."""
    # (`compare` and `in_parts` are for `check_loss`.)
    config: Config
    mesh: Any
    decisions: Any          # where each weight lives, and why
    state: Any              # abstract arrays with their places: params, opt, step
    batch: Any              # the same for a batch
    start: Any              # key -> state
    step: Any               # state, batch -> state, metrics
    evaluate: Any           # params, batch -> (sum, count)
    by_layer: bool          # whether the weights of a stack are gathered layer by layer
    typed: bool             # whether the loss is traced inside the mesh: its collectives are its own
    needs: list[str]        # the axes over which they split it, as axis=size
    loss: Any               # as it was given
    checked: str            # the precision in which the check computes it
    compare: Any            # batch, held, key, size -> the mesh's loss and one device's
    in_parts: Any           # the same arguments -> one device's loss of a batch in parts, and of all of it


def schedule(config: Config, step: jax.Array) -> jax.Array:
    """The rate of update number `step` (from 0): up to the peak in `warmup` updates, then half
    a cosine, down to a fiftieth at the last one."""
    return optax.warmup_cosine_decay_schedule(
        config.lr / config.warmup, config.lr, config.warmup - 1,
        max(config.steps - 1, config.warmup), config.lr / 50)(step)


def optimizer(config: Config, decisions: Any) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW but for the rate, which the step applies. Or Muon, at AdamW's
    rates, for the matrices that are neither the first nor the last (optax has Nesterov's Adam for the rest):
    which of their dimensions are contracted with the activations, the rule knows."""
    moved = optax.scale_by_adam(0.9, 0.95)
    if config.optimizer == "muon":
        deep = any(d.stacked for d in jax.tree.leaves(decisions))
        sides = jax.tree.map(lambda d: optax.contrib.MuonDimensionNumbers(*d.sides) if all(d.sides) and (
            d.stacked or not deep) else None, decisions)
        moved = optax.contrib.muon(-1.0, consistent_rms=0.2, adam_b2=0.95, muon_weight_dimension_numbers=sides)
    matrices = jax.tree.map(lambda d: d.matrix, decisions)
    return optax.chain(optax.clip_by_global_norm(config.clip), moved,
                       optax.add_decayed_weights(config.weight_decay, matrices))


def build(config: Config, mesh: Any, init: Callable, loss: Callable, batch: Any,
          overrides: Sequence[tuple[str, P]] = (), typed: bool = True) -> Program:
    """The program that trains `init`'s weights with `loss` on batches shaped like `batch` (a dict
    of arrays with as many rows as an update has). `typed` False computes the loss on each device as on one,
    whatever functions of shard.py it calls."""
    config = resolve(config, mesh)
    check(config, mesh)
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    batch = jax.tree.map(abstract, batch)
    params = jax.eval_shape(init, jax.random.key(0))
    for path, leaf in zip(*shard.flatten(params)[:2]):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise Refused(f"parameter {path} is {leaf.dtype}: only float arrays can be trained; "
                          f"keep others out of what init returns")
    # The rule looks at one micro-batch of one group of devices: what each of them computes.
    part = config.batch // shard.rows(mesh) // config.accumulate
    small = jax.tree.map(lambda x: jax.ShapeDtypeStruct((part, *x.shape[1:]), x.dtype), batch)
    narrow = jax.eval_shape(lambda p: shard.cast(p, config.dtype), params)
    known = _known(loss)
    takes_specs = "specs" in (takes := inspect.signature(loss).parameters)
    if takes_specs and takes["specs"].default is inspect.Parameter.empty:
        with_specs = loss
        loss = lambda params, batch, specs=None: with_specs(params, batch, specs=specs)     # noqa: E731
    pair = lambda p, b: _sums(loss(p, b))[:2]       # noqa: E731
    overrides = [*_overrides(config.override), *overrides]
    for pattern, spec in overrides:
        if several := next((e for e in spec if isinstance(e, tuple) and len(e) > 1), None):
            raise Refused(f"override {pattern!r}: {'+'.join(several)} on one dimension; give one axis a dimension")
    decisions = shard.decide(pair, narrow, small, mesh=mesh, overrides=overrides)
    if known is None:
        # What is a matrix must not follow from how many rows a device has: that is seen in a whole batch.
        seen = shard.decide(pair, narrow, batch, mesh=shard.abstract_mesh({}))
        decisions = jax.tree.map(lambda d, s: dataclasses.replace(d, matrix=s.matrix, sides=s.sides), decisions, seen)
    sums = jax.eval_shape(lambda p, b: _sums(loss(p, b)), narrow, small)
    if _parts(config, mesh) > 1 and known is None:
        all_rows = jax.eval_shape(lambda p, b: _sums(loss(p, b)), narrow, batch)
        for name, x in sums[2].items():
            if x.shape != all_rows[2][name].shape:
                raise Refused(f"the loss's other sum {name!r} has the shape {list(x.shape)} for {part} rows and "
                              f"{list(all_rows[2][name].shape)} for {config.batch}: give what adds up over rows")
    specs = jax.tree.map(lambda d: d.spec, decisions)
    used = jax.tree.map(lambda d: d.spec if d.used is None else d.used, decisions)
    rule = optimizer(config, decisions)

    def fresh(key):
        params = init(key)
        return {"params": params, "opt": rule.init(params), "step": jnp.zeros((), jnp.int32)}

    state = jax.eval_shape(fresh, jax.random.key(0))
    parts = shard.over_data(params, specs, mesh) if config.zero else specs
    places = shard.shardings({"params": specs, "step": P(),
                              "opt": shard.state_specs(rule, params, parts)}, mesh)
    whole = NamedSharding(mesh, P())
    rows = shard.batch_spec(mesh)
    # On these axes devices differ, whether or not the batch does.
    manual = set(shard.MANUAL) if config.step == "shard_map" else set()
    piped = {a for a in ("pipe", "seq") if dict(mesh.shape)[a] > 1} & manual
    held = {a for s in jax.tree.leaves(used, is_leaf=lambda s: isinstance(s, P)) for a in s} & manual
    passes = shard.seams(pair, narrow, small) if known is None else known
    needs = []
    for axis, seam, what in (("pipe", "through", "layers"), ("seq", "attend", "attention"), ("expert", "experts", "experts")):
        if axis not in piped | held:
            continue
        needs.append(f"{axis}={dict(mesh.shape)[axis]}")
        if seam not in passes:
            raise Refused(f"mesh axis {needs[-1]}: this loss does not call shard.{seam}, which is what splits {what} over it; "
                          f"{ANY_LOSS}")
        # A gradient inside of the loss would be of each device's part: no collective may add up others' to it.
        if shard.DIFFERENTIATED in passes:
            raise Refused(f"mesh axis {needs[-1]}: this loss takes a gradient inside itself, and over {axis} that would be a "
                          f"part of it; {ANY_LOSS}")
    why = "" if known is not None or config.step == "jit" else shard.needs_no_tensor(pair, narrow, small)
    split_over_tensor = f"tensor={dict(mesh.shape)['tensor']}" if dict(mesh.shape)["tensor"] > 1 else ""
    if why and needs and split_over_tensor:
        raise Refused(f"mesh axis {split_over_tensor}: {why}, of this loss, so no compiler may split it, beside {needs[0]}; "
                      f"give a mesh without tensor")
    # With such a gradient, and where the loss calls nothing of shard.py, each device computes it as one device does.
    typed = typed and (takes_specs or bool(passes)) and shard.DIFFERENTIATED not in passes and not (why and split_over_tensor)
    takes_specs = takes_specs and typed
    # Then types do not say over which axes devices differ: it is those that split the rows.
    untyped = None if typed or config.step == "jit" else {a for a in shard.BATCH if dict(mesh.shape)[a] > 1}
    # And tensor is the compiler's to split, but where it may not: then weights lie split and are used whole.
    alone = untyped is not None and (bool(why) or not split_over_tensor)
    if alone and split_over_tensor:
        decisions = jax.tree.map(lambda d: dataclasses.replace(d, reductions=(), used=P(*[
            None if a == "tensor" else a for a in (d.spec if d.used is None else d.used)]),
            reason=d.reason + f"; gathered: {why}" * ("tensor" in d.spec)), decisions)
        used = jax.tree.map(lambda d: d.used, decisions)
    ours, axes = (specs, shard.AXES) if alone else (shard.manual(specs), shard.MANUAL)

    def gather(weights):
        """Weights as they lie, whole: but those of a stack, which its layers gather where they use
        them, if the loss passes their specs on."""
        weights = shard.as_used(weights, specs, used, config.chunks)
        return shard.gather(weights, jax.tree.map(lambda d, u: P() if takes_specs and d.stacked else u, decisions, used))

    def local_loss(weights, batch):
        s, c, more = _sums(loss(weights, batch, specs=used) if takes_specs else loss(weights, batch))
        if "seq" in piped and "seq" in shard.varying(s) - shard.varying(c):
            raise Refused(f"mesh axis seq={dict(mesh.shape)['seq']}: this loss divides by a constant or by its rows, as a "
                          f"pooled one does, and each device has a part of the time; let it count in the batch, as the sum "
                          f"of its weights; {ANY_LOSS}")
        return s, c, more

    def with_sums(weights, part):
        found = shard.once(local_loss(weights, part), piped)
        return found[0], found

    def gradients(params, batch, dtype=config.dtype, accumulate=config.accumulate):
        """The gradient, and the sums that the loss gives, added up in float32 over micro-batches and over all
        axes but fsdp: there in the precision of dtype, unless --sum_dtype says otherwise, in each micro-batch."""
        weights = shard.vary(shard.cast(params, dtype), batch, also=piped)
        grad = jax.value_and_grad(with_sums, has_aux=True)
        grad = grad if untyped is None else shard.on_one_device(grad)
        with shard.SUM_DTYPE(config.sum_dtype):
            whole, scatter = jax.vjp(gather, weights)       # once for all micro-batches

            def micro(total, part):
                (_, found), g = grad(whole, part)
                return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, (*scatter(g), found)), None

            zeros = lambda x: jnp.zeros(x.shape, jnp.float32)      # noqa: E731
            zero = (jax.tree.map(lambda w: shard.vary(zeros(w), w, batch), weights),
                    jax.tree.map(lambda x: shard.vary(zeros(x), batch, also=piped), sums))
            if accumulate == 1:
                g, found = micro(zero, batch)[0]
            else:
                g, found = jax.lax.scan(micro, zero, jax.tree.map(
                    lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch))[0]
        return shard.reduce(g, specs, parts=parts, differ=untyped), shard.reduce(found, differ=untyped)

    def split(fn, outs, divides=True):
        """`fn(params, batch)` with our collectives: each group of devices runs it on its rows, and
        on its part of their time."""
        if config.step == "jit":
            return fn

        def call(params, batch):
            batch, parts = shard.along_time(batch, mesh)
            parts = {k: P(*(rows if divides and rows else (None,)), *s[1:]) for k, s in parts.items()}
            return jax.shard_map(fn, mesh=mesh, in_specs=(ours, parts), out_specs=outs, check_vma=typed,
                                 axis_names=set(axes))(params, batch)

        return call

    def step(state, batch):
        params = state["params"]
        whole = jax.tree.map(lambda _: P(), sums)
        grads, (total, asked, more) = split(gradients, (parts if alone else shard.manual(parts), whole))(params, batch)
        count = jnp.where(asked == 0, 1, asked)         # nothing was asked: nothing is learned
        grads = jax.tree.map(lambda g: g * (1 / count.astype(g.dtype)), grads)      # one division, not one a number
        rate, norm = schedule(config, state["step"]), optax.tree.norm(grads)
        updates, opt = rule.update(grads, state["opt"], params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        # One number that is not finite would be in every weight from here on: then nothing changes. Nor where
        # nothing was asked, for weights would decay and moments fade all the same.
        fine = jnp.isfinite(norm)
        learns = fine & (asked != 0)
        params, opt = jax.tree.map(lambda new, old: jnp.where(learns, new.astype(old.dtype), old), (params, opt),
                                   (state["params"], state["opt"]))
        metrics = {"loss": total / count, "lr": rate, "grad_norm": norm, "tokens": asked,
                   "skipped": 1 - fine, **{name: x / count for name, x in more.items()}}
        return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics

    def evaluate(params, batch, dtype=config.dtype):
        divides = jax.tree.leaves(batch)[0].shape[0] % shard.rows(mesh) == 0

        def fn(params, batch):
            # Where some weights are gathered and rows are not divided, all must be of one type.
            weights = shard.vary(shard.cast(params, dtype), params, batch, also=piped)
            if untyped is not None:
                pair = shard.on_one_device(local_loss)(gather(weights), batch)[:2]
                return shard.reduce(pair, differ=untyped) if divides else pair
            pair = shard.vary(shard.once(local_loss(gather(weights), batch)[:2], piped), params, batch)
            # Parts are added up; what each device computed for itself, they agree on.
            return shard.agree(shard.reduce(pair, only=shard.varying(batch) | piped))

        return split(fn, (P(), P()), divides)(params, batch)

    options = shard.compiler_options(mesh)
    as_placed = lambda x, p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p)  # noqa: E731
    # The check is in float32, where the loss can be traced in it (a loop of its own may be bound to another).
    try:
        checked = "float32"
        jax.eval_shape(pair, jax.eval_shape(lambda p: shard.cast(p, checked), params), small)
    except (TypeError, ValueError):
        checked = config.dtype
    compare, in_parts = _comparisons(
        init, loss, split(functools.partial(gradients, dtype=checked, accumulate=min(2, config.accumulate)), (
            parts if alone else shard.manual(parts), jax.tree.map(lambda _: P(), sums))),
        functools.partial(evaluate, dtype=checked), places["params"],
        functools.partial(shard.in_chunks, specs=specs, mesh=mesh, chunks=config.chunks if config.step == "shard_map" else 1),
        _parts(dataclasses.replace(config, accumulate=min(2, config.accumulate)), mesh), checked)
    return Program(
        config, mesh, decisions, jax.tree.map(as_placed, state, places),
        jax.tree.map(lambda x: as_placed(x, NamedSharding(mesh, rows)), batch),
        jax.jit(fresh, out_shardings=places, compiler_options=options),
        jax.jit(step, donate_argnums=0, out_shardings=(places, whole), compiler_options=options),
        jax.jit(evaluate, out_shardings=whole, compiler_options=options), takes_specs, typed, needs, loss, checked,
        jax.jit(compare, out_shardings=whole, compiler_options=options),
        jax.jit(in_parts, out_shardings=whole, compiler_options=options))


# So much are weights moved, of their own size, to see what rounding does to a loss and its gradient: by computation in
# float32, and where there are 16 bits in it.
ROUNDING = {False: 2.0**-20, True: 2.0**-8}


def _comparisons(init: Callable, loss: Callable, gradients: Callable, evaluate: Callable, places: Any, in_chunks: Callable,
                 parts: int, dtype: str) -> tuple[Callable, Callable]:
    """For check_loss: the mesh's `gradients` and `evaluate` of some rows beside those of one device; and one device's
    of the rows in so many parts beside those of all together. At new weights that were moved at random, by `size` of
    their own: behind a head of zeros nothing shows. Beside both, what one device finds at weights moved by `rounding`."""
    def moved(params, key, size):
        keys = jax.tree.unflatten(jax.tree.structure(params), list(jax.random.split(key, len(jax.tree.leaves(params)))))

        def move(w, key):
            rms = jnp.sqrt(jnp.mean(w * w))
            return w + (size * jnp.where(rms > 0, rms, 0.2)).astype(w.dtype) * jax.random.normal(key, w.shape, w.dtype)

        return jax.tree.map(move, params, keys)

    def start(key, size):
        params = jax.lax.with_sharding_constraint(init(key), places)
        return shard.cast(moved(params, jax.random.fold_in(key, 1), size), dtype)

    def sums_of(params, batch):
        return _sums(loss(params, batch))

    def plain(params, batch):
        def with_sums(params):
            found = sums_of(params, batch)
            return found[0], found

        (_, found), grad = jax.value_and_grad(with_sums, has_aux=True)(params)
        return found, grad

    def alike(tree):
        """Whole on each device where that is little: no compiler splits what is to be compared with."""
        return jax.lax.with_sharding_constraint(tree, P()) if 4 * model.count(tree) < 2**30 else tree

    def norms(a, b):
        return jax.tree.map(lambda a, b: jnp.linalg.norm((a - b).astype(jnp.float32)), a, b)

    def wanted(params, batch, key, rounding):
        """What one device finds, and how far off it is where weights are moved by their rounding, twice."""
        def three(params, batch, key, rounding):
            return jax.lax.map(lambda i: plain(moved(params, jax.random.fold_in(key, i), jnp.where(i == 0, 0, rounding)), batch),
                               jnp.arange(3))

        sums, grads = shard.on_one_device(three)(alike(params), alike(batch), key, rounding)
        (sums, grad), *others = [jax.tree.map(lambda x: x[i], (sums, grads)) for i in range(3)]
        noise = [(jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b), initial=0), sums, s), norms(grad, g)) for s, g in others]
        return sums, grad, jax.tree.map(jnp.maximum, *noise)

    def result(sums, grad, wanted):
        wanted_sums, wanted_grad, (sums_noise, grad_noise) = wanted
        zero = jax.tree.map(jnp.zeros_like, wanted_grad)
        return {"sums": sums, "wanted": wanted_sums, "sums_noise": sums_noise, "norms": norms(wanted_grad, zero),
                "gaps": norms(grad, wanted_grad), "gaps_noise": grad_noise}

    def compare(batch, held, key, size, rounding):
        params = start(key, size)
        with jax.default_matmul_precision("highest"):
            grad, sums = gradients(in_chunks(params), batch)
            found = result(sums, in_chunks(grad, back=True), wanted(params, batch, key, rounding))
            if held is not None:
                found |= {"held": evaluate(in_chunks(params), held),
                          "held_wanted": shard.on_one_device(sums_of)(alike(params), alike(held))[:2]}
        return found

    def in_parts(batch, held, key, size, rounding):
        def added(params, batch):
            batch = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
            return jax.tree.map(lambda x: x.sum(0), jax.lax.map(lambda part: plain(params, part), batch))

        params = start(key, size)
        with jax.default_matmul_precision("highest"):
            sums, grad = shard.on_one_device(added)(alike(params), alike(batch))
            return result(sums, grad, wanted(params, batch, key, rounding))

    return compare, in_parts


def _overrides(given: Sequence[str]) -> list[tuple[str, P]]:
    """--override's 'REGEX=axis,-,axis' as what shard.decide takes."""
    found = []
    for text in given:
        pattern, equals, spec = text.rpartition("=")
        if not equals or not pattern:
            raise Refused(f"--override {text}: expected REGEX=axis,-,axis: of the weights whose path it finds, the axis "
                          f"that splits each dimension, or -")
        names = [name.strip() for name in spec.split(",")] if spec else []
        for name in names:
            if name not in (*shard.AXES, "-"):
                raise Refused(f"--override {text}: the axis {name!r}; expected one of {', '.join(shard.AXES)}, or -"
                              + shard.nearest(name, shard.AXES))
        found.append((pattern, P(*[None if name == "-" else name for name in names])))
    return found


def _sums(result: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """What a loss gives, complete and in float32."""
    s, c, *more = result if isinstance(result, tuple) and len(result) in (2, 3) else (None,) * 2
    more = more[0] if more and more[0] is not None else {}
    plain = isinstance(more, dict) and all(jax.tree_util.all_leaves([x]) for x in (s, c, *more.values()))
    if s is None or not plain or jnp.shape(s) or jnp.shape(c):
        shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", result)
        raise Refused(f"loss(params, batch) must return two scalars, the sum over the batch and the count to divide by, and "
                      f"perhaps a dict of other sums to be logged (arrays); it returned {shapes}: of a mean, give the sum and the count")
    if taken := LOGGED & more.keys():
        raise Refused(f"the loss's other sums are logged by name, and {min(taken)!r} is taken: the step's own "
                      f"are {', '.join(sorted(LOGGED))}")
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (s, c, more))


# What a step's line in metrics.jsonl has.
LOGGED = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "skipped", "save_seconds"}


def resolve(config: Config, mesh: Any) -> Config:
    """The configuration with the compute precision that the mesh's devices are best at."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return dataclasses.replace(
        config, dtype=config.dtype or ("float32" if on_cpu else "bfloat16"))


def check(config: Config, mesh: Any) -> None:
    """Refuse what does not fit, with the numbers, before anything is compiled."""
    sizes, groups = dict(mesh.shape), shard.rows(mesh)
    each = groups * config.accumulate
    if config.batch % each:
        near = shard.nearest_multiple(each, config.batch)
        raise Refused(f"--batch {config.batch} does not divide among {groups} groups of devices "
                      f"({' x '.join(a for a in shard.BATCH if sizes[a] > 1) or 'data'}) x "
                      f"{config.accumulate} accumulated parts = {each}; the nearest that does is "
                      f"--batch {near}")
    idle = [f"{a}={sizes[a]}" for a in ("pipe", "seq") if sizes[a] > 1]
    if config.step == "jit" and idle:
        raise Refused(f"mesh axis {' and '.join(idle)}: with --step jit a compiler splits no work over it, and every device "
                      f"would do all of it; give its devices to data, fsdp, expert or tensor")
    rows = config.batch // shard.rows(mesh) // config.accumulate
    if rows % config.microbatches:
        near = shard.nearest_divisor(rows, config.microbatches)
        raise Refused(f"--microbatches {config.microbatches} does not divide the {rows} rows that a "
                      f"device has at a time; the nearest that does is --microbatches {near}")


def check_overrides(config: Config, mesh: Any) -> None:
    """Refuse what --override asks of the transformer and cannot have."""
    if config.override:
        # (A vocabulary that is still to follow from the data divides by everything.)
        some = dataclasses.replace(config, vocab_size=config.vocab_size or 128 * mesh.size)
        params = jax.eval_shape(lambda: model.init(some, jax.random.key(0)))
        shard.overridden([(path, path, leaf.shape) for path, leaf in _by_path(params).items()],
                         _overrides(config.override), dict(mesh.shape))


def check_model(config: model.Config, mesh: Any) -> None:
    """The same for what the transformer cannot split."""
    n, stages, ring, e = (dict(mesh.shape)[a] for a in ("tensor", "pipe", "seq", "expert"))
    if config.experts % e:
        raise Refused(f"mesh axis expert={e} does not divide --experts {config.experts}; the nearest "
                      f"that does is expert={shard.nearest_divisor(config.experts, e)}")
    for name, value in (("heads", config.heads), ("d_ff", config.d_ff),
                        ("vocabulary (padded)", model.padded(config.vocab_size or 1))):
        if value % n:
            raise Refused(f"{n} tensor shards do not divide {name} {value}; the nearest that "
                          f"does is --shards {shard.nearest_divisor(value, n)}")
    if isinstance(config, Config):          # (sample.py has no overrides)
        check_overrides(config, mesh)
    with_chunks = f" x --chunks {config.chunks}" * (config.chunks > 1)
    for axis, size, name, why, parts in (
            ("pipe", stages, "layers", "", stages * config.chunks),
            ("pipe", stages, "seq_len", " (what follows the layers is shared out by time)", stages * ring),
            ("seq", ring, "seq_len", " (each device has an early and a late part)", 2 * ring)):
        value = getattr(config, name)
        if (size > 1 or name == "layers") and value % parts:
            raise Refused(f"mesh axis {axis}={size}{with_chunks * (name == 'layers')}: --{name} {value} "
                          f"does not divide into {parts}{why}; the nearest that does is "
                          f"--{name} {shard.nearest_multiple(parts, value)}")


def formula(program: Program) -> list[shard.Collective]:
    """What an update must send: shard.predict's for the weights and, of the transformer, what is sent
    into and out of its blocks, from stage to stage, around the ring, and to experts and back."""
    c, sizes = program.config, dict(program.mesh.shape)
    n, e, ring, S = (sizes[a] for a in ("tensor", "expert", "seq", "pipe"))
    # (What XLA sends between CPU devices in 16 bits it sends in 32.)
    item = 4 if shard.platform(program.mesh) == "cpu" else jnp.dtype(c.dtype).itemsize
    rows = c.batch // shard.rows(program.mesh) // c.accumulate
    time, M = c.seq_len // ring, math.gcd(c.microbatches, rows) if S > 1 else 1
    ticks, chunks = shard.ticks(S, M, c.schedule, c.chunks) if S > 1 else (1, 1)
    # 1F1B goes forward once more, too. Where a stage has one layer that is all that is computed again, and no
    # next layer asks for what its last block makes.
    in_turns = S > 1 and c.schedule == "1f1b"
    alone = in_turns and c.layers == S
    again = c.remat != "none" and not alone
    decisions = jax.tree.map(lambda d: dataclasses.replace(d, stacked=d.stacked and program.by_layer), program.decisions)
    found = shard.predict(decisions, program.state["params"], program.mesh, item,
                          c.accumulate, bool(c.zero), ticks / chunks, 2 + in_turns - alone, 4 if c.sum_dtype else 0)
    if c.step == "jit" or not _is_ours(program):
        return found
    spread = time % n == 0 and n > 1
    if not spread:  # The rule counted a device's rows in full: each has a part of their time, and layers.
        found = [r._replace(bytes=round(r.bytes / ring * ticks / M / S)) if r.axis == "tensor" else r
                 for r in found]
    table = {(r.kind, r.axis): [r.count, r.bytes] for r in found if not (spread and r.axis == "tensor")}

    def add(kind, axis, count, size):
        """So many, in each of which a device has so many bytes (what it has in the end, but of
        reduce-scatter before it)."""
        group = sizes[axis]
        share = {"collective-permute": 1, "all-reduce": 2 * (group - 1) / group}.get(kind, (group - 1) / group)
        if group > 1 and count and size:
            old = table.setdefault((kind, axis), [0, 0])
            table[kind, axis] = [old[0] + count, old[1] + count * size * share]

    tokens = rows // M * time                               # of a microbatch
    x = tokens * c.d_model * item                           # the stream
    runs = c.accumulate * ticks * c.layers // (S * chunks)  # of a layer, forward
    ends = c.accumulate * (ticks if in_turns else 1)        # of what comes before and after them
    whole = x if in_turns else x * M
    blocks = 2 - c.parallel
    if spread:
        # Into a block and out of it, forward and backward; the table of tokens and the head.
        pieces = model.pieces(c, whole // (c.d_model * item) // time, time // S)
        add("all-gather", "tensor", runs * blocks * (2 + again + in_turns), x)
        add("reduce-scatter", "tensor", runs * (blocks * (2 + in_turns) - alone
                                                + bool(c.experts and (c.parallel or c.shared_experts))), x)
        for kind in ("all-gather", "reduce-scatter"):
            add(kind, "tensor", ends, whole)
            add(kind, "tensor", ends * pieces, whole // S // pieces)
        # Softmax over the vocabulary; the gradients of what multiplies the stream.
        add("all-reduce", "tensor", ends * 3 * pieces,
            whole // (S * c.d_model * item) // pieces * 4)
        add("all-reduce", "tensor", runs * blocks, c.d_model * item)
        add("all-reduce", "tensor", ends, c.d_model * item)
        if c.kv_heads % n:      # every device has all of these weights
            add("all-reduce", "tensor", runs * 2, c.d_model * c.kv_heads * c.head_dim * item)
        if c.experts:
            add("all-gather", "tensor", runs * (1 + again + in_turns), tokens * c.experts * 4)
            # (The gradient of the router, which a TPU's compiler rounds before it is summed.)
            tpu = shard.platform(program.mesh) == "tpu"
            add("all-reduce", "tensor", runs, c.d_model * c.experts * (item if tpu else 4))
            add("all-reduce", "tensor", runs, e * tokens * min(c.experts_per_token, c.experts // e) * item)
    if c.experts:
        # Every token's place to every device, and back; its choices and their shares.
        add("all-to-all", "expert", runs * (4 + again + 2 * in_turns - alone), e * x)
        kind, stages = shard.scattering(e, program.mesh)
        for size in (4, item):
            add("all-gather", "expert", runs * (1 + again + in_turns), e * tokens * c.experts_per_token * size)
        add(kind, "expert", runs * stages, e * tokens * c.experts_per_token * item / stages)
        add("all-reduce", "seq", runs * (1 + again + in_turns), rows // M * (c.experts + 1) * 4)
    if S > 1:
        # What the last stage has made is shared out: a microbatch in each tick, or all at the end.
        add("collective-permute", "pipe", 2 * ticks * c.accumulate, x // (n if spread else 1))
        for kind in ("reduce-scatter", "all-gather"):
            add(kind, "pipe", ends, whole // (n if time // S % n == 0 else 1))
    # Keys and values go once around, and once more where a layer is computed again; with them what is
    # known of them. Their gradients come back.
    keys, known = tokens * math.lcm(c.kv_heads, n) // n * c.head_dim * item, tokens * 4
    times = runs * (ring - 1)
    add("collective-permute", "seq", 2 * times * (2 + again + in_turns), keys)
    add("collective-permute", "seq", times * (1 + again + in_turns) * (1 + ("segments" in program.batch)), known)
    return [shard.Collective(kind, axis, count, round(size)) for (kind, axis), (count, size)
            in sorted(table.items())]


def _is_ours(program: Program) -> bool:
    """Whether what is trained is the transformer that the configuration describes."""
    shapes = lambda tree: jax.tree.map(lambda w: w.shape, tree)      # noqa: E731
    params = jax.eval_shape(lambda: model.init(dataclasses.replace(
        program.config, vocab_size=program.config.vocab_size or 1), jax.random.key(0)))
    return shapes(params) == shapes(program.state["params"])


def machine(sizes: dict[str, int], config: Config | None = None) -> Any:
    """The mesh on the accelerators of this machine, or of all that the configuration names; with none,
    on as many CPU devices as it needs."""
    several = max(1, config.processes if config else 1)
    if not (config and config.distributed) and math.prod(sizes.values()) % several == 0:
        shard.simulate(math.prod(sizes.values()) // several)
    if config:
        join(config)
    return shard.make_mesh(shard.topology(config.topology) if config and config.topology else None, **sizes)


# The transformer's own losses, and what of shard.py they call. The tests hold them to one device on every mesh: they are
# not checked again at each start. (By identity: what wraps one is another loss.)
OURS: Any = weakref.WeakKeyDictionary()


def _known(loss: Callable) -> set[str] | None:
    try:
        return OURS.get(loss)
    except TypeError:           # of a kind that cannot be looked up
        return None


def language(config: Config) -> tuple[Callable, Callable, Any]:
    """Language modelling for `build`: init, loss, and the shape of a batch."""
    batch = {**model.a_batch(config, config.batch),
             "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}
    def loss(params, batch, specs=None):
        return model.loss(params, batch, config, specs, more=True)

    OURS[loss] = {"through", "attend", "experts", "row"}
    return lambda key: model.init(config, key), loss, batch


def choose(config: Config) -> tuple[Config, tuple[Program, jax.stages.Compiled] | None]:
    """--mesh auto: the fastest that fits, of all meshes of these devices over which the model divides, by the
    arithmetic and the bytes of each at the chip's rates; the first few are compiled, and it is said why. With the
    program and the step that were compiled, if they were."""
    if config.mesh != "auto":
        return config, None
    join(config)
    devices = shard.topology(config.topology) if config.topology else jax.devices()
    known = _chip(devices[0])
    chip, tried = known or CHIPS["TPU v5 lite"], []
    given, config = config, dataclasses.replace(resolve(config, shard.make_mesh(devices[:1])), shards=0,
                                                vocab_size=config.vocab_size or data.Bytes.vocab_size)
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    check_overrides(config, shard.abstract_mesh({}))
    for sizes in shard.meshes(len(devices)):
        one = dataclasses.replace(config, mesh=",".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "data=1")
        mesh = shard.abstract_mesh(sizes)
        with contextlib.suppress(Refused):
            check(one, mesh)
            check_model(one, mesh)
            if given.shards in (0, sizes["tensor"]):
                tried.append((one, *_guess(one, params, sizes, chip)))
    if not tried:
        raise Refused(f"--mesh auto: no mesh of {len(devices)} devices divides this model and --batch {config.batch}")
    # What does not fit comes last; where some does, the one that needs least first.
    tried.sort(key=lambda t: (max(1.0, t[3] / (0.95 * chip.memory)), t[1] + t[2]))
    say = lambda text: print(text, flush=True) if jax.process_index() == 0 else None     # noqa: E731
    say(f"mesh     auto: {len(tried)} meshes of {len(devices)} devices, by the formulas" + " and the rates of a v5e, these "
        "devices' not being known" * (known is None))
    for one, work, links, memory in tried[:5]:
        say(f"         {one.mesh:36} {1e3 * (work + links):8.1f} ms: arithmetic {1e3 * work:.1f}, links {1e3 * links:.1f}; about "
            f"{memory / 2**30:.1f} of {chip.memory / 2**30:.0f} GiB")
    for one, *_ in tried[:3]:
        try:
            program, _ = _ready(one)
            step = compiled(program)
            peak = _peak(step)
        except jax.errors.JaxRuntimeError as e:
            say(f"         {one.mesh} does not compile: {_brief(e)}")
            continue
        say(f"         {one.mesh} compiled: {peak / 2**30:.2f} GiB a device")
        if peak < chip.memory:
            return dataclasses.replace(given, mesh=one.mesh, shards=0), (program, step)
    raise Refused(f"--mesh auto: of {len(tried)} meshes of {len(devices)} devices none of the three best has room for this; "
                  f"--remat full, more --accumulate or more devices would make some")


def _guess(c: Config, params: Any, sizes: dict[str, int], chip: Chip) -> tuple[float, float, float]:
    """Seconds of arithmetic, seconds of sending, and bytes of memory of a device, roughly: the table in README."""
    d, f, p, s, e, t = (sizes[a] for a in shard.AXES)
    item, share = jnp.dtype(c.dtype).itemsize, lambda n: (n - 1) / n
    own = sum(math.prod(w.shape) / (p if path.startswith("layers") else 1) / (e if ".e_" in path else 1)
              for path, w in _by_path(params).items()) / t
    tokens, layers = c.batch * c.seq_len / (d * f * e * s), c.layers / p
    x, keys = tokens * c.d_model * item, tokens * c.kv_heads * c.head_dim * item / t
    count, chunks = shard.ticks(p, c.microbatches, c.schedule, c.chunks) if p > 1 else (1, 1)
    turns = count / chunks / (c.microbatches if p > 1 else 1)
    again = {"none": 1.0, "selective": 1.05, "full": 1.3}[c.remat]
    work = model.flops(c, c.batch * c.seq_len) / (d * f * p * s * e * t) * again * turns / chip.flops
    sent = 2 * share(d * e * s) * 4 * own / f + 3 * share(f) * own * item * c.accumulate * max(1, turns)
    sent += layers * (8 * share(t) * x + 4 * (s - 1) * keys + 4 * (e - 1) * x) * again + 4 * x * (p > 1)
    kept = {"none": 10 * c.d_model + 4 * c.d_ff, "selective": 6 * c.d_model + 3 * c.d_ff, "full": 2 * c.d_model}[c.remat]
    memory = own / f * 18 + tokens / c.accumulate / t * layers * kept * item + 3 * 4 * min(
        model.LOGITS, tokens * c.vocab_size) + 4 * own * item / max(1, layers) + 6 * 4 * shard.SCORES / 4
    return work, sent / chip.links, memory


def compile_step(config: Config) -> jax.stages.Compiled:
    """The step of the command line, compiled for this machine, or --topology. Touches no run directory."""
    program, step = _ready(config)
    return step or compiled(program)


def _ready(config: Config) -> tuple[Program, jax.stages.Compiled | None]:
    """The program of the command line, without its data; and its step, if choosing a mesh has compiled it."""
    config, found = choose(config)
    if found:
        return found
    mesh = machine(shard.mesh_sizes(config.mesh, config.shards), config)
    if not config.vocab_size:
        config = dataclasses.replace(config, vocab_size=data.Bytes.vocab_size)
    check_model(config, mesh)
    return build(config, mesh, *language(resolve(config, mesh))), None


def compiled(program: Program) -> jax.stages.Compiled:
    with jax.set_mesh(program.mesh):
        return program.step.lower(program.state, program.batch).compile()


# -------------------------------------------------------------------------------------------
# Many hosts: a process on each, all of them in the same line of the same program

def join(config: Config) -> None:
    """Meet the other processes, if there are any. Before anything touches a device."""
    if not (config.coordinator or config.distributed) or jax.distributed.is_initialized():
        return
    given: dict[str, Any] = {}
    if config.coordinator:
        given = dict(coordinator_address=config.coordinator, num_processes=config.processes,
                     process_id=config.process_id)
        if config.process_id == 0:
            given |= _listens(config.coordinator)
    who = f"{config.processes} processes at {config.coordinator}" if config.coordinator else "the other processes"
    _watch.begin(config.patience)
    _watch.expect(f"waiting for {who}", config.patience)
    try:
        # jax itself would wait longer, and then abort without a word of what to do.
        jax.distributed.initialize(**given, initialization_timeout=config.patience + 60,
                                   heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
    except ValueError as e:
        raise Refused(f"--distributed: nothing here says which processes there are ({_brief(e)}); give "
                      f"--coordinator, --processes and --process_id") from None
    _watch.expect("beginning")


def _listens(coordinator: str) -> dict[str, str]:
    """Where process 0 listens: on the address that is named and no other, if it is this machine's. On a
    port that is taken jax would crash."""
    host, port = coordinator.rsplit(":", 1)
    for where in (host, None):
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                where, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            # An own name may stand for this machine alone, where others cannot reach it.
            named = where and (not address[0].startswith(("127.", "::1")) or re.match(r"localhost$|127\.|\[?::1", host))
            return {"coordinator_bind_address": coordinator} if named else {}
        except (OSError, OverflowError) as e:
            if getattr(e, "errno", None) == errno.EADDRINUSE:
                raise Refused(f"--coordinator {coordinator}: port {port} is in use on this machine; give "
                              f"another") from None
    return {}


# How often everyone was asked, and how often whether all should stop: jax wants the second counted from 1.
_said, _asked = itertools.count(), itertools.count(1)


def everyone(value: Any) -> list[Any]:
    """What each process says here: anything that JSON can hold. By way of process 0, not of the devices: those
    do not wait long for one that is late."""
    count, turn = jax.process_count(), next(_said)
    if count == 1:
        return [value]
    service, wait = distributed.global_state.client, 10**9     # milliseconds; _Watch ends it before
    service.key_value_set(f"zigzag/{turn}/{jax.process_index()}", json.dumps(value))
    return [json.loads(service.blocking_key_value_get(f"zigzag/{turn}/{i}", wait)) for i in range(count)]


def agreed(facts: dict[str, Any]) -> None:
    """Refuse to train beside processes for which any of this is otherwise: nothing else would notice."""
    first, *others = everyone(facts)
    for i, other in enumerate(others, 1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise Refused(f"process {i} has {name} {other.get(name)!r} and process 0 has "
                              f"{first.get(name)!r}: every process must be given the same")


AGAIN = "when all have ended, the same command in each goes on from the last checkpoint"


class _Watch:
    """With several processes no wait is endless: who waits too long says so, and ends. What is too long
    follows from how long the same has taken so far."""
    FIRST = 360.0           # seconds that what was never measured is taken to last
    UNSEEN = {"a save"}     # much of which happens in the background

    def __init__(self):
        self.patience, self.usual, self.what, self.since, self.limit = 0, {}, "", 0.0, math.inf

    def begin(self, patience: int) -> None:
        self.patience = patience
        threading.Thread(target=self._look, daemon=True).start()
        # jax aborts a process when another's heartbeat is missed. Not before this is said.
        said = (f"error: another process has ended, or cannot be reached: {AGAIN}\n").encode()
        self.said = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os.write(2, said) and None)
        ctypes.CDLL(None).signal(signal.SIGABRT, self.said)

    def expect(self, what: str, limit: float | None = None) -> None:
        """From here on this is waited for, and what was before has come."""
        if not self.patience:
            return
        now = time.monotonic()
        if self.what:
            self.usual[self.what] = max(self.usual.get(self.what, 0.0), now - self.since)
        if limit is None:
            usual = self.FIRST if what in self.UNSEEN else self.usual.get(what, self.FIRST)
            limit = self.patience + 10 * usual if what else math.inf
        self.what, self.since, self.limit = what, now, limit
        faulthandler.cancel_dump_traceback_later()
        if what:            # should even the thread not get its turn
            faulthandler.dump_traceback_later(limit + 10, exit=True)

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            what, since, limit = self.what, self.since, self.limit
            if time.monotonic() - since > limit and since == self.since:
                print(f"error: {what} took more than {limit:.0f} s: this process is stuck, or another for which it "
                      f"waits; {AGAIN}. Here is where:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback()
                os._exit(1)


_watch = _Watch()


# -------------------------------------------------------------------------------------------
# The loop

class Fit(NamedTuple):
    """What fit gives back."""
    params: Any
    step: int               # updates made
    held_out: float | None  # the last evaluation's loss
    outputs: Any            # and prediction


def fit(config: Config, init: Callable, collate: Callable, loss: Callable,
        predict: Callable | None = None, examples: Sequence = (), held_out: Sequence = (),
        show: Callable | None = None, flops: float | None = None,
        bits_per_nat: float | None = None, record: dict[str, Any] | None = None,
        mesh: Any = None, say: Any = None, overrides: Sequence[tuple[str, P]] = ()) -> Fit:
    """Train init(key)'s weights on `examples` (anything with a length and an index) for
    config.steps updates, on config.mesh, in config.out ('' keeps nothing on disk).

    show(outputs) makes a text of predict's outputs. flops is the arithmetic of an update, for
    MFU. bits_per_nat turns the held-out loss into bits per byte. What is in `record` is saved
    with the configuration and must be the same when the run continues. `say` is told all that
    a person is to see (a _Say). `overrides`, (path regex, PartitionSpec) pairs, say where weights live, after
    --override: of those that find a weight the last wins."""
    stop: list[int] = []
    mesh = mesh or machine(shard.mesh_sizes(config.mesh, config.shards), config)
    with _on_signals(stop):
        shapes = _shapes(config, collate, examples)
        program = build(config, mesh, init, loss, shapes, overrides)
        record = _record(program, record or {})
        agreed(record)
        say = say or _Say(program.config)
        if _known(loss) is None:
            _watch.expect("compiling")
            with jax.set_mesh(mesh):
                if not check_loss(program, collate, examples, len(held_out) > 0, say.line):
                    program = build(config, mesh, init, loss, shapes, overrides, typed=False)
                    check_loss(program, collate, examples, len(held_out) > 0, say.line)
                try:
                    jax.eval_shape(program.step, program.state, program.batch)      # (kept for when it is compiled)
                except (TypeError, ValueError, NotImplementedError) as e:
                    raise e if isinstance(e, Refused) or config.step == "jit" else _untraceable(e, program.needs) from None
        with Run(program, record) if config.out else contextlib.nullcontext() as run, jax.set_mesh(mesh):
            say.header(program)
            result = _loop(program, run, say, stop, collate, predict, examples, held_out, show,
                           flops, bits_per_nat)
    _watch.expect("")
    return result


# What to give the devices to, of an axis that a loss cannot have.
ANY_LOSS = "any loss can have data, fsdp and tensor"


def check_loss(program: Program, collate: Callable, examples: Sequence, evaluates: bool, say: Callable) -> bool:
    """Refuse a loss of somebody else's that is another function on this mesh, or in --accumulate parts, than it is
    on one device, before anything is written: its sums and its gradient, of a few rows. False where it is enough to
    compute it on each device as on one."""
    config, mesh, sizes = program.config, program.mesh, dict(program.mesh.shape)
    parts, accumulate = _parts(config, mesh), min(2, config.accumulate)
    # All rows of a batch, where they are small: so are they coupled as in an update. Else some for each device.
    row, cut = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(program.batch)), shard.rows(mesh) * accumulate
    each = config.batch // cut
    few = math.gcd(config.microbatches, each) * (2 if each > config.microbatches else 1)
    count = cut * (each if config.batch * row <= 2**14 else few)
    batches = [_batch(program, collate, examples, at, count) for at in range(3)]
    held = [{k: v for k, v in batch.items() if k != "seeds"} if evaluates else None for batch in batches]
    if evaluates:               # (what a held-out batch has not is missed here)
        jax.eval_shape(program.loss, program.state["params"], held[0])
    if parts == 1 and (config.step == "jit" or not program.typed):
        return True             # nothing is split but by the compiler
    narrow = program.checked != "float32" or shard.computes_in_16_bits(
        program.loss, jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, "float32"), program.state["params"]), batches[0])

    def differs(fn):
        """What fn finds, where that is not the same: once by three times what rounding may be, or two of three times. Of
        other rows each time and at weights moved at random; where that is nowhere finite, at the weights as they are."""
        agreed, apart, step = 0, [], None
        for size in (0.1, 0.0):
            for i in range(3):
                given = batches[i], held[i], jax.random.key(config.seed + i), jnp.float32(size), jnp.float32(ROUNDING[narrow])
                if step is None:
                    step = fn.lower(*given).compile()
                    everyone("compiled")        # before the devices first wait for each other
                found = jax.device_get(step(*given))
                norms = jax.tree.leaves(found["norms"])
                if np.any(norms) and all(np.isfinite(x).all() for x in (*found["wanted"][:2], *norms)):
                    found["why"], far = next(filter(any, everyone([_differences(found, narrow, k) for k in (1, 3)])), ("", ""))
                    agreed, apart = agreed + (not found["why"]), apart + [found] * bool(found["why"])
                    if far or len(apart) == 2:
                        return found
            if agreed or apart:
                return None
        say("this loss is not checked on this mesh: its gradient is zero, or not finite, of the first three batches")

    try:
        found = differs(program.compare)
    except Refused:
        raise
    except Exception as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            say("this loss is not checked on this mesh: for that there is no room")
            return True
        if program.typed and not program.needs:
            say(f"this loss is computed as on one device, with all weights gathered at once: on a mesh it ends in {_brief(e)}")
            return False
        raise _untraceable(e, program.needs) from None
    if found is None:
        return True
    mean = lambda sums: f"{float(sums[0]):.6g} / {float(sums[1]):.6g}"        # noqa: E731
    if parts > 1 and (apart := differs(program.in_parts)):
        by_mesh, part = parts > config.accumulate, count // _parts(dataclasses.replace(config, accumulate=accumulate), mesh)
        cuts = [f"--mesh {','.join(f'{a}={sizes[a]}' for a in shard.BATCH if sizes[a] > 1)}"] * by_mesh
        cuts += [f"--accumulate {config.accumulate}"] * (config.accumulate > 1)
        raise Refused(f"this loss is no sum over the rows of a batch: of {count} rows it is {mean(apart['wanted'])} (sum / "
                      f"count), of {part} at a time, added up, {mean(apart['sums'])}, and what differs is {apart['why']}; "
                      f"{' and '.join(cuts)} cut the batch: return sums over rows, or give {'--step jit ' * by_mesh}"
                      f"--accumulate 1" + " and no pipe or seq in --mesh" * (by_mesh and sizes["pipe"] * sizes["seq"] > 1))
    if program.typed and not program.needs:
        say(f"this loss is computed as on one device, with all weights gathered at once: on a mesh {found['why']} would differ")
        return False
    axes = " and ".join(program.needs or [f"{a}={n}" for a, n in sizes.items() if n > 1])
    raise Refused(f"mesh axis {axes}: on this mesh the loss of {count} rows is {mean(found['sums'])} (sum / count), on one device "
                  f"{mean(found['wanted'])}, and what differs is {found['why']}; what picks or pools positions of the time, or "
                  f"adds up layers' weights outside of shard.through, sees a part of them there"
                  + f", and --chunks {config.chunks} is for shard.through to be told" * (config.chunks > 1) + f": {ANY_LOSS}")


def _parts(config: Config, mesh: Any) -> int:
    """In how many parts the loss of a batch is computed, but for what a compiler does."""
    return config.accumulate * (shard.rows(mesh) if config.step == "shard_map" else 1)


def _untraceable(e: Exception, needs: Sequence[str] = ()) -> Refused:
    """What to say of a loss that one device can compute, and that ends inside jax on a mesh."""
    if needs:
        return Refused(f"mesh axis {' and '.join(needs)}: this loss cannot be computed over it ({_brief(e)}); {ANY_LOSS}")
    return Refused(f"this loss cannot be computed inside a shard_map ({_brief(e)}); what it closes over must not lie on a mesh "
                   f"(jax.device_get takes it off), nor may it say where arrays lie; or give --step jit")


def _differences(found: dict[str, Any], narrow: bool, times: int) -> str:
    """What of the two results that _comparisons gives differs by more than so many times what rounding may be: a share of
    it (larger where there are 16 bits, in which sums may be rounded), and four times what moving the weights by their
    rounding does."""
    near, far = (6e-3 * times, 2e-2 * times) if narrow else (3e-5 * times, 2e-4 * times)
    names = ["the sum", "the count", *(f"its other sum {k!r}" for k in sorted(found["wanted"][2]))]
    noise = jax.tree.leaves(found["sums_noise"])
    pairs = list(zip(names, jax.tree.leaves(found["sums"]), jax.tree.leaves(found["wanted"]), noise))
    pairs += zip(("the held-out sum", "the held-out count"), found.get("held", ()), found.get("held_wanted", ()), noise)
    why = [name for name, a, b, slack in pairs if not np.allclose(a, b, near, 4 * times * np.nan_to_num(slack), equal_nan=True)]
    gaps = [_by_path(found[k]) for k in ("gaps", "norms", "gaps_noise")]
    # (The smallest of gradients are rounding whatever is done: that of a bias that shifts all scores alike.)
    least = 1e-9 * float(np.linalg.norm(list(gaps[1].values())))
    why += [f"the gradient of {path}" for path, gap in gaps[0].items()
            if not gap <= far * gaps[1][path] + 4 * times * gaps[2][path] + least]
    return ", ".join(why[:3]) + f" and {len(why) - 3} more" * (len(why) > 3)


def _shapes(config: Config, collate: Callable, examples: Sequence) -> dict[str, Any]:
    """What a batch of these examples looks like."""
    if not len(examples):
        raise Refused("there are no examples to learn from")
    batch = {k: jax.ShapeDtypeStruct((config.batch, *v.shape[1:]), v.dtype)
             for k, v in _arrays(collate, [examples[0]]).items()}
    return {**batch, "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}


def _arrays(collate: Callable, examples: list) -> dict[str, np.ndarray]:
    batch = {k: np.asarray(v) for k, v in collate(examples).items()}
    for k, v in batch.items():
        if v.shape[:1] != (len(examples),):
            raise Refused(f"collate made {k!r} of shape {v.shape} from {len(examples)} examples: "
                          f"the first dimension must count them")
    return batch


def _loop(program, run, say, stop, collate, predict, examples, held_out, show, flops,
          bits_per_nat) -> Fit:
    config, pending, score, outputs = program.config, None, None, None
    clock = time.perf_counter()
    _watch.expect("reading the checkpoint")
    state = run and run.restore(say.line)
    if state is None:
        state = program.start(jax.random.key(config.seed))
    chunks = config.chunks if config.step == "shard_map" else 1
    natural = lambda tree: shard.turned(tree, chunks, back=True)        # noqa: E731
    state = shard.turned(state, chunks)
    at = int(state["step"])
    if at:
        say.line(f"continuing {config.out} at step {at}")
    if at >= config.steps:
        say.line(f"{config.out} has its {at} steps; --steps with a higher number goes on")
    else:
        _watch.expect("compiling")
        step = compiled(program)
        everyone("compiled")        # before the devices first wait for each other
        if run:
            checksums(_items(natural(state)))       # so that no save has to wait for its compiling
        took, memory = time.perf_counter() - clock, step.memory_analysis()
        say.line(f"ready in {took:.1f} s; compiled step: "
                 f"{shard.human(memory.argument_size_in_bytes)} of state and batch, "
                 f"{shard.human(memory.temp_size_in_bytes)} of temporaries a device")
        say.sends(program, shard.collectives(step))
        # What the compiler took and freed is given back: glibc would keep it, a quarter of a gigabyte.
        getattr(ctypes.CDLL(None), "malloc_trim", id)(0)
        clock = time.perf_counter()

    in_a_row, saving, recent = run.skipped if run else 0, 0.0, collections.deque(maxlen=128)

    def settle():
        """Write down the step whose numbers are still on the devices."""
        nonlocal pending, clock, in_a_row, saving
        if pending is None:
            return
        number, metrics = pending
        pending = None
        _watch.expect("a step")
        values = jax.tree.map(lambda v: np.round(np.asarray(v, float), 5).tolist() if np.ndim(v)
                              else float(v), jax.device_get(metrics))
        now = time.perf_counter()
        took, clock = now - clock, now
        row = {"step": number, "loss": values["loss"], "lr": values["lr"],
               "grad_norm": values["grad_norm"], "tokens": int(np.nan_to_num(values["tokens"])),
               "tokens_per_second": round(values["tokens"] / took, 1),
               "mfu": _mfu(flops, took, program.mesh), "save_seconds": round(saving, 4)}
        in_a_row, saving = in_a_row + 1 if values["skipped"] else 0, 0.0
        row |= {**{k: v for k, v in values.items() if k not in row}, "skipped": in_a_row}
        if run:
            run.write(row)
        say.step(row, took)
        if len(recent) >= 32 and row["loss"] > statistics.fmean(recent) + 6 * statistics.pstdev(recent):
            say.line(f"step {number}: the loss, {row['loss']:.4f}, is far above that of the last {len(recent)} steps, "
                     f"{statistics.fmean(recent):.4f}")
        if math.isfinite(row["loss"]):
            recent.append(row["loss"])
        if in_a_row:
            chosen = _chosen(config, examples, number - 1, 0, config.batch)
            batch = f"its batch is of examples {', '.join(map(str, chosen[:8]))}" + ", ..." * (len(chosen) > 8)
            say.line(f"step {number}: the gradient is not finite, so nothing was learned; {batch}")
            if in_a_row >= config.max_skipped:
                if run:
                    run.drain()         # every process is here
                raise Fault(f"step {number}: the gradient was not finite, {in_a_row} times in a row "
                            f"(--max_skipped); {batch}; what is saved is finite")

    def save():
        nonlocal saving
        settle()
        _watch.expect("a save")
        before = time.perf_counter()
        run.save(at, natural(state), in_a_row)
        saving += time.perf_counter() - before
        _watch.expect("a step")

    def judge(run):
        """Evaluate, write it down and say it."""
        nonlocal clock
        _watch.expect("an evaluation")
        score, outputs = _evaluate(program, state["params"], natural, collate, predict, held_out)
        row = {"step": at, "eval_loss": score,
               "bits_per_byte": None if bits_per_nat is None else score * bits_per_nat}
        if run:
            run.write(row)
        say.evaluation(row, show(outputs) if show and predict else None)
        clock = time.perf_counter()
        _watch.expect("a step")
        return score, outputs

    traced = range(at + 2, min(at + 2 + config.profile, config.steps))      # what comes first is not as usual
    trace = str(Path(config.out or ".") / "profile")
    while at < config.steps and not stop:
        if traced and at == traced.start:
            jax.profiler.start_trace(trace, create_perfetto_trace=True)
        placed = _batch(program, collate, examples, at)
        state, metrics = step(state, placed)
        at += 1
        if traced and at == traced.stop:
            settle()
            jax.profiler.stop_trace()
            say.line(f"a trace of {len(traced)} steps is in {trace}: open its perfetto_trace.json.gz in ui.perfetto.dev")
        settle()            # of the step before: the devices already have the next one
        pending = at, metrics
        last = at == config.steps
        if len(held_out) and (last or at % config.eval_every == 0):
            settle()
            score, outputs = judge(run)
        if run and (last or at % config.save_every == 0):
            save()
        # The signal that one process was sent is for all, after the same step.
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(next(_asked)):
            stop.append(signal.SIGTERM)
    settle()
    if stop and run:
        save()
    if stop:
        say.line(f"stopped at step {at} by {signal.Signals(stop[0]).name}"
                 + (f", saved in {config.out}: run the same command to continue" if run else ""))
    elif score is None and len(held_out):       # a finished run was asked for again
        score, outputs = judge(None)
    return Fit(natural(state["params"]), at, score, outputs)


def _place(program: Program, make: Callable[[int, int], dict], count: int, split: bool = True
           ) -> Any:
    """A batch on the mesh, of which this process makes only the rows that its devices hold.
    make(first, last) gives those rows."""
    spec = shard.batch_spec(program.mesh) if split else P()
    place = NamedSharding(program.mesh, spec)
    here = [i[0].indices(count)[:2] for i in
            place.addressable_devices_indices_map((count,)).values()]
    first, last = min(a for a, _ in here), max(b for _, b in here)
    return {k: jax.make_array_from_callback(
                (count, *v.shape[1:]), place,
                lambda i, v=v: v[slice(*(x - first for x in i[0].indices(count)[:2]))])
            for k, v in make(first, last).items()}


def _chosen(config: Config, examples: Sequence, at: int, first: int, last: int) -> np.ndarray:
    """The numbers of the examples in rows first to last of update number `at` (from 0)."""
    return data.order(len(examples), config.seed, at * config.batch + first, last - first)


def _batch(program: Program, collate: Callable, examples: Sequence, at: int, count: int = 0) -> Any:
    """Update number `at`'s batch, or its first rows: a pure function of the seed and the number."""
    config = program.config

    def make(first, last):
        batch = _arrays(collate, [examples[int(i)] for i in _chosen(config, examples, at, first, last)])
        for k, x in batch.items():
            if x.shape[1:] != program.batch[k].shape[1:]:
                raise Refused(f"collate made {k!r} of rows of shape {list(x.shape[1:])} of some examples, and "
                              f"{list(program.batch[k].shape[1:])} of the first one: pad every batch to the same shape")
        # A seed for each row: randomness belongs to the example, wherever it is computed.
        spot = np.arange(first, last, dtype=np.uint64) + np.uint64(at * config.batch)
        spot = spot * np.uint64(2**32) + np.uint64(config.seed)
        batch["seeds"] = data.mix(spot).astype(np.uint32)
        return batch

    return _place(program, make, count or config.batch)


def _evaluate(program: Program, params: Any, natural: Callable, collate: Callable,
              predict: Callable | None, held_out: Sequence) -> tuple[float, Any]:
    """The loss over every held-out example, and the prediction for the first few."""
    config, groups = program.config, shard.rows(program.mesh)
    size, pairs, first = config.batch // config.accumulate, [], 0

    def placed(first, n):
        make = lambda a, b: _arrays(  # noqa: E731
            collate, [held_out[i] for i in range(first + a, first + b)])
        return _place(program, make, n, n % groups == 0)

    while first < len(held_out):
        n = min(size, len(held_out) - first)
        if config.step == "shard_map":          # (with jit rows may be coupled: those of one device stay together)
            n = n // groups * groups or n       # the last few, fewer than groups, by everyone
        pairs.append(program.evaluate(params, placed(first, n)))
        pairs[-1][0].block_until_ready()        # un-awaited collectives deadlock the CPU backend
        first += n
    sums = np.sum([[float(s), float(c)] for s, c in pairs], axis=0)
    outputs = None
    if predict is not None:
        outputs = jax.device_get(jax.jit(predict, out_shardings=NamedSharding(program.mesh, P()))(
            natural(params), placed(0, min(groups, len(held_out)))))
    return float(sums[0] / (sums[1] or 1)), outputs


@contextlib.contextmanager
def _on_signals(stop: list[int]) -> Any:
    """The first Ctrl-C or SIGTERM asks the loop to finish its step; a second one is not ours. Of several
    processes jax takes SIGTERM, and tells the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def undo():
        for n, handler in before:
            signal.signal(n, handler)

    def ask(number, frame):
        undo()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            stop.append(number)

    several = jax.process_count() > 1
    before = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)[:2 - several]]
    for n, _ in before:
        signal.signal(n, ask)
    try:
        yield
    finally:
        undo()


# -------------------------------------------------------------------------------------------
# What a run leaves on disk

def _record(program: Program, record: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of a run: what it is, not on which hosts."""
    shapes = str([(path, w.shape, str(w.dtype)) for path, w in
                  zip(*shard.flatten(program.state["params"])[:2])])
    config = {k: v for k, v in dataclasses.asdict(program.config).items() if k not in HOSTS + ASKED}
    return {**config, **record, "weights": hashlib.sha256(shapes.encode()).hexdigest()[:16]}


def check_run(out: str, now: dict[str, Any], needs: Sequence[str] = ()) -> None:
    """Refuse to continue a run that was another one, before anything is touched."""
    if Path(out).exists() and not Path(out).is_dir():
        raise Refused(f"--out {out} is a file; give a folder")
    if not (Path(out) / "config.json").exists():
        return
    old = model.read_run(out)
    if missing := [name for name in needs if name not in old]:
        raise Refused(f"--out {out} holds a run of another task (it has no {missing[0]}); give "
                      f"another --out")
    for name, value in now.items():
        value = list(value) if isinstance(value, tuple) else value
        known = value or name not in ("vocab_size", "dtype")    # these may still be to follow
        if name in old and old[name] != value and known:
            raise Refused(f"--out {out} holds a run with {name} {old[name]!r}, and {value!r} was "
                          f"given: continue with what it was, or give another --out")


def _step_of(line: str) -> float:
    """The step of a line of metrics; of one that was cut short, none that will be reached."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


class Run:
    """The folder of a run: config.json, metrics.jsonl, checkpoints/STEP. Of several processes the first
    writes, but for the arrays, of which each writes its own part."""

    def __init__(self, program: Program, record: dict[str, Any]):
        import orbax.checkpoint as ocp
        self.ocp, self.program, config = ocp, program, program.config
        self.folder, self.metrics, self.skipped = Path(config.out).resolve(), None, 0
        self.first, self.lock, self.saved = jax.process_index() == 0, None, None
        check_run(config.out, {k: v for k, v in record.items()
                               if k in SAME or not hasattr(config, k)})
        word = secrets.token_hex(8)
        if self.first:
            self._take(word, record)
        word = everyone(word)[0]
        blind = [i for i, sees in enumerate(everyone(self._sees(word))) if not sees]
        if blind:
            raise Refused(f"--out {config.out}: process {blind[0]} does not see what process 0 writes there; give a "
                          f"folder that every process sees")
        # orbax would note which devices held what, and then refuse to open the checkpoint on
        # other ones unless told where to put it. Without the note it opens anywhere.
        logging.disable(logging.WARNING)        # it warns that it does as it is told
        ocp.type_handlers.register_type_handler(
            jax.Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False),
            override=True)
        logging.disable(logging.NOTSET)
        logging.getLogger("absl").setLevel(logging.CRITICAL)    # what goes wrong is said in one line
        self.manager = ocp.CheckpointManager(
            self.folder / "checkpoints", item_names=("params", "opt", "meta"),
            options=ocp.CheckpointManagerOptions(max_to_keep=config.keep,
                                                 cleanup_tmp_directories=True))

    def _take(self, word: str, record: dict[str, Any]) -> None:
        """The folder is this run's while it lasts."""
        out = self.program.config.out
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.lock = open(self.folder / "lock", "a")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)      # it ends with the process
            self.lock.truncate(0)
            self.lock.write(word)
            self.lock.flush()
            os.fsync(self.lock.fileno())
            data.write_json(self.folder / "config.json", record)
        except BlockingIOError:
            raise Refused(f"--out {out}: another run is writing there; give another --out, or wait for it to "
                          f"end") from None
        except OSError as e:
            raise Refused(f"--out {out}: cannot be written ({e.strerror})") from None

    def _sees(self, word: str) -> bool:
        """Whether the folder is the one in which process 0 wrote this."""
        return data.appears(lambda: (self.folder / "lock").read_text() == word, self.folder,
                            min(60, self.program.config.patience))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Wait for the save in flight, which would be lost otherwise; but not where one process of several
        failed, for the others would never come."""
        if kind is None or jax.process_count() == 1:
            self.close()

    def restore(self, say: Callable = print) -> Any:
        """The newest checkpoint that is whole, in its places on the mesh, or None. The metrics of
        steps after it are dropped: they will be made again. What is damaged is set aside."""
        state, step, damaged = None, None, []
        for at in everyone(sorted(self.manager.all_steps(), reverse=True))[0]:
            try:
                state, step = self._read(at), at
                break
            except Damaged as e:
                why = str(e)
            place = self.folder / "checkpoints"
            aside = next(p for i in range(10**6) if not (
                p := place / (f"damaged-{at}" + f"-{i}" * (i > 0))).exists())
            everyone("the name is free")
            if self.first:
                (place / str(at)).rename(aside)
            damaged.append(aside)
            say(f"checkpoint {at} is damaged ({why}): set aside as {aside.name}")
            everyone("it is aside")
            self.manager.reload()
        if damaged and state is None:
            raise Fault(f"none of the {len(damaged)} checkpoints in {self.folder / 'checkpoints'} can be read; "
                        f"they were set aside, and the same command begins anew")
        self.saved = step
        if not self.first:
            return state
        path = self.folder / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines(keepends=True)
                    if _step_of(line) <= (step or 0)]
            part = path.with_suffix(".part")
            part.write_text("".join(kept))
            os.replace(part, path)
        self.metrics = open(path, "a")
        return state

    def _read(self, at: int) -> Any:
        got, meta = read_checkpoint(self.folder / "checkpoints" / str(at), _items(self.program.state),
                                    f"--out {self.program.config.out}", self.program.config.verify == "on",
                                    lambda why: next(filter(None, everyone(why)), None))
        self.skipped = meta.get("skipped", 0)
        return {"params": got["params"], **got["opt"]}

    def write(self, row: dict[str, Any]) -> None:
        if not self.first:
            return
        finite = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v     # noqa: E731
        self.metrics.write(json.dumps({k: finite(v) for k, v in row.items()}) + "\n")
        self.metrics.flush()

    def save(self, at: int, state: Any, skipped: int = 0) -> None:
        if self.saved == at:
            return
        arg, items = self.ocp.args, _items(state)
        meta = {"step": at, "skipped": skipped, "leaves": _kinds(items), "checksums": checksums(items)}
        with self._or_fault(f"the checkpoint of step {at} could not be saved"):
            if not self.manager.save(at, force=True, args=arg.Composite(
                    meta=arg.JsonSave(meta),
                    **{name: arg.StandardSave(tree) for name, tree in items.items()})):
                raise Fault(f"the checkpoint of step {at} was not saved")
        self.saved = at

    @contextlib.contextmanager
    def _or_fault(self, what: str) -> Any:
        """A disk that is full, say, in one line. Those of a save in the background come later."""
        try:
            yield
        except (Fault, Refused):
            raise
        except Exception as e:
            logging.disable(logging.CRITICAL)
            sys.unraisablehook = lambda _: None
            raise Fault(f"{what}: {_brief(e)}; checkpoints before it are whole") from None

    def drain(self) -> None:
        """Wait for the save in flight, which would be lost otherwise."""
        _watch.expect("a save")
        with self._or_fault("the last checkpoint could not be saved"):
            self.manager.wait_until_finished()

    def close(self) -> None:
        try:
            self.drain()
            with self._or_fault("the last checkpoint could not be saved"):
                self.manager.close()
        finally:
            if self.metrics:
                self.metrics.close()
            if self.lock:
                self.lock.close()


class Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


def _items(state: Any) -> dict[str, Any]:
    """A state as the items of a checkpoint: the weights alone, and what only training needs."""
    return {"params": state["params"], "opt": {"opt": state["opt"], "step": state["step"]}}


def _by_path(tree: Any) -> dict[str, Any]:
    return dict(zip(*shard.flatten(tree)[:2]))


def _kinds(tree: Any) -> dict[str, str]:
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in _by_path(tree).items()}


def checksum(x: jax.Array) -> jax.Array:
    """A number that any one changed bit changes, and that no mesh does: the sum of the bits of each
    element, times an odd number that its place decides, modulo 2**32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for d, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, d)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


@functools.lru_cache(maxsize=None)
def _summing(mesh: Any) -> Callable:
    return jax.jit(lambda tree: jax.tree.map(checksum, tree), out_shardings=NamedSharding(mesh, P()),
                   compiler_options=shard.compiler_options(mesh))


def checksums(tree: Any) -> dict[str, int]:
    """Of each array on a mesh, by its path."""
    found = jax.device_get(_summing(shard.mesh_of(tree))(tree))
    return {path: int(x) for path, x in _by_path(found).items()}


def read_checkpoint(folder: Path, wanted: dict[str, Any], whose: str, verify: bool = True,
                    together: Callable = lambda why: why) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a checkpoint the items that are wanted, in their places, and its description. What it holds is looked
    at before an array is read, and the arrays' checksums after. Raises Damaged. Each process reads its part
    by itself, and one of them alone may find that it cannot: `together` makes its reason everyone's."""
    try:
        (got, meta), why = _read_part(folder, wanted, whose), None
    except Damaged as e:
        why = str(e)
    if why := together(why):
        raise Damaged(why)
    sums = meta.get("checksums")
    if sums is not None and verify:
        for path, sum_ in checksums(got).items():
            if sum_ != sums.get(path):
                raise Damaged(f"the checksum of {path} is not the one that was saved")
    return got, meta


def _read_part(folder: Path, wanted: dict[str, Any], whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import orbax.checkpoint as ocp
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={me},
                                               barrier_sync_key_prefix=str(me))
    try:
        meta = json.loads((folder / "meta" / "metadata").read_text())
        kinds, of = meta.get("leaves"), meta["step"]
    except Exception as e:
        raise _harm(folder, e, "its description cannot be read") from None
    if str(of) != folder.name:
        raise Damaged(f"it says that it is of step {of}")
    for path, kind in _kinds(wanted).items():
        if kinds is not None and kinds.get(path) != kind:
            raise Refused(f"{whose}: checkpoint {of} has {path} as {kinds.get(path, 'nothing')}, and this run as "
                          f"{kind}")
    with _silence():
        try:
            with ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
                return {name: reader.restore(folder / name, tree) for name, tree in wanted.items()}, meta
        except Exception as e:
            raise _harm(folder, e, "it cannot be read") from None


def _harm(folder: Path, e: Exception, what: str) -> Exception:
    """Is it the checkpoint, or this machine? For the second nothing is to be set aside."""
    if isinstance(e, MemoryError) or re.search("RESOURCE_EXHAUSTED|Cannot allocate|Input/output error|Stale file|"
                                               "Too many open files|Permission denied|PERMISSION_DENIED", str(e)):
        return Fault(f"checkpoint {folder.name}: {what} on this machine now: {_brief(e)}; nothing was set aside")
    return Damaged(f"{what}: {_brief(e)}")


def _brief(e: Exception) -> str:
    """What matters of an exception's text, on one line."""
    text = " ".join(str(e).split()) or type(e).__name__
    for part in ("No space left", "File too large", "DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND"):
        if part in text:
            return part.lower().replace("_", " ")
    return text.split(" See full TensorStore")[0][:120]


@contextlib.contextmanager
def _silence() -> Any:
    """Without the hundreds of lines that reading a damaged checkpoint prints."""
    logging.disable(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        gc.collect()            # what is left of a failed attempt complains when it is cleared away
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook


# -------------------------------------------------------------------------------------------
# What a person sees

class Chip(NamedTuple):
    """What its maker says of one device: operations a second in bfloat16; bytes of memory; bytes a second
    from memory, and to other chips over all links, one way."""
    flops: float
    memory: float
    bandwidth: float
    links: float


# By the start of a device's name. (Of a TPU7x chip each of the two cores is a device.)
CHIPS = {"TPU v4": Chip(275e12, 32 * 2**30, 1.228e12, 300e9), "TPU v5 lite": Chip(197e12, 16 * 2**30, 0.819e12, 200e9),
         "TPU v5": Chip(459e12, 95 * 2**30, 2.765e12, 600e9), "TPU v6 lite": Chip(918e12, 32 * 2**30, 1.64e12, 448e9),
         "TPU7x": Chip(1153e12, 96 * 2**30, 3.69e12, 600e9), "NVIDIA A100": Chip(312e12, 80e9, 2.04e12, 300e9),
         "NVIDIA H100": Chip(989e12, 80e9, 3.35e12, 450e9), "NVIDIA H200": Chip(989e12, 141e9, 4.8e12, 450e9)}


def _chip(device: Any) -> Chip | None:
    return next((chip for name, chip in CHIPS.items() if device.device_kind.startswith(name)), None)


def _peak(step: jax.stages.Compiled) -> int:
    """Bytes of a device that a compiled program needs at once."""
    m = step.memory_analysis()
    return getattr(m, "peak_memory_in_bytes", 0) or (m.argument_size_in_bytes + m.temp_size_in_bytes
                                                     + m.output_size_in_bytes - m.alias_size_in_bytes)


def _mfu(flops: float | None, seconds: float, mesh: Any) -> float | None:
    """Share of the devices' peak that an update's arithmetic is, or None where unknown."""
    chip = _chip(mesh.devices.flat[0])
    return flops / seconds / (chip.flops * mesh.size) if flops and chip else None


def _foretold(program: Program, step: jax.stages.Compiled, found: list[shard.Collective] | None, say: Callable
              ) -> None:
    """What a program that cannot be run here says of itself: memory, arithmetic, what it sends (`found`; None: it
    cannot be read, and the formula's is taken), and what the chip's published rates make of that."""
    config, mesh, chip = program.config, program.mesh, _chip(program.mesh.devices.flat[0])
    memory, tokens, peak = step.memory_analysis(), config.batch * config.seq_len, _peak(step)
    gib = lambda x: f"{x / 2**30:.2f} GiB"       # noqa: E731
    say(f"memory   {gib(memory.argument_size_in_bytes)} of state and batch, {gib(memory.temp_size_in_bytes)} of temporaries, "
        f"peak {gib(peak)} a device" + (f", which has {gib(chip.memory)}: "
                                        + ("it fits" if peak < chip.memory else "IT DOES NOT FIT") if chip else ""))
    whole = model.flops(config, tokens) / mesh.size
    if found is None:
        done, sent = whole, sum(c.bytes for c in formula(program))
    else:
        # Of the rows for which an expert's device has room, so many are tokens on average.
        devices = mesh.shape["expert"] if config.step == "shard_map" else 1
        own = max(1, config.experts // devices)
        tokens_of = config.experts_per_token / devices / min(config.experts_per_token, own)
        done, sent = shard.arithmetic(step, tokens_of), sum(c.bytes for c in found)
    say(f"compute  {done / 1e12:.2f} Tflop a device, {done / whole:.3f} of 6 a weight and token and attention with every key")
    say(f"links    {gib(sent)} sent by a device")
    if chip:
        moved = memory.argument_size_in_bytes + memory.output_size_in_bytes + 2 * memory.temp_size_in_bytes
        takes = {"arithmetic": done / chip.flops, "memory": moved / chip.bandwidth, "links": sent / chip.links}
        worst = max(takes, key=takes.get)
        say("bound    " + ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in takes.items()) + f": a step takes at least "
            f"{takes[worst] * 1e3:.1f} ms ({worst}), {tokens / takes[worst]:,.0f} tokens/s, mfu at most "
            f"{whole / chip.flops / takes[worst]:.1%}, if each runs at its published rate ({chip.flops / 1e12:.0f} Tflop/s, "
            f"{chip.bandwidth / 1e9:.0f} GB/s, {chip.links / 1e9:.0f} GB/s over all links) and all at once")


def _counted(program: Program) -> str:
    """How many parameters there are, for a person."""
    held = model.count(program.state["params"])
    if not _is_ours(program):
        return f"{held:,} parameters"
    total, visited = model.parameters(program.config)
    return (f"{total:,} parameters" + (f", of which a token visits {visited:,}" if visited < total else "")
            + (f" (and {held - total:,} of padding, in rows of the vocabulary that no token has)" if held > total else ""))


class _Say:
    """A live line on a terminal, plain lines elsewhere; nothing from other processes."""

    def __init__(self, config: Config):
        self.config, self.tty = config, sys.stdout.isatty()
        self.quiet, self.times = jax.process_index() > 0, []

    def line(self, text: str) -> None:
        if not self.quiet:
            print(("\r\x1b[K" if self.tty else "") + text, flush=True)

    def header(self, program: Program) -> None:
        mesh, config = program.mesh, program.config
        device, n = mesh.devices.flat[0], mesh.size
        what = (f"{n} simulated CPU device{'s'[:n > 1]}, no accelerator was found"
                if device.platform == "cpu" else f"{n} x {device.device_kind}")
        if config.topology:
            what += " that are not here: compiled, not run"
        elif jax.process_count() > 1:
            what += f" in {jax.process_count()} processes"
        self.line(f"=== zigzag on {what} | {config.dtype} | step by {config.step} ===")
        self.line("mesh     " + " ".join(f"{a}={s}" for a, s in mesh.shape.items()))
        fields = {k: v for k, v in dataclasses.asdict(config).items()
                  if k not in ("mesh", "shards", "dtype", "step", *HOSTS, *ASKED)}
        text = "config  "
        for k, v in fields.items():
            word = f" {k}={' '.join(v) or '-' if isinstance(v, tuple) else v if v != '' else '-'}"
            if len(text.splitlines()[-1]) + len(word) > 100:
                text += "\n        "
            text += word
        self.line(text)
        params = program.state["params"]
        self.line(f"weights  {_counted(program)}")
        self.line(shard.explain(program.decisions, params, mesh, bool(config.zero)))
        if dict(mesh.shape)["pipe"] > 1 and config.step == "shard_map":
            self.line(shard.timeline(dict(mesh.shape)["pipe"], config.microbatches, config.schedule,
                                     config.chunks))

    def sends(self, program: Program, found: list[shard.Collective]) -> None:
        """What an update really sends, beside what the formula says it must."""
        said = {(c.kind, c.axis): c for c in formula(program)}
        for c in found:
            say = said.pop((c.kind, c.axis), None)
            self.line(f"sends    {shard.human(c.bytes):>7} a device and update in {c.count} {c.kind} "
                      f"over {c.axis} (formula: "
                      + (f"{shard.human(say.bytes)} in {say.count})" if say else "none)"))
        for c in said.values():
            self.line(f"sends    nothing in {c.kind} over {c.axis} (formula: "
                      f"{shard.human(c.bytes)} in {c.count})")

    def step(self, row: dict[str, Any], took: float) -> None:
        if row["step"] > 1:
            self.times = [*self.times[-49:], took]
        total, at = self.config.steps, row["step"]
        every = max(1, total // 20)
        if not (self.tty or at % every == 0 or at in (1, total)):
            return
        usual = statistics.median(self.times) if self.times else took
        left = f"{(total - at) * usual:.0f} s left" if self.times else "-"
        mfu = "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}"
        text = (f"step {at:>{len(str(total))}}/{total}  loss {row['loss']:.4f}  "
                f"{row['tokens'] / usual:,.0f} tokens/s  mfu {mfu}  "
                f"grad {row['grad_norm']:.2f}  lr {row['lr']:.2e}  {shard.human(_in_use())}  {left}")
        if self.quiet:
            return
        if self.tty:
            width = shutil.get_terminal_size().columns
            print("\r\x1b[K" + text[:width - 1], end="", flush=True)
        else:
            print(text, flush=True)

    def evaluation(self, row: dict[str, Any], text: str | None) -> None:
        bits = row["bits_per_byte"]
        self.line(f"step {row['step']}  held-out loss {row['eval_loss']:.4f}"
                  + (f"  ({bits:.4f} bits per byte)" if bits is not None else ""))
        if text:
            clean = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
            self.line("\n".join("    | " + line for line in clean.split("\n")))


def _in_use(what: str = "bytes_in_use") -> int:
    """Bytes of memory: the device's where it counts them, else the process's peak."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get(what) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -------------------------------------------------------------------------------------------
# The command line

def flags(defaults: Any, argv: Sequence[str] | None = None, positional: str = "") -> Any:
    """A dataclass as a command line: --key value or --key=value, dashes or underscores. Gives
    the dataclass, and before it the other words where some are expected."""
    argv = list(sys.argv[1:] if argv is None else argv)
    given, words = _read(type(defaults), argv, positional)
    result = dataclasses.replace(defaults, **given)
    return (words, result) if positional else result


def parse(argv: Sequence[str] | None = None) -> Config:
    """train.py's command line as a Config."""
    given, _ = _read(Config, list(sys.argv[1:] if argv is None else argv), "")
    name = given.get("model", "tiny")
    if name not in model.PRESETS:
        if Path(name).is_dir():
            model.load_hf(name)
        raise Refused(f"--model {name}: expected one of {', '.join(model.PRESETS)}"
                      + shard.nearest(name, model.PRESETS))
    if given.get("shards") == 0:
        raise Refused("--shards 0: must be at least 1; left out, the tensor axis is what --mesh says, or 1")
    base = dataclasses.asdict(model.PRESETS[name])
    # What followed from a width that is now another follows from that one.
    if {"d_model", "heads"} & set(given):
        base.update(kv_heads=0, head_dim=0)
    if "d_model" in given:
        base.update(d_ff=0)
    return Config(**{**base, **given})


def _read(cls: Any, argv: list[str], positional: str) -> tuple[dict[str, Any], list[str]]:
    kinds = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    given, words = {}, []
    while argv:
        word = argv.pop(0)
        if word in ("-h", "--help"):
            print(_help(cls, positional))
            sys.exit(0)
        if not word.startswith("--"):
            if not positional:
                raise Refused(f"{word!r} stands alone: options are written --name value"
                              + shard.nearest(word, kinds))
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1, 0.5)
            raise Refused(f"--{name} is not an option" + (f"; did you mean --{near[0]}?" if near
                          else f"; the options are --{' --'.join(kinds)}"))
        kind = kinds[name]
        follows = bool(argv) and not (argv[0].startswith("--") or equals)
        if kind.startswith("tuple"):
            values = [value] if equals else []
            while argv and not argv[0].startswith("--"):
                values.append(argv.pop(0))
            if not values:
                raise Refused(f"--{name} needs at least one value")
            given[name] = given.get(name, ()) + tuple(values)
            continue
        if not equals:
            if not follows and kind != "bool":
                raise Refused(f"--{name} needs a value ({kind})")
            value = argv.pop(0) if follows else "true"
        given[name] = _value(name, kind, value)
    return given, words


def _value(name: str, kind: str, text: str) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "1": True, "yes": True, "false": False, "0": False,
                    "no": False}[text.lower()]
        number = {"int": int, "float": float, "str": str}[kind](text)
    except (ValueError, KeyError):
        want = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise Refused(f"--{name} {text}: expected {want}") from None
    if kind == "int" and abs(number) >= 2**31:
        raise Refused(f"--{name} {text}: must be below 2**31")
    if kind == "float" and not math.isfinite(number):
        raise Refused(f"--{name} {text}: expected a finite number")
    return number


def _help(cls: Any, positional: str) -> str:
    """The fields of the dataclass and the comments beside them."""
    lines = [cls.__doc__, ""]
    for owner in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        for name, default, text in re.findall(r"^    (\w+): [^=\n]+ = (.*?)\s+# (.*)$",
                                              inspect.getsource(owner), re.M):
            default = default.strip('"')
            lines.append(f"  --{name:18} {text}" + (f"  [{default}]" if default not in ("", "()")
                                                    else ""))
    return "\n".join(lines)


# Held-out text that is judged: the same windows each time, spread over all of it.
HELD_OUT_TOKENS = 2**17


class _Bench(_Say):
    """Says only how it begins, and keeps how long each step took."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.begin, self.took, self.first, self.program = time.perf_counter(), [], None, None

    def header(self, program: Program) -> None:
        self.program = program
        self.line(f"{_counted(program)}, a batch of {program.config.batch} x "
                  f"{program.config.seq_len}, {program.config.dtype}, on {program.mesh.size} x "
                  f"{program.mesh.devices.flat[0].device_kind}: "
                  + " ".join(f"{a}={s}" for a, s in program.mesh.shape.items() if s > 1))

    def step(self, row: dict[str, Any], took: float) -> None:
        self.first = self.first or time.perf_counter() - self.begin
        self.took.append(took)
        if self.tty:
            print(f"\r\x1b[Kstep {len(self.took)}/{self.config.steps}  {took:.3f} s", end="", flush=True)


WARM, TIMED = 5, 30         # steps that --bench makes before it looks, and while it does


def bench(config: Config) -> None:
    """--bench: the loop and the loader of a training run, and how long they take."""
    config, _ = choose(config)
    mesh = machine(shard.mesh_sizes(config.mesh, config.shards), config)
    check_model(config, mesh)
    config = dataclasses.replace(resolve(config, mesh), out="", steps=WARM + TIMED, profile=0)
    say, collate = _Bench(config), lambda examples: data.collate(examples, config.seq_len)      # noqa: E731
    with tempfile.TemporaryDirectory() as folder, data.opened(config.data, Path(folder) / "run") as corpus:
        if not config.vocab_size:
            config = dataclasses.replace(config, vocab_size=corpus.tokenizer.vocab_size)
        examples = data.Windows(corpus.train, config.seq_len, vocab_size=config.vocab_size)
        say.line(attends(config, mesh))
        say.begin = time.perf_counter()
        init, loss, _ = language(config)
        fit(config, init, collate, loss, examples=examples, mesh=mesh, say=say)
        if len(say.took) < WARM + TIMED:
            return              # it was stopped, and said so
        program = say.program
        begin = time.perf_counter()
        for at in range(10):
            _batch(program, collate, examples, at)
        loader = (time.perf_counter() - begin) / 10
    step, tokens = statistics.median(say.took[WARM:]), config.batch * config.seq_len
    peak, flops = _in_use("peak_bytes_in_use"), model.flops(config, tokens)
    done, most, mfu = flops / step, _matmul_rate(program), _mfu(flops, step, program.mesh)
    say.line(f"step     {step * 1e3:.1f} ms, the middle of {TIMED} (from {min(say.took[WARM:]) * 1e3:.1f} to "
             f"{max(say.took[WARM:]) * 1e3:.1f}); the first, compiled, after {say.first:.1f} s")
    say.line(f"speed    {tokens / step:,.0f} tokens/s, {done / 1e9:,.0f} Gflop/s (6 a weight and token and attention with "
             f"every key), {done / most:.0%} of the {most / 1e9:,.0f} that a product of matrices reaches here, mfu "
             + ("n/a" if mfu is None else f"{mfu:.1%}"))
    say.line(f"memory   {shard.human(peak)} at most; the loader makes a batch in {loader * 1e3:.1f} ms, while devices work")
    if jax.process_index() == 0:
        print(json.dumps({"tokens_per_second": round(tokens / step, 1), "step_seconds": step, "model_flops_per_second": done,
                          "matmul_flops_per_second": most, "peak_bytes": peak, "first_step_seconds": round(say.first, 3)}))


def _matmul_rate(program: Program) -> float:
    """Operations a second in products of large square matrices, on all devices together."""
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    size, count = (2048, 1) if on_cpu else (8192, 8)        # (simulated devices share the cores)
    a = jnp.ones((size, size), program.config.dtype)
    product = jax.jit(lambda a: jax.lax.fori_loop(0, count, lambda _, x: x @ a * (1 / size), a))
    product(a).block_until_ready()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        product(a).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * size**3 * count / min(times) * (1 if on_cpu else program.mesh.size)


def attends(config: Config, mesh: Any) -> str:
    """How attention is computed, for a person."""
    sizes, rows, T = dict(mesh.shape), config.batch // config.accumulate, config.seq_len
    if config.step == "shard_map":
        if sizes["seq"] > 1:
            return "attend   each device's queries with keys that go around a ring"
    if kernel := shard.fused(config.dtype, T, config.head_dim, mesh):
        return f"attend   by the {kernel} kernel"
    if config.step == "shard_map":
        rows = max(1, rows // shard.rows(mesh) // (config.microbatches if sizes["pipe"] > 1 else 1))
    ends, parts = shard.blocks(rows * config.heads * T * T // sizes["tensor"], T, looped=not shard.lone_cpu(mesh))
    size = f"{'up to ' * (len(ends) * ends[0] > T)}{ends[0]:,}"
    return (f"attend   in {len(ends)} block{'s'[:len(ends) > 1]} of {size} queries, with the keys up to the last of them"
            + f"; each in {parts} parts, computed again in the backward pass" * (parts > 1))


def foretell(config: Config) -> None:
    """--topology: the real step, for hardware that is not here."""
    begin = time.perf_counter()
    program, step = _ready(config)
    say = _Say(program.config)
    say.header(program)
    say.line(attends(program.config, program.mesh))
    step = step or compiled(program)
    say.line(f"compiled in {time.perf_counter() - begin:.1f} s")
    try:
        with _mute():
            found = shard.collectives(step)
        say.sends(program, found)
    except jax.errors.JaxRuntimeError as e:
        found = None
        say.line(f"         the compiler cannot print this program ({_brief(e)}): its arithmetic and what it sends "
                 f"are the formula's")
    _foretold(program, step, found, say.line)


@contextlib.contextmanager
def _mute() -> Any:
    """Without what a compiler prints of its own troubles."""
    keep, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(keep, 2)
        os.close(keep)
        os.close(nothing)


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(argv)
    if config.topology:         # (such programs cannot be read from a cache)
        return foretell(config)
    jax.config.update("jax_compilation_cache_dir", os.environ.get(
        "JAX_COMPILATION_CACHE_DIR", str(_cache() / "compiled")))
    if config.bench:
        return bench(config)
    config, _ = choose(config)
    mesh = machine(shard.mesh_sizes(config.mesh, config.shards), config)
    first = jax.process_index() == 0
    check_model(config, mesh)
    check(config, mesh)
    if not config.out:
        raise Refused("--out '': expected a folder for the run")
    # Before its data is looked at, or anything written.
    check_run(config.out, {name: getattr(config, name) for name in SAME}, ("tokenizer",))
    config = resolve(config, mesh)
    T, out = config.seq_len, Path(config.out)
    if not first:
        everyone("the data is there")
    with data.opened(config.data, out, 0 if first else min(60, config.patience)) as corpus:
        tokenizer = corpus.tokenizer
        if not config.vocab_size:
            config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
        if config.vocab_size < tokenizer.vocab_size:
            raise Refused(f"--vocab_size {config.vocab_size}: the data has "
                          f"{tokenizer.vocab_size} ids")
        if len(corpus.train) <= T:
            raise Refused(f"--seq_len {T}: the data has only {len(corpus.train)} tokens to learn "
                          f"from; give more data or a --seq_len below {len(corpus.train)}")
        record = {"fingerprint": corpus.fingerprint, "tokenizer": tokenizer.kind,
                  "tokenizer_sha256": corpus.record.get("tokenizer_sha256", "")}
        check_run(config.out, record)
    if first:
        everyone("the data is there")
        print(f"data     {corpus}\n{attends(config, mesh)}", flush=True)
    ids = tokenizer.vocab_size
    held_out = data.Windows(corpus.held_out, T, max(1, HELD_OUT_TOKENS // T), ids)
    said = np.concatenate([held_out[i][1:] for i in range(len(held_out))] or [np.zeros(0, int)])
    size = int(tokenizer.lengths()[said].sum())
    init, loss, _ = language(config)
    begin = min(32, T)

    def predict(params, batch):
        tokens = batch["tokens"][:, :begin]
        start = jnp.zeros(tokens.shape[0], jnp.int32)
        new = sample._generate(params, tokens, start, config, 160, 0.8, 0, 1.0, config.seed)
        return jnp.concatenate([tokens, new], 1)

    fit(config, init, lambda examples: data.collate(examples, T), loss, predict,
        data.Windows(corpus.train, T, vocab_size=ids), held_out, mesh=mesh,
        show=lambda ids: " ==> ".join(map(tokenizer.decode, (ids[0][:begin], ids[0][begin:]))),
        flops=model.flops(config, config.batch * T),
        bits_per_nat=len(said) / size / math.log(2) if size else None,
        record=record)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zigzag"


def run(main: Callable) -> None:
    """A command line: what is refused is one line and status 2, what goes wrong one and status 1; a bug stays
    a traceback. A process of several ends at once, so that the others notice."""
    status, text, at_once, several = 1, "", False, jax.distributed.is_initialized
    try:
        main()
        _watch.expect("")
        return
    except Refused as e:
        status, text = 2, " ".join(str(e).split())
    except Fault as e:
        text, at_once = str(e), True        # what a failed save left behind would complain at length
    except KeyboardInterrupt:
        status, text = 130, "interrupted: the same command goes on from the last checkpoint, if there is one"
    except Exception as e:
        if several() and _LOST.search(str(e)):
            text = f"another process has ended, and says why if it could ({_brief(e)}); {AGAIN}"
        elif isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
            text = ("out of memory: " + str(e).splitlines()[0] + "; a larger --mesh, --remat full or more "
                    "--accumulate need less (python shard.py shows what the weights take)")
        elif several():
            traceback.print_exc()
        else:
            raise
    if text:
        print("error: " * (status != 130) + text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if several() and distributed.global_state.process_id == 0:
        time.sleep(1)       # the others' words pass through this process: they may have the same to say
    (os._exit if at_once or several() else sys.exit)(status)


# What an error says when it is another process that is gone.
_LOST = re.compile("gloo|connection (reset|closed|refused|aborted)|broken pipe|nccl|heartbeat|coordination service|"
                   "unavailable|deadline.exceeded|barrier", re.I)


if __name__ == "__main__":
    import train        # the module, not the script: sample.py and data.py import it too
    train.run(train.main)
