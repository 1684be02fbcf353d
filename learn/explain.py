"""One page about a run: who holds what, what fills memory, what is sent, and how long it takes.

    python -m learn.explain out.html --mesh data=2,fsdp=2,tensor=2
    python -m learn.explain out.html --topology v5e:4x4 --mesh fsdp=16 --model 1.2b --batch 32
    python -m learn.explain out.html --run out/one --shards 2

It compiles the step as train.py would, but doesn't run it. It compiles for the devices here
(simulated ones on a CPU) or for the --topology devices. The remaining flags are train.py's. With
--run, the page describes that run's step; you may pass only flags that don't change its numbers
(--mesh, --remat, --topology ...). The page works offline. `python train.py --plot RUN` plots a
run's loss.
"""

import html
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import jax

import shard
import train
from forecast import estimate
from forecast.traffic import expected_traffic
from zigzag.commands import command_line, continued, programs
from zigzag.core import chips
from zigzag.core.errors import human_bytes
from zigzag.core.mesh import axes_in_use
from zigzag.parallel import hlo
from zigzag.parallel.network import network_of
from zigzag.parallel.pipeline import passes

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
a { color: #0645ad } a:focus, summary:focus, .wide:focus { outline: 3px solid #ee8866 }
table { border-collapse: collapse } caption { text-align: left; font-weight: bold }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884;
         vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } pre { font-size: 13px; line-height: 1.35 }
