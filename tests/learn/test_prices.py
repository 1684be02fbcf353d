"""learn/prices.py: the groups, prices and choices of the rule."""

import jax
import jax.numpy as jnp
import pytest

import shard
from learn import prices
from tests.common import net, refused
from tests.helpers import make, mesh_of
from zigzag.core.mesh import spec_axes
from zigzag.parallel.rule import groups

MINE = """
import jax, jax.numpy as jnp

def loss(w, x):
    return ((x + jax.nn.relu(x @ w["up"]) @ w["down"])**2).sum()

def example():
    return {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}, jnp.zeros((64, 64))
"""


def test_the_prices_of_two_matrices(tmp_path, capsys):
    """Other figures than the text at the head of rule.py has."""
    (tmp_path / "mine.py").write_text(MINE)
    prices.main([f"{tmp_path}/mine.py:loss", "--shards", "4"])
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines() == [
        "SPLIT, (16.4 kB + 256 KiB x 1) / 32,768 elements = 8.5",
        "    down, dimension 0: contracted", "    up, dimension 1: free"]
    assert second.startswith("not split: its input is not split; ")
    for said, *words in (
            (f"{tmp_path}/mine.py: no function lose in it", f"{tmp_path}/mine.py:lose", "--shards",
             4),
            ("no.py: No such file", "no.py:loss", "--shards", 4), ("expected --shards N",)):
        assert said in refused(capsys, *words, main=prices.main)


@pytest.mark.parametrize("changes", [{}, dict(experts=4, tied=True)])
def test_what_is_split_is_what_the_specs_say(changes):
    """A verdict that is not the rule's."""
    c = make(**changes).network
    fn, args = (lambda p, batch: net.loss(p, batch, c)[0]), net.batch_shapes(c, 8)
    params, mesh = net.weight_shapes(c), mesh_of("tensor=4")
    specs = shard.infer_specs(fn, params, args, mesh=mesh)
    want = {(jax.tree_util.keystr(path, simple=True, separator="."), d)
            for path, spec in jax.tree.leaves_with_path(specs, is_leaf=lambda x: x is None)
            for d, entry in enumerate(spec) if "tensor" in spec_axes(jax.P(entry))}
    found = groups(fn, params, args, shards=4)
    assert want == {(path, d) for group in found if group.verdict == "split"
                    for path, d, _ in group.members}
    assert all(jnp.isfinite(group.price) for group in found)
