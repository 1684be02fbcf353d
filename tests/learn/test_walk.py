"""learn/walk.py: what it prints of each line is what the step does."""

import re

import pytest

import train
from forecast.traffic import expected_traffic
from learn import walk
from tests.common import full, refused
from tests.helpers import ROOT
from zigzag.commands import programs
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import mesh_sizes

FLAGS = "--layers 2 --d_model 64 --heads 4 --d_ff 128 --seq_len 32 --vocab_size 257 --batch 8"
BLOCK = str(ROOT / "model.py")


def walked(capsys, *words):
    """{line of code: what is printed under it}, for all functions shown."""
    walk.main([*words[:-1], *FLAGS.split(), *words[-1].split()])
    found, here = {}, []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("        "):
            here.append(" ".join(line.split()))
        elif line.strip():
            here = found.setdefault(line.strip(), [])
    return found


def test_a_block_with_tensor(capsys):
    """Shapes of one device's trace, or of whole arrays; a collective at another line, or forward
    instead of backward; nothing of the function that a line calls."""
    found = walked(capsys, "--mesh data=4,tensor=2")
    q = next(lines for code, lines in found.items() if code.startswith("q, k, v = shard.columns"))
    assert q == [
        *(f"{name} [2, 32, 2, 16] varies over data, tensor" for name in "qkv"),
        "forward: all-gather over tensor: [2, 16, 64] -> [2, 32, 64], sends 8.2 kB",
        "backward: reduce-scatter over tensor: [2, 32, 64] -> [2, 16, 64], sends 8.2 kB"]
    norm = found['h = norm(x, w["attn_norm"], c)']
    assert norm == ["h [2, 16, 64] varies over data, tensor",
                    "backward: all-reduce over tensor: [1, 1, 64], sends 256 B"]
    entered = found["def block(w, x, i, batch, attend, c):"]
    assert "w['wq'] [64, 2, 16] varies over data, tensor" in entered
    assert "w['attn_norm'] [64] varies over data" in entered
    mlp, = (lines for code, lines in found.items() if code.startswith("return shard.row((swiglu("))
    assert [line.split(":")[0] for line in mlp] == 2 * ["forward"] + 2 * ["backward"]


@pytest.mark.parametrize("mesh", [
    "data=2,tensor=4", full("fsdp=4,tensor=2"),
    full("data=2,tensor=2,pipe=2 --microbatches 2")])
def test_what_a_block_sends_is_what_the_formula_says(mesh):
    """A collective that is counted twice, or is missing: of a layer over tensor 8 (n-1)/n X, and
    the gradients of two norms."""
    config = train.parse([*FLAGS.split(), "--mesh", *mesh.split()])
    sent, _, c = walk.trace(config, {BLOCK})
    sizes = mesh_sizes(c.mesh)
    n, rows = sizes["tensor"], 8 // (sizes.get("data", 1) * sizes.get("fsdp", 1))
    rows //= 2 if "pipe" in sizes else 1
    X = 4 * rows * c.network.seq_len * c.network.d_model
    here = [one for one in sent if one.times(BLOCK, "block")]
    assert {one.times(BLOCK, "block") for one in here} == {1}
    norms = 2 * 2 * (n - 1) / n * 4 * c.network.d_model
    assert sum(one.bytes for one in here) == pytest.approx(8 * (n - 1) / n * X + norms)
    assert sum(one.bytes for one in here if one.is_backward) == pytest.approx(
        4 * (n - 1) / n * X + norms)


def test_a_line_sends_what_its_loop_sends():
    """A collective inside a loop that the line begins (the ring), which is missed, or counted for
    one turn."""
    config = train.parse([*FLAGS.split(), "--mesh", "data=2,seq=4"])
    sent, made, c = walk.trace(config, {BLOCK})
    K = 4 * 4 * (c.network.seq_len // 4) * c.network.d_model        # (of four rows)
    for is_backward in (False, True):
        here = [one for one in sent if one.is_backward == is_backward and "seq" in one.text
                and "permute" in one.text and len(one.text.split(",")) > 4]
        assert {one.times(BLOCK, "block") for one in here} == {3}
        assert sum(3 * one.bytes for one in here) == 2 * 3 * K
        assert {one.times(BLOCK, "layer") for one in here} == {3}       # (once for each layer)
    line, = (line for line in walk.lines_of(BLOCK, "block", sent, made) if "attend(" in line.code[0]
             and "row" in line.code[0])
    assert sum(count for text, count in line.sent.items()
               if text.startswith("forward: collective-permute over seq: [4, 8, 4, 16]")) == 6


def test_the_whole_step_sends_what_the_header_expects():
    """Collectives in a loop that the trace does not reach."""
    config = train.parse([*FLAGS.split(), "--layers", "1", "--mesh", "tensor=2"])
    program = programs.program_of(config)
    want = sum(group.bytes for group in expected_traffic(program.plan) if group.axis == "tensor")
    sent, _, _ = walk.trace(config, {BLOCK})
    assert sum(one.bytes for one in sent if "over tensor" in one.text) == pytest.approx(
        want, rel=0.02)


def test_any_function_of_any_file(capsys):
    """Only model.py's block; a line of a statement's body under its head."""
    found = walked(capsys, "shard.py:row", "--mesh fsdp=2,tensor=2")
    lines, = (lines for code, lines in found.items() if "into_stream(*row_products(pairs))" in code)
    assert lines[0].startswith("forward: reduce-scatter over tensor")
    found = walked(capsys, "published/transformer.py:block",
                   "--model transformer --mesh tensor=2 --parallel_block true")
    assert sum("reduce-scatter" in line for lines in found.values() for line in lines) >= 2
    assert any(re.match(r"if ", code) for code in found)


def test_what_cannot_be_walked_is_one_line(capsys):
    for said, place in (("model.py: no function blocks in it", "model.py:blocks"),
                        ("nosuch.py: no such file", "nosuch.py:f")):
        assert said in refused(capsys, place, *FLAGS.split(), main=walk.main)
    walk.main(["--help"])
    assert "python -m learn.walk --mesh" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="model.py:mixture_of_experts is not called in this step"):
        walk.main(["model.py:mixture_of_experts", *FLAGS.split()])
