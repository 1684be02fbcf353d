"""python -m tests.curves FOLDER: docs/recipes.png, a curve of each recipe's run in FOLDER/NAME."""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from tests.helpers import ROOT
from zigzag.run import plots

# The number of each recipe that its table in docs/tasks.md ends with.
DRAWN = {"regress": "r2", "classify": "right", "seq2seq": "exact", "caption": "exact",
         "diffusion": "right", "contrastive": "found", "lora": "exact", "maml": "error_1",
         "dpsgd": "right", "fedavg": "right", "dpo": "eval_accuracy", "grpo": "exact",
         "ppo": "length", "ddpg": "return", "distill": plots.PER_TOKEN, "uva3d": "loss"}


def main(folder):
    figure = Figure(figsize=(11, 9), layout="constrained")
    for number, (name, title) in enumerate(DRAWN.items()):
        axes = figure.add_subplot(4, 4, number + 1)
        (x, y), = (curve.T for curve in plots.series(str(Path(folder) / name))[title])
        axes.plot(x, y, linewidth=1.5)
        axes.set_title(f"{name}: {title}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    figure.savefig(ROOT / "docs/recipes.png", dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
