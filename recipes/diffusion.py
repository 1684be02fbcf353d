"""Diffusion: a network turns noise into an image of the digit that you name (Ho et al., 2020).

    example     a handwritten digit of 8 x 8 pixels and its class, "zero" to "nine"; the loss hides
                the class in a tenth of the cases
    loss        the squared error of the predicted noise in the image, at a random timestep
    metric      right, the fraction of generated images that scikit-learn's nearest neighbors among
                the real digits assign to the requested class (copies count as right)

    python -m recipes.diffusion [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import train

TIMES, WIDTH, GUIDANCE = 100, 256, 2.0
NAMES = "zero one two three four five six seven eight nine".split()
# The squared fraction of the image that remains at each timestep.
LEFT = jnp.cos((jnp.arange(TIMES) + 1) / (TIMES + 1) * jnp.pi / 2) ** 2


def collate(examples):
    pictures, classes, numbers = zip(*examples)
    text = [[ord(letter) % 32 for letter in NAMES[c].ljust(5)] for c in classes]    # 0: no letter
    return {"picture": np.stack(pictures), "number": np.array(numbers, np.uint32),
            "text": np.array(text, np.int32)}


def init(key):
    of = {"letters": (0.3, (5, 27, WIDTH)), "times": (0.3, (TIMES, WIDTH)),
          "into": (0.125, (64, WIDTH)), "up": (0.05, (3 * WIDTH, 4 * WIDTH)),
          "down": (0.03, (4 * WIDTH, WIDTH)), "out": (0.006, (WIDTH, 64))}
    return {name: scale * jax.random.normal(k, shape)
            for (name, (scale, shape)), k in zip(of.items(), jax.random.split(key, len(of)))}


def noise_in(w, x, time, text):
    """Predict the noise [B, 64] in images x at these timesteps [B], given the texts [B, 5]."""
    of_text = w["letters"][jnp.arange(5), text].sum(1)
    h = jnp.concatenate([x @ w["into"], w["times"][time], of_text], -1)
    h = jax.nn.silu(h @ w["up"]) @ w["down"]
    return jax.nn.silu(h) @ w["out"]


def mixed(picture, noise, time):
    left = LEFT[time][:, None]
    return jnp.sqrt(left) * picture + jnp.sqrt(1 - left) * noise


def loss(params, batch):
    def of_row(seed):       # a held-out batch has row numbers instead of seeds
        keys = jax.random.split(jax.random.key(seed), 3)
        return (jax.random.normal(keys[0], (64,)), jax.random.randint(keys[1], (), 0, TIMES),
                jax.random.bernoulli(keys[2], 0.9))

    noise, time, has_text = jax.vmap(of_row)(batch.get("seeds", batch["number"]))
    x = mixed(batch["picture"], noise, time)
    found = noise_in(params, x, time, batch["text"] * has_text[:, None])
    return ((found - noise) ** 2).mean(1).sum(), len(x)


def predict(params, batch):
    """Generate an image per text from noise in TIMES steps, without adding new noise (DDIM)."""
    def step(x, time):
        times = jnp.full(len(x), time)
        without = noise_in(params, x, times, jnp.zeros_like(batch["text"]))
        noise = without + GUIDANCE * (noise_in(params, x, times, batch["text"]) - without)
        left = LEFT[time]
        picture = jnp.clip((x - jnp.sqrt(1 - left) * noise) / jnp.sqrt(left), -1, 1)
        noise = (x - jnp.sqrt(left) * picture) / jnp.sqrt(1 - left)
        return jnp.where(time > 0, mixed(picture, noise, times - 1), picture), None

    start = jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (64,)))(batch["number"])
    return jax.lax.scan(step, start, jnp.arange(TIMES)[::-1])[0]


def main(argv=None):
    digits = load_digits()
    pixels = digits.data.astype(np.float32) / 8 - 1
    examples = list(zip(pixels, digits.target, range(len(pixels))))
    known = KNeighborsClassifier(3).fit(pixels, digits.target)

    def metric(pictures, rows):
        return {"right": np.mean(known.predict(pictures) == [c for _, c, _ in rows])}

    config = train.parse(["--out", "diffusion", "--steps", "6000", "--batch", "128", "--lr",
                          "0.001", "--ema", "0.999", *(sys.argv[1:] if argv is None else argv)])
    return train.fit(config, train.Task(init, collate, loss, predict, examples[200:],
                                        examples[:200], metric=metric))


if __name__ == "__main__":
    train.run_main(main)
