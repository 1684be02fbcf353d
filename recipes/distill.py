"""Distillation: a small model learns from the probabilities of a large one (Hinton et al., 2015).

    example     running text, in windows of --seq_len tokens (the source of Python's library)
    loss        the cross-entropy with the teacher's probabilities instead of with the next token
    evaluation  the usual cross-entropy of held-out tokens, as for the teacher

    python train.py --out teacher --steps 2000
    python -m recipes.distill --teacher teacher [--alone] [flags of train.py]

For comparison, --alone trains the student without its teacher.
"""

import sys

import jax
import jax.numpy as jnp

import sample
import train
from zigzag.commands.training import opened
from zigzag.parallel.network import network_of


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    alone, argv = "--alone" in argv, [word for word in argv if word != "--alone"]
    at = argv.index("--teacher") if "--teacher" in argv[:-1] else len(argv)
    folder = "".join(argv[at + 1:at + 2])
    config = train.parse(["--out", "student", "--steps", "2000", "--layers", "2", *argv[:at],
                          *argv[at + 2:]])
    if not folder:
        sys.exit("error: give --teacher FOLDER, the --out of a train.py (--help says more)")
    teacher, teacher_config, _ = sample.load(folder)
    teacher = jax.device_get(teacher)
    with opened(config) as (config, task, _):

        def init(key):
            return {"student": task.init(key), "teacher": jax.tree.map(jnp.asarray, teacher)}

        def log_probabilities(weights, c, batch):
            return jax.nn.log_softmax(network_of(c).forward(weights, batch["tokens"], c))

        def of_student(trees, batch):
            return task.loss(trees["student"], batch)[:2]

        def of_teacher(trees, batch):
            want = jnp.exp(log_probabilities(trees["teacher"], teacher_config, batch))
            logs = log_probabilities(trees["student"], config.network, batch)
            return -(want * logs).sum(-1).ravel() @ batch["weights"].ravel(), batch["weights"].sum()

        def step(state, batch, gradients, update):
            grads, numbers = gradients(of_student if alone else of_teacher, state["params"],
                                       "student", batch)
            return update(state, "student", grads), numbers

        return train.fit(config, train.Task(
            init, task.collate, of_student, examples=task.examples, held_out=task.held_out,
            bits_per_nat=task.bits_per_nat,
            record=task.record | {"alone": alone, "teacher": folder}), step=step)


if __name__ == "__main__":
    train.run_main(main)
