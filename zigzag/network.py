"""What follows from a kind of model's table of weights and its loss: first values, counts, where
the weights lie on a mesh, and how they are read and written.

model.py's transformer is one kind; each file of families/ has another.
"""

import dataclasses
from pathlib import Path
from typing import Any, Callable, Mapping

import jax
from jax import Array
from jax.sharding import PartitionSpec

from zigzag import folders, lora, weights
from zigzag.checkpoint import run_config
from zigzag.config import padded
from zigzag.errors import ConfigError
from zigzag.family import Family
from zigzag.mesh import make_mesh, shardings
from zigzag.rule import plan_sharding

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A kind of model."""
    config: type                        # of its configurations
    table: Callable                     # config -> a tree of weights.Weight
    loss: Callable                      # params, batch, config[, specs] -> sum, count
    batch_shapes: Callable              # config, rows -> shapes of a batch
    families: Mapping[str, Family]      # by model_type, how published ones are written
    check: Callable = lambda config, mesh: None     # refuses what a mesh cannot split

    def init(self, config: Any, key: Array) -> Params:
        """New float32 weights, which follow from the key and each weight's path, not from the
        mesh."""
        if config.stem == "tokens" and not config.vocab_size:
            raise ConfigError("vocab_size is 0: it follows from the data, or give --vocab_size")
        return weights.first_values(self.table(config), key)

    def weight_shapes(self, config: Any) -> Params:
        return jax.eval_shape(lambda: self.init(config, jax.random.key(0)))

    def tensor_dims(self, config: Any) -> Params:
        """Of each weight the dimension that tensor may split, or -1."""
        return jax.tree.map(lambda w: w.tensor, self.table(config))

    def parameters(self, config: Any) -> tuple[int, int]:
        """How many parameters a model has, and how many of them one token visits."""
        return weights.parameters(self.table(config), config,
                                  padded(config.vocab_size) - config.vocab_size)

    def flops(self, config: Any, tokens: int) -> float:
        """Arithmetic of training on that many tokens."""
        return weights.flops(self.table(config), config, tokens)

    # Where weights lie

    def plan_weights(self, config: Any, mesh: Any, **options: Any) -> Params:
        """Where each weight lies on a mesh, and why."""
        return plan_sharding(
            lambda p, b: self.loss(p, b, config), self.weight_shapes(config),
            self.batch_shapes(config, 1), mesh=mesh, tensor_dims=self.tensor_dims(config),
            **options)

    def weight_specs(self, config: Any, mesh: Any) -> Params:
        return jax.tree.map(lambda d: d.spec, self.plan_weights(config, mesh))

    def places(self, config: Any, mesh: Any = None) -> Params:
        """Shapes of the weights, with their places on the mesh; without a mesh, on one device."""
        mesh, shapes = mesh or make_mesh(devices=jax.devices()[:1]), self.weight_shapes(config)
        specs = (self.weight_specs(config, mesh) if mesh.size > 1 else
                 jax.tree.map(lambda _: PartitionSpec(), shapes))
        return jax.tree.map(lambda shape, place: shape.update(sharding=place), shapes,
                            shardings(specs, mesh))

    # Where weights come from, and go to

    def load_run(self, folder: str | Path, mesh: Any = None, step: int | None = None
                 ) -> tuple[Params, Any]:
        """The weights of a run's newest (or given) step, straight into their shards on the mesh;
        without a mesh, on one device."""
        config = dataclasses.replace(run_config(folder, self.config), lora_rank=0)
        return self.read_run_weights(folder, self.places(config, mesh), step), config

    def read_run_weights(self, folder: str | Path, places: Params, step: int | None = None,
                         flag: str = "--run") -> Params:
        """The weights of a run, which `flag` names, in these places (shapes with shardings),
        adapters merged. (A damaged checkpoint is reported, and passed over.)"""
        return lora.read_run_weights(folder, self.config, places, step, flag, self.places,
                                     self.init, self.read_hf)

    def hf_config(self, folder: str | Path, **fields: Any) -> Any:
        """The configuration of a published model, but for these fields."""
        return folders.hf_config(folder, self.config, self.families, **fields)

    def load_hf(self, folder: str | Path, mesh: Any = None, **fields: Any) -> tuple[Params, Any]:
        """The weights of a published model (a Hugging Face folder), straight into their shards on
        the mesh; without a mesh, on one device. `fields` of the configuration may say how to train
        it."""
        config = self.hf_config(folder, **fields)
        self.read_hf(folder, config)    # is everything there, before shapes that large are made?
        return self.read_hf(folder, config, self.places(config, mesh)), config

    def read_hf(self, folder: str | Path, config: Any, places: Params | None = None
                ) -> Params | None:
        """The weights in these places (shapes with shardings). With none, only a look at the
        folder."""
        return folders.read(folder, config, self.families, self.table(config), places)

    def save_hf(self, folder: str | Path, params: Params, config: Any, dtype: str = "float32"
                ) -> None:
        """The same, back: a folder that transformers reads, adapters merged. A model of our own
        becomes a LLaMA, or with experts a Mixtral."""
        if config.lora_rank:
            params, config = lora.merged(params), dataclasses.replace(config, lora_rank=0)
        folders.write(folder, params, config, self.families, self.table, dtype)
