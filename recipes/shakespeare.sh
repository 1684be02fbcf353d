#!/usr/bin/env bash
# A small model of Tiny Shakespeare, with a tokenizer of its own. On a CPU.
#
#   recipes/shakespeare.sh shakespeare.txt      (1,115,394 bytes, from karpathy/char-rnn)
#
# On two shared cores, 2026-11-25: 22 min 49 s of training, slowed by other work. The held-out loss
# is lowest at step 600, 3.4829, and ends at 3.5358 (2.2382 bits per byte). The last command
# prints a sample.
set -euo pipefail
case "${1:-}" in '' | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit $(($# == 0)) ;; esac
text=$(realpath "$1")
cd "$(dirname "$0")/.."

python data.py "$text" --out tokens --vocab_size 1024
python train.py --data tokens --shards 2 --d_model 256 --batch 16 --dropout 0.1 \
    --optimizer muon --steps 1000 --out plays
python sample.py --run plays --prompt "ROMEO:" --temperature 0.5 --seed 7 --tokens 110
