#!/usr/bin/env bash
# A model of 1.2 billion parameters on a slice of 16 TPU v5e. Run it on every host, with the same
# text at the same path; process 0 writes the run.
#
#   recipes/tpu_v5e_16.sh TEXT
#
# We have not run it on such a slice. Compiled for one (2026-11-23, libtpu 0.0.51), it takes 2.15
# GiB on each chip and 1.232 times the usual arithmetic (the backward pass recomputes everything),
# and sends 6.82 GiB per chip per update. You can compile it anywhere, without a TPU:
#
#   python train.py --topology v5e:4x4 --mesh fsdp=16 --model 1.2b --batch 32 --remat full
set -euo pipefail
case "${1:-}" in '' | -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit $(($# == 0)) ;; esac
text=$(realpath "$1")
cd "$(dirname "$0")/.."

pip install "jax[tpu]"
python train.py --distributed --mesh fsdp=16 --model 1.2b --batch 32 --remat full \
    --data "$text" --out big