@media (prefers-color-scheme: dark) { body { color: #eee; background: #1b1b1b }
                                      a { color: #8ab4f8 } }
"""
# If we don't know a device's numbers, we use this chip's.
USUAL_CHIP = "TPU v5 lite"


class Run(NamedTuple):
    """The data behind the page."""
    program: Any
    compiled: jax.stages.Compiled
    chip: chips.Chip
    about_chip: str
    sent: Sequence[hlo.Collective]          # by the compiled program
    expected: Sequence[hlo.Collective]      # by formulas
    flops: float                            # per device, in one update
    note: str                               # why `sent` and `flops` are expected values, or ""


def compiled(config: Any) -> Run:
    """The config's compiled step, and the figures that can be read from it."""
    program, step = programs.ready_to_run(config)
    device = program.mesh.devices.flat[0]
    chip = chips.chip_of(device)
    about = (f"{device.device_kind}, as published" if chip else
             f"those of a {USUAL_CHIP}, because this device's ({device.device_kind}) are unknown")
    expected = expected_traffic(program.plan)
    sent, flops, note = estimate.work_of(program, step, expected)
    return Run(program, step, chip or chips.CHIPS[USUAL_CHIP], about, sent, expected, flops, note)


# -------------------------------------------------------------------------------------------
# The sections: each returns HTML

def who_holds_what(run: Run) -> str:
    """One row per weight, with the part that one device holds."""
    rows, total = [], 0
    decisions = jax.tree.leaves(run.program.plan.decisions)
    shapes = jax.tree.leaves_with_path(run.program.plan.params)
    for (path, x), decision in zip(shapes, decisions):
        place = jax.NamedSharding(run.program.mesh, decision.spec)
        part = place.shard_shape(x.shape)
        size = math.prod(part) * x.dtype.itemsize
        total += size
        rows.append([jax.tree_util.keystr(path, simple=True, separator="."), str([*x.shape]),
                     _of_spec(decision.spec), str([*part]), human_bytes(size), decision.reason])
    return (f"<p>Each device stores {human_bytes(total)} of weights.</p>" + _table(
                "The weights, and the part of one device (layers are stacked in dimension 0)",
                ["weight", "shape", "split over", "a device's part", "bytes", "why"], rows))


def _of_spec(spec):
    over = [f"dimension {d} over {entry if isinstance(entry, str) else ', '.join(entry)}"
            for d, entry in enumerate(spec) if entry]
    return "; ".join(over) or "whole on each device"


def memory(run: Run) -> str:
    """What a device's memory holds: exactly, by formulas, and from the compiled program."""
    program, c = run.program, run.program.config

    def held(tree):
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                   for x in jax.tree.leaves(tree))

    network = network_of(c.network)
    cost = estimate.cost_model(c, network.weight_shapes(c.network), dict(program.mesh.shape),
                               run.chip, flops=0)
    stats = run.compiled.memory_analysis()
    names = {"params": "trained weights", "frozen": "frozen weights", "opt": "optimizer"}
    exact = [(names.get(name, name), held(x))
             for name, x in {**program.state, "batch": program.batch}.items()]
    peak = estimate.peak_memory(run.compiled)
    found = [("state and batch", stats.argument_size_in_bytes),
             ("temporary arrays", stats.temp_size_in_bytes), ("peak", peak)]
    fits = "it fits" if peak < run.chip.memory else "it does not fit"
    return (f"<p>At its peak the compiled step uses {human_bytes(peak)} of a device's memory, and "
            f"the chip has {human_bytes(run.chip.memory)}: {fits}.</p>"
            + _sizes("What a device stores from step to step", exact)
            + _sizes("By formulas, while it computes", cost.parts.items())
            + _sizes("By the compiled program", found))


def timeline(run: Run) -> str:
    """How long a device computes and sends, and how long a pipeline stage is idle."""
    c, plan = run.program.config, run.program.plan
    arithmetic = run.flops / run.chip.flops
    sends = [(f"{one.kind} over {one.axis}", one.bytes / run.chip.links) for one in run.sent]
    rows = [[name, _seconds(x)] for name, x in [("computing", arithmetic), *sends]]
    text = (f"<p>Computing takes {_seconds(arithmetic)}, and sending "
            f"{_seconds(sum(x for _, x in sends))}, by "
            f"these rates ({html.escape(run.about_chip)}). An update takes the longer of the two "
            f"if they overlap, about their sum if not, more if memory is slow.</p>" + _table(
                "How long a device computes and sends in one update",
                ["what", "time, at the chip's rates"], rows))
    stages = run.program.mesh.shape["pipe"]
    if stages > 1:
        n = c.network
        turns = passes(stages, n.microbatches, n.schedule, n.chunks, plan.skips_idle)
        work = n.microbatches * n.chunks
        text += (f"<p>A stage of the pipeline works in {work} of {turns} turns: "
                 f"{n.schedule} is idle for {1 - work / turns:.0%} of the time.</p>")
    return text


def traffic(run: Run) -> str:
    """The bytes that a device sends, expected and found."""
    wanted = {(one.kind, one.axis): one for one in run.expected}
    rows = []
    for one in () if run.note else run.sent:
        match = wanted.pop((one.kind, one.axis), None)
        rows.append([one.axis, one.kind, f"{one.count:,}", f"{one.bytes:,}",
                     f"{match.bytes:,}" if match else "no formula",
                     f"{one.bytes / match.bytes:.3f}" if match and match.bytes else ""])
    found = ["not known"] * 2 if run.note else ["0"] * 2
    rows += [[axis, kind, *found, f"{one.bytes:,}", ""] for (kind, axis), one in wanted.items()]
    note = f"<p>Not read from the program: {html.escape(run.note)}.</p>" if run.note else ""
    return note + _table("What a device sends in one update", ["over", "collective", "times",
                  "bytes, compiled", "bytes, by formulas", "ratio"], rows)


# -------------------------------------------------------------------------------------------
# The page

SECTIONS = {"Who holds what": who_holds_what, "Memory": memory, "Time": timeline,
            "What is sent": traffic}


def page(run: Run, name: str = "") -> str:
    """The whole page; name: the run whose step it describes."""
    c, parts = run.program.config, {name: make(run) for name, make in SECTIONS.items()}
    mesh = " ".join(axes_in_use(run.program.mesh.shape))
    count, _ = run.program.plan.counts
    title = f"{count:,} parameters on {mesh or 'one device'}"
    links = "".join(f'<li><a href="#part{i}">{name}</a></li>' for i, name in enumerate(parts))
    body = "".join(f'<section aria-labelledby="part{i}"><h2 id="part{i}">{name}</h2>{text}'
                   f"</section>" for i, (name, text) in enumerate(parts.items()))
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{title}</title>'
            f"<style>{STYLE}</style></head><body><header><h1>{title}</h1><p>An update has "
            f"{c.batch:,} rows of {c.network.seq_len:,} tokens, in {c.accumulate} part"
            f"{'s' * (c.accumulate > 1)}; {c.network.dtype}; --remat "
            f"{html.escape(c.network.remat)}; {run.program.mesh.size:,} device"
            f"{'s' * (run.program.mesh.size > 1)}"
            f"{name and f'; the step of the run {html.escape(name)}'}.</p></header>"
            f'<nav aria-label="sections"><ul>{links}</ul></nav><main>{body}</main></body></html>\n')


def _table(caption, names, rows):
    def cell(x):
        is_number = x.replace(",", "").replace(".", "").isdigit()
        return f"<td{' class=number' if is_number else ''}>{html.escape(x)}</td>"

    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(f'<tr><th scope="row">{html.escape(first)}</th>{"".join(map(cell, rest))}</tr>'
                   for first, *rest in rows)
    return (f'<div class="wide" tabindex="0" role="region" aria-label="{caption}"><table><caption>'
            f"{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")


def _sizes(title, rows):
    return _table(title, ["what", "bytes"],
                  [[name, human_bytes(size)] for name, size in rows if size])


def _seconds(x):
    return f"{x:,.3g} s" if x >= 1 else f"{1e3 * x:,.3g} ms"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    if "-h" in argv or "--help" in argv:
        return print(__doc__)
    if not argv or argv[0].startswith("-"):
        raise shard.ConfigError("expected the file to write first: "
                                "python -m learn.explain out.html --mesh ...")
    out, run = Path(argv.pop(0)), ""
    if out.is_dir() or not out.parent.is_dir():
        raise shard.ConfigError(f"{out}: expected the name of a file, in a folder that exists")
    argv = [part for word in argv
            for part in (word.split("=", 1) if word.startswith("--run=") else [word])]
    if "--run" in argv:
        at = argv.index("--run")
        if at + 1 == len(argv):
            raise shard.ConfigError("--run: expected a run folder after it")
        run = argv[at + 1]
        del argv[at:at + 2]
    given = command_line.read_flags(argv)
    if given.get("data"):
        raise shard.ConfigError("--data: the page shows the step and reads no data; give its "
                                "vocabulary as --vocab_size")
    config = continued.of_run(run, given) if run else command_line.config_of_flags(given)
    text = page(compiled(config), run)
    try:
        out.write_text(text)
    except OSError as e:
        raise shard.ConfigError(f"{out}: {e.strerror}") from None
    print(f"{out}: {human_bytes(len(text))}")


if __name__ == "__main__":
    train.run_main(main)
