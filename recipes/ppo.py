"""PPO: a policy learns to balance a pole on a cart, from rewards (Schulman et al., 2017).

    example     a CartPole-v1 episode that the policy just played: up to 500 moves, each with its
                log-probability and its advantage (generalized advantage estimation)
    step        EPOCHS updates on the same episodes. The loss is the policy's clipped ratio, the
                value's squared error, and a little entropy
    metric      the mean length of 100 episodes that the policy plays greedily. The held-out loss is
                meaningless, because it uses episodes of the initial policy

    python -m recipes.ppo [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import train

GAMMA, LAMBDA, CLIP, EPOCHS, MOVES = 0.99, 0.95, 0.2, 4, 500


def move(state, action):
    """Return CartPole-v1's state after a move, and whether the episode is over, as in Gymnasium."""
    _, speed, angle, turn = jnp.moveaxis(state, -1, 0)
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * turn**2 * jnp.sin(angle)) / 1.1
    turning = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (
        0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    moving = push - 0.05 * turning * jnp.cos(angle) / 1.1
    state = state + 0.02 * jnp.stack([speed, moving, turn, turning], -1)
    return state, (abs(state[..., 0]) > 2.4) | (abs(state[..., 2]) > 12 * jnp.pi / 180)


def init(key):
    keys = jax.random.split(key, 4)

    def tower(a, b, outputs, scale):
        return {"up": jax.random.normal(a, (4, 64)) / 2, "bias": jnp.zeros(64),
                "down": jax.random.normal(b, (64, outputs)) * scale}

    return {"agent": {"policy": tower(*keys[:2], 2, 0.01), "value": tower(*keys[2:], 1, 0.1)}}


def output(tower, states):
    return jnp.tanh(states @ tower["up"] + tower["bias"]) @ tower["down"]


@jax.jit(static_argnames="greedy")
def play(agent, begin, key, greedy=False):
    """Play an episode from each state in begin [B, 4]. Return a dict of arrays [B, MOVES, ...].
    `alive` is True for moves up to the end."""
    def step(carry, key):
        state, alive = carry
        logits = output(agent["policy"], state)
        action = logits.argmax(-1) if greedy else jax.random.categorical(key, logits)
        after, over = move(state, action)
        log = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        return (after, alive & ~over), dict(state=state, action=action, log=log, alive=alive,
                                            over=over, value=output(agent["value"], state)[:, 0])

    (last, alive), moves = jax.lax.scan(step, (begin, jnp.ones(len(begin), bool)),
                                        jax.random.split(key, MOVES))

    def back(carry, move):
        value, advantage = carry        # of the next move
        goes_on = ~move["over"]
        # A move's reward is 1 - GAMMA instead of 1, so that values stay at most 1.
        error = 1 - GAMMA + GAMMA * value * goes_on - move["value"]
        advantage = error + GAMMA * LAMBDA * advantage * goes_on
        return (move["value"], advantage), advantage

    # An episode cut off after MOVES moves would go on, so the last value stands for the rest.
    end = output(agent["value"], last)[:, 0] * alive
    _, advantage = jax.lax.scan(back, (end, jnp.zeros_like(end)), moves, reverse=True)
    moves["advantage"], moves["back"] = advantage, advantage + moves["value"]
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), moves)


def episodes(agent, count, key):
    """Play `count` episodes and return them as a list for `collate`."""
    first, rest = jax.random.split(key)
    begin = jax.random.uniform(first, (count, 4), minval=-0.05, maxval=0.05)
    moves = jax.device_get(play(agent, begin, rest))
    return [{name: x[i] for name, x in moves.items()} for i in range(count)]


def collate(examples):
    return {name: np.stack([episode[name] for episode in examples]) for name in examples[0]}


def loss(trees, batch):
    agent, alive = trees["agent"], batch["alive"].astype(jnp.float32)
    logs = jax.nn.log_softmax(output(agent["policy"], batch["state"]))
    log = jnp.take_along_axis(logs, batch["action"][..., None], 2)[..., 0]
    ratio, advantage = jnp.exp(log - batch["log"]), batch["advantage"]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    error = (output(agent["value"], batch["state"])[..., 0] - batch["back"]) ** 2
    entropy = -(jnp.exp(logs) * logs).sum(-1)
    total = ((0.5 * error - gain - 0.01 * entropy) * alive).sum()
    return total, alive.sum(), {"entropy": (entropy * alive).sum()}


def step(state, batch, gradients, update):
    alive = batch["alive"]
    mean = (batch["advantage"] * alive).sum() / alive.sum()
    spread = jnp.sqrt((((batch["advantage"] - mean) * alive) ** 2).sum() / alive.sum())
    batch = batch | {"advantage": (batch["advantage"] - mean) / (spread + 1e-8)}
    for _ in range(EPOCHS):
        grads, numbers = gradients(loss, state["params"], "agent", batch)
        state = update(state, "agent", grads)
    return state, {**numbers, "length": alive.sum() / len(alive)}


def main(argv=None):
    config = train.parse(["--out", "ppo", "--steps", "200", "--batch", "32", "--lr", "0.002",
                          "--weight_decay", "0", "--clip", "0.5", "--dtype", "float32",
                          *(sys.argv[1:] if argv is None else argv)])

    def played(seed, step, trees):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return episodes(trees["agent"], config.batch, key)

    def predict(trees, batch):
        """Return how long the greedy policy balances the pole from each row's first state."""
        now = play(trees["agent"], batch["state"][:, 0], jax.random.key(0), greedy=True)
        return now["alive"].sum(1)

    return train.fit(config, train.Task(
        init, collate, loss, predict, played,
        held_out=episodes(init(jax.random.key(0))["agent"], 100, jax.random.key(0)),
        metric=lambda lengths, _: {"length": float(lengths.mean())}), step=step)


if __name__ == "__main__":
    train.run_main(main)
