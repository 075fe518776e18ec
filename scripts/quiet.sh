#!/bin/sh
# Runs a command with its output in a log file: prints what is done, progress, how long it took, and on failure the log's end.
# Usage: quiet.sh WHAT LOGFILE COMMAND...
set -u
what=$1
log=$2
shift 2

start=$(date +%s)
"$@" >"$log" 2>&1 &
pid=$!
# A background command of a shell without job control ignores Ctrl-C: pass it on.
trap 'kill "$pid" 2>/dev/null; wait "$pid"; exit 130' INT TERM

echo "$what ..."
ticks=0
while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    ticks=$((ticks + 1))
    [ $((ticks % 15)) -ne 0 ] || echo "  ... $ticks s"
done
wait "$pid"
status=$?
if [ "$status" -ne 0 ]; then
    echo "$what: failed with status $status. The end of $log:"
    tail -n 25 "$log"
    exit "$status"
fi
echo "  done in $(($(date +%s) - start)) s"
