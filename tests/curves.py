"""python -m tests.curves FOLDER: docs/recipes.png, a curve of each recipe that ran in FOLDER."""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from tests.helpers import ROOT
from tools import plots

# The number of each recipe that is drawn: a name in its metrics.jsonl.
DRAWN = {"regress": "r2", "classify": "right", "seq2seq": "exact", "caption": "exact",
         "diffusion": "right", "contrastive": "found", "lora": "exact", "maml": "error_1",
         "dpsgd": "right", "fedavg": "right", "dpo": "accuracy", "grpo": "exact",
         "ppo": "length", "ddpg": "return", "distill": "eval_loss", "uva3d": "loss"}


def main(folder):
    figure = Figure(figsize=(11, 9), layout="constrained")
    drawn = [(name, title) for name, title in DRAWN.items() if (Path(folder) / name).is_dir()]
    for number, (name, title) in enumerate(drawn):
        axes = figure.add_subplot(-(-len(drawn) // 4), 4, number + 1)
        x, y = plots.curves_of(str(Path(folder) / name))[title].T
        axes.plot(x, y, "o-" if len(x) < 25 else "-", markersize=3)
        axes.set_title(f"{name}: {title}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    figure.savefig(ROOT / "docs/recipes.png", dpi=80)


if __name__ == "__main__":
    main(*sys.argv[1:])
