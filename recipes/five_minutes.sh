#!/usr/bin/env bash
# Bits per byte after five minutes of training on this machine. A token is a byte.
#
#   recipes/five_minutes.sh shakespeare.txt     (1,115,394 bytes, from karpathy/char-rnn)
#   NANOGPT=path/to/nanoGPT recipes/five_minutes.sh shakespeare.txt     (needs torch)
#
# With NANOGPT, nanoGPT then trains for five minutes too, on the same bytes, with the flags that its
# README gives for a CPU. Both time a few steps first, and both schedules end with the minutes.
# Compiling and evaluation don't count. Each model is scored on all held-out bytes, in windows of
# its own context that don't overlap. MINUTES, SEED and OUT (a new folder) change the defaults.
#
# On one busy core of an AMD EPYC, 2026-12-01, three seeds: zigzag 2.310 to 2.349, nanoGPT 2.692 to
# 2.724 (docs/measurements.md).
set -euo pipefail
case "${1:-}" in '' | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit $(($# == 0)) ;; esac
text=$(realpath "$1") out=$(realpath -m "${OUT:-five_minutes}")
minutes=${MINUTES:-5} seed=${SEED:-0}
cd "$(dirname "$0")/.."
exec 3>&1 1>&2          # only the result goes to standard output

python train.py --data "$text" --minutes "$minutes" --seed "$seed" --out "$out" \
    --heads 4 --eval_every 1000000 --eval_tokens 1000000000
bits=$(sed -n 's/.*"bits_per_byte": \([0-9.]*\).*/\1/p' "$out/metrics.jsonl" | tail -n 1)
line="bits per byte after $minutes minutes: zigzag $(LC_ALL=C printf %.3f "$bits")"

if [ "${NANOGPT:-}" ]; then
    cd "$NANOGPT"
    mkdir -p "$out/nanogpt"
    cp "$out/data/train.bin" "$out/nanogpt"
    cp "$out/data/held_out.bin" "$out/nanogpt/val.bin"
    python -c 'import pickle; print(end=pickle.dumps({"vocab_size": 257}, 0).decode())' \
        > "$out/nanogpt/meta.pkl"

    train() {           # (nanoGPT's seed, 1337, is in its code)
        sed "s/1337/$seed/" train.py | python - config/train_shakespeare_char.py --device=cpu \
            --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 \
            --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 \
            --dataset="$out/nanogpt" --out_dir="$out/nanogpt" "$@"
    }
    ms=$(train --max_iters=25 | sed -n 's/^iter.* time \(.*\)ms.*/\1/p' | tail -n 20 | sort -n |
        sed -n 10p)
    steps=$(awk "BEGIN {print int(60000 * $minutes / $ms)}")
    train --max_iters="$steps" --lr_decay_iters="$steps" --eval_interval="$steps"

    line+=", nanoGPT $(python - "$out" << 'END' | tail -n 1
import json, sys
import numpy as np, torch
from model import GPT, GPTConfig

out = sys.argv[1]
saved = torch.load(f"{out}/nanogpt/ckpt.pt")
model, T = GPT(GPTConfig(**saved["model_args"])).eval(), saved["model_args"]["block_size"]
model.load_state_dict(saved["model"])
ids = torch.from_numpy(np.fromfile(f"{out}/data/held_out.bin", np.uint16).astype(np.int64))
x, y = (part.unfold(0, T, T) for part in (ids[:-1], ids[1:]))       # windows that don't overlap
with torch.no_grad():
    losses = [model(*pair)[1].item() for pair in zip(x.split(1), y.split(1))]
row = json.loads([row for row in open(f"{out}/metrics.jsonl") if "bits_per_byte" in row][-1])
print("%.3f" % (np.mean(losses) * row["bits_per_byte"] / row["eval_loss"]))
END
)"
fi
echo "$line" >&3
