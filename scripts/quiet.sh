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
    if [ -t 1 ]; then printf '\r  ... %s s' "$ticks"; elif [ $((ticks % 3)) -eq 0 ]; then echo "  ... $ticks s"; fi
done
wait "$pid"
status=$?
[ ! -t 1 ] || printf '\r'
if [ "$status" -ne 0 ]; then
    echo "$what: failed with status $status. The end of $log:"
    tail -n 25 "$log"
    exit "$status"
fi
echo "  done in $(($(date +%s) - start)) s"
