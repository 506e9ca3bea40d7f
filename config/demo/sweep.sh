#!/bin/sh
# A sweep: one measurement per argument (megabytes to sum up), a result file for each. A point that fails is
# noted and the sweep goes on; the first failure that was noted is how the run ends, whatever succeeds later.
set -eu
# shellcheck source=supervisor/agent/marker.sh
. "$ALLOCD_SH" # publish, note, read and wait for the marker

results=$ALLOCD_RUN_DIR/results
mkdir -p "$results"

measure() { # MEGABYTES
    result=$results/result_mb$1.json
    begin=$(date +%s%N) || return
    sum=$(head -c "$1"M /dev/zero | cksum) || return
    milliseconds=$((($(date +%s%N) - begin) / 1000000))
    sum=${sum#* } # cksum prints the sum and the number of bytes
    [ "${sum%% *}" -eq "$(($1 * 1048576))" ] || return
    printf '{"megabytes": %d, "bytes": %d, "milliseconds": %d}\n' \
        "$1" "${sum%% *}" "$milliseconds" >"$result.tmp" || return
    mv "$result.tmp" "$result" || return # whole for whoever sees it
    echo "$1 MB: $milliseconds ms"
}

for point; do
    measure "$point" || allocd_marker_note $?
done
