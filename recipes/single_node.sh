#!/usr/bin/env bash
# All GPUs of this host:  single_node.sh --config configs/pretrain_h200_434m.yaml [section.key=value ...]
#
# For a terminal: Ctrl-C saves and stops. Under a batch system use launch.sh, which explains why.
set -eu
cd "$(dirname "$0")/.."

# --standalone finds a free port, so several runs can share a host. RANKS: another number of processes
# than there are GPUs; `gpu` is an error where there is none.
exec torchrun --standalone --nproc_per_node "${RANKS:-gpu}" training/pretrain.py "$@"
