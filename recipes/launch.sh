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

# torchrun inherits that it ignores this signal; the ranks take it back.
trap '' USR1
torchrun "$@" &
torchrun=$!

to_ranks() {
  # No ranks yet, so nothing to save: torchrun may go.
  # shellcheck disable=SC2046
  kill -USR1 $(cat "/proc/$torchrun/task/$torchrun/children") || kill -TERM "$torchrun"
}
true

# A signal ends `wait`, not torchrun.
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun"
  code=$?
done

if [ "$code" -ne 0 ] && [ -s "$run_dir/exit_code" ]; then
  code=$(cat "$run_dir/exit_code")
fi
exit "$code"
