#!/usr/bin/env bash
# torchrun as a batch system needs it:  launch.sh RUN_DIR TORCHRUN_ARGUMENTS...
#
# 1. A request to stop (SIGTERM, SIGINT or SIGUSR1) goes straight to the ranks, as SIGUSR1. torchrun
#    passes signals on, too, but kills the ranks 30 seconds later, saved or not.
# 2. The exit code is the run's own: 75 if it has saved and can go on, 124 if it hung. torchrun
#    makes 1 of every code but 0, and leaves no way to tell them apart.
set -u
run_dir=$1
shift

# What counts below is what this start says. A folder that is not there holds nothing.
rm -f "$run_dir/exit_code"

# torchrun inherits that it ignores this signal, and so do the ranks until they can obey it.
trap '' USR1
torchrun "$@" &
torchrun=$!

# Again and again until torchrun is gone: ranks that are not ready yet ignore it, and those that save
# already do not mind.
ask_ranks() {
  trap '' TERM INT USR1
  while ranks=$(cat "/proc/$torchrun/task/$torchrun/children" 2>/dev/null); do
    # shellcheck disable=SC2086
    [ -z "$ranks" ] || kill -USR1 $ranks 2>/dev/null
    sleep 1
  done &
}
trap ask_ranks TERM INT USR1

# A signal ends `wait`, not torchrun.
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun"
  code=$?
done

if [ "$code" -ne 0 ] && [ -s "$run_dir/exit_code" ]; then
  code=$(cat "$run_dir/exit_code")
fi
exit "$code"
