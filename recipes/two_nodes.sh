#!/usr/bin/env bash
# The same command on each of two hosts, in any order, within 15 minutes:
#
#   HEAD=10.0.0.1 INTERFACE=eth0 two_nodes.sh --config configs/pretrain_h200_434m.yaml
#
# HEAD is the address that one of the two has on this network. The run folder is on a file system
# that both see: the leader writes there, and with training.checkpoint_format=sharded so do all.
set -eu
cd "$(dirname "$0")/.."

# A host with several networks: Gloo and NCCL would each guess, and a host's name may mean another one.
export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
address=$(ip -4 -o addr show dev "$INTERFACE" | awk '{ split($4, part, "/"); print part[1]; exit }')

is_head=$([ "$address" = "$HEAD" ] && echo true || echo false)

# The rendezvous lets the hosts number themselves. Both of --local_addr and is_host would otherwise be
# looked up by the host's name, which on many hosts is that of the loopback address. read_timeout: the
# head may come last.
exec torchrun --nnodes 2 --nproc_per_node "${RANKS:-gpu}" \
  --rdzv_backend c10d --rdzv_id "${RUN_ID:-mamba3}" --rdzv_endpoint "$HEAD:${PORT:-29500}" \
  --rdzv_conf "is_host=$is_head,read_timeout=900,join_timeout=900" --local_addr "$address" training/pretrain.py "$@"
