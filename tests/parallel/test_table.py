"""Rows of a table of weights: what they say of where a weight lies is where it lies."""

import dataclasses
import math

import jax
import pytest

import model
from tests.helpers import needed
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import abstract_mesh, by_path, full_spec
from zigzag.parallel.network import check_tensor, network_of
from zigzag.parallel.table import Table, parameters, product_flops

published = needed("published")

DENSE = dict(layers=4, d_model=256, heads=8, kv_heads=4, d_ff=1024, vocab_size=512)


@pytest.mark.parametrize("changes, mesh", [
    ({}, dict(pipe=2, fsdp=2, tensor=2)), (dict(tied=True), dict(pipe=2, fsdp=4, tensor=4)),
    (dict(experts=4), dict(pipe=2, fsdp=2, expert=2, tensor=2)),
    (dict(experts=8, layers=8), dict(pipe=4, fsdp=2, expert=4, tensor=4)),
    ({}, dict(fsdp=8)), (dict(tied=True), dict(pipe=2, fsdp=2)), (dict(experts=4), dict(fsdp=2)),
    (dict(experts=4), dict(fsdp=4, expert=2))], ids=str)
def test_a_weight_lies_as_its_row_says(changes, mesh):
    """A row whose axes are a reader's only source, and not true: of a router that expert does not
    split, of a weight that fsdp splits elsewhere (F is larger than D, and free without tensor)."""
    config, mesh = model.Config(**{**DENSE, **changes}), abstract_mesh(mesh)
    found = by_path(model.NETWORK.plan_weights(config, mesh, fsdp_min=1))
    for path, w in by_path(model.weight_table(config)).items():
        spec = full_spec(found[path].spec, len(w.shape))
        assert [axis or "" for axis in spec] == [
            axis if mesh.shape.get(axis, 1) > 1 else "" for axis in w.mesh_axes], path


def test_an_edited_row_moves_its_weight():
    """/fsdp that a fork moves to another dimension, or takes out, and that stays where it was."""
    def spec_of_up(row):
        table = model.weight_table(config)
        table["layers"]["w_up"] = Table(L=4, D=config.d_model, F=1024)(row, 0.1)
        network = dataclasses.replace(model.NETWORK, weight_table=lambda c: table)
        specs = network.weight_specs(config, abstract_mesh(dict(fsdp=2, pipe=2)))
        return tuple(full_spec(specs["layers"]["w_up"], 3))

    config = model.Config(**DENSE)
    assert spec_of_up("L/pipe D/fsdp F/tensor") == ("pipe", "fsdp", None)
    assert spec_of_up("L/pipe D F/fsdp") == ("pipe", None, "fsdp")
    assert spec_of_up("L/pipe D F/tensor") == ("pipe", None, None)
    config = model.Config(**{**DENSE, "d_model": 255, "head_dim": 16})
    assert spec_of_up("L/pipe D/fsdp F/tensor") == ("pipe", None, None)     # not somewhere else


def test_what_a_row_may_name():
    """An axis that is misspelt, or named twice or behind a letter that it never splits: silently
    nothing would be split."""
    make = Table(L=2, D=8, F=16, E=4)
    assert make("D F/tensor").tensor == 1
    assert make("L/pipe D").tensor == -1 and make("").shape == ()
    for wrong in ("D F/tenser", "D/tensor F/tensor", "D/pipe F", "L E D/expert", "D/data F"):
        with pytest.raises(ValueError, match="some followed by"):
            make(wrong)
    for some in ("L D", "L D/fsdp F", "E D F", "L/pipe E D/fsdp F", "L E/expert D F"):
        with pytest.raises(ValueError, match="must name all axes that split it"):
            make(some)
    assert make("L/pipe D/fsdp E").mesh_axes == ("pipe", "fsdp", "")    # (a router)


def test_a_tensor_axis_that_splits_nothing_is_refused():
    """99 devices that all do the work of one; a size that divides the MLP and not the heads, which
    is of use."""
    config = model.Config(vocab_size=257)

    def check(size):
        mesh = abstract_mesh({"tensor": size})
        check_tensor(config, mesh, model.NETWORK.weight_specs(config, mesh))

    for size in (1, 3, 8):
        check(size)
    with pytest.raises(ConfigError, match="tensor=99 .* nor its 8 heads.* heads is tensor=8$"):
        check(99)


def test_letters_say_which_rows_are_looked_up_and_which_are_experts():
    """A table of positions or a router that counts as a product, or as a token's expert: the MFU of
    every run would be wrong."""
    make = Table(V=10, P=5, D=4, L=2, E=8, F=6, J=3, H=2)
    table = {"embed": make("V D"), "positions": make("P D"), "relative": make("L/pipe J H"),
             "head": make("D V"), "router": make("L/pipe D E"),
             "up": make("L/pipe E/expert D F"), "bias": make("L/pipe E"),
             "scale": make("L/pipe D")}
    assert {name for name, w in table.items() if w.is_table} == {"embed", "positions", "relative"}
    assert {name for name, w in table.items() if w.is_of_experts} == {"up"}
    total, visited = parameters(table, 2, 0.25)
    size = {name: math.prod(w.shape) for name, w in table.items()}
    assert total == sum(size.values()) - 2 * 2 * 4
    assert visited == total - round(0.75 * size["up"])
    products = size["head"] + size["router"] + 0.25 * size["up"]
    assert product_flops(table, 0.25) == 6 * products
    assert product_flops(table, 0.25, tied=True) == 6 * (products + size["embed"])


@pytest.mark.parametrize("name", ["llama-7b", "gpt2", "bert-base", "t5-small", "mixtral-8x7b"])
def test_every_preset_names_at_most_one_dimension_for_tensor(name):
    """A row that lost its /tensor in an edit: tensor would split nothing of it."""
    config = published.PRESETS[name]
    table = jax.tree.leaves(network_of(config).table(dataclasses.replace(
        config, vocab_size=config.vocab_size or 256)))
    assert sum(w.tensor >= 0 for w in table) >= 6
