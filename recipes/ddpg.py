"""DDPG: a policy learns to swing a pendulum up and hold it there (Lillicrap et al., 2016).

    trees       an actor that chooses a torque, and a critic that rates it; slow-moving averages of
                both (the targets); the last CAPACITY moves; and the pendulums themselves
    step        each pendulum makes a move with some noise. Then the critic and the actor each get
                an update on --batch past moves, and the targets move toward both
    metric      the mean return over 100 episodes of 200 moves, played without noise

    python -m recipes.ddpg [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import train

GAMMA, FOLLOW, NOISE, CAPACITY, PLAYERS, MOVES = 0.98, 0.01, 0.2, 50_000, 4, 200


def move(state, torque):
    """Return Pendulum-v1's (angle, speed) after a move, and the reward, as in Gymnasium."""
    angle, speed = state[..., 0], state[..., 1]
    torque = 2 * jnp.clip(torque, -1, 1)
    off = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(off**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * speed, speed], -1), reward


def begin(key, count):
    """Draw pendulums [count, 2] at random angles, with speeds from -1 to 1."""
    return jax.random.uniform(key, (count, 2), minval=-1, maxval=1) * jnp.array([jnp.pi, 1])


def network(key, inputs):
    keys = jax.random.split(key, 3)
    sizes = (inputs, 128, 128, 1)
    return [{"w": jax.random.normal(k, (a, b)) * a**-0.5 * (0.1 if b == 1 else 1.4),
             "b": jnp.zeros(b)} for k, a, b in zip(keys, sizes, sizes[1:])]


def output(layers, x):
    for i, layer in enumerate(layers):
        x = (jax.nn.relu(x) if i else x) @ layer["w"] + layer["b"]
    return x[..., 0]


def act(actor, state):
    """Choose a torque from -1 to 1."""
    return jnp.tanh(output(actor, seen(state)))


def seen(state):
    return jnp.stack([jnp.cos(state[..., 0]), jnp.sin(state[..., 0]), state[..., 1] / 8], -1)


def value(critic, state, torque):
    return output(critic, jnp.concatenate([seen(state), torque[..., None]], -1))


def init(key):
    a, b, c = jax.random.split(key, 3)
    actor, critic = network(a, 3), network(b, 4)
    return {"actor": actor, "critic": critic, "slow": {"actor": actor, "critic": critic},
            "world": {"now": begin(c, PLAYERS), "past": jnp.zeros((CAPACITY, 6))}}


def critic_loss(trees, batch):
    """Return the critic's squared error from the reward plus the targets' discounted value."""
    past, slow = batch["past"], trees["slow"]
    before, torque, reward, after = past[:, :2], past[:, 2], past[:, 3], past[:, 4:]
    want = reward + GAMMA * value(slow["critic"], after, act(slow["actor"], after))
    error = value(trees["critic"], before, torque) - jax.lax.stop_gradient(want)
    return (error**2).sum(), len(past)


def actor_loss(trees, batch):
    before = batch["past"][:, :2]
    return -value(trees["critic"], before, act(trees["actor"], before)).sum(), len(before)


def step(state, batch, gradients, update):
    trees, at = state["params"], state["step"]
    keys = jax.random.split(jax.random.key(batch["seeds"][0]), 3)

    # Each pendulum makes a move. After MOVES moves, they all restart.
    now = trees["world"]["now"]
    noise = NOISE * jax.random.normal(keys[0], (PLAYERS,))
    torque = jnp.clip(act(trees["actor"], now) + noise, -1, 1)
    after, reward = move(now, torque)
    # Store a tenth of the reward, to keep values small.
    made = jnp.concatenate([now, torque[:, None], reward[:, None] / 10, after], 1)
    past = jax.lax.dynamic_update_slice_in_dim(
        trees["world"]["past"], made, at * PLAYERS % CAPACITY, 0)
    now = jnp.where((at + 1) % MOVES == 0, begin(keys[1], PLAYERS), after)

    # Both networks learn from past moves.
    count = jnp.minimum((at + 1) * PLAYERS, CAPACITY)
    chosen = {"past": past[jax.random.randint(keys[2], batch["start"].shape[:1], 0, count)]}
    grads, numbers = gradients(critic_loss, trees, "critic", chosen)
    state = update(state, "critic", grads)
    grads, _ = gradients(actor_loss, state["params"], "actor", chosen)
    state = update(state, "actor", grads)

    trees = state["params"]
    slow = jax.tree.map(lambda slow, w: slow + FOLLOW * (w - slow), trees["slow"],
                        {name: trees[name] for name in ("actor", "critic")})
    trees = {**trees, "slow": slow, "world": {"now": now, "past": past}}
    return {**state, "params": trees}, numbers


def returns(trees, batch):
    """Play an episode from each row's start, without noise, and return the sum of its rewards."""
    def one(state, _):
        return move(state, act(trees["actor"], state))

    return jax.lax.scan(one, batch["start"], None, length=MOVES)[1].sum(0)


def main(argv=None):
    config = train.parse(["--out", "ddpg", "--steps", "6000", "--batch", "128", "--lr", "0.001",
                          "--weight_decay", "0", "--dtype", "float32",
                          *(sys.argv[1:] if argv is None else argv)])
    starts = list(np.asarray(begin(jax.random.key(1), 100)))
    return train.fit(config, train.Task(
        init, lambda rows: {"start": np.stack(rows)},
        lambda trees, batch: (-returns(trees, batch).sum(), len(batch["start"])),
        returns, starts, starts, metric=lambda found, _: {"return": float(found.mean())}),
        step=step)


if __name__ == "__main__":
    train.run_main(main)
