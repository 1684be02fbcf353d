#!/usr/bin/env bash
# A model of 1.2 billion parameters on one node of eight H100, from your own text.
#
#   recipes/eight_gpus.sh TEXT...
#
# We have not run it on such a node. Compiled for one (2026-11-22), it takes 49.0 of 74.5 GiB on
# each GPU and 0.943 of the usual arithmetic, and sends 6.4 GiB per GPU per update. The first
# command compiles it again, without the GPUs; if its figures differ on your version, trust those.
set -euo pipefail
case "${1:-}" in '' | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit $(($# == 0)) ;; esac
mapfile -t text < <(realpath "$@")
cd "$(dirname "$0")/.."

python train.py --topology h100:1x1x8 --model 1.2b --mesh fsdp=8 --batch 64
python data.py "${text[@]}" --out tokens --vocab_size 32768
python train.py --data tokens --model 1.2b --mesh fsdp=8 --batch 64 --out big
