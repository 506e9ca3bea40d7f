#!/bin/sh
# A sweep: one measurement per argument, the number of requests at the same time, and a result file for each; then an
# evaluation. A request sums up four megabytes. A point that fails is noted and the sweep goes on; the first failure
# that was noted is how the run ends, whatever succeeds later.
set -eu
# shellcheck source=supervisor/agent/marker.sh
. "$ALLOCD_SH" # publish, note, read and wait for the marker

results=$ALLOCD_RUN_DIR/results
mkdir -p "$results"

write() { # FILE, its content on standard input
    cat >"$1.tmp" && mv "$1.tmp" "$1" # whole for whoever sees it
}

request() { # a cksum prints the sum and the number of bytes
    sum=$(head -c 4194304 /dev/zero | cksum) && sum=${sum#* } && [ "${sum%% *}" -eq 4194304 ]
}

measure() { # CONCURRENCY
    begin=$(date +%s%N) users='' started=0 completed=0
    while [ "$started" -lt "$1" ]; do
        request &
        users="$users $!" started=$((started + 1))
    done
    for user in $users; do
        wait "$user" && completed=$((completed + 1))
    done
    milliseconds=$((($(date +%s%N) - begin) / 1000000))
    printf '{"max_concurrency": %d, "completed": %d, "failed": %d, "milliseconds": %d}\n' \
        "$1" "$completed" $(($1 - completed)) "$milliseconds" |
        write "$results/results_concurrency_$1_gpus_0.json" || return
    echo "$1 at a time: $completed requests in $milliseconds ms"
}

evaluate() { # the squares of 1 to 20, checked by adding odd numbers
    number=0 sum=0 correct=0
    while [ "$number" -lt 20 ]; do
        sum=$((sum + 2 * number + 1)) number=$((number + 1)) verdict=false
        [ "$sum" -ne $((number * number)) ] || verdict=true
        [ "$verdict" = false ] || correct=$((correct + 1))
        printf '{"sample": %d, "answer": %d, "correct": %s}\n' "$number" "$sum" "$verdict"
    done >"$results/samples_squares.jsonl"
    printf '{"task": "squares", "samples": %d, "correct": %d}\n' "$number" "$correct" |
        write "$results/results_squares.json"
    printf '{"system": "%s"}\n' "$(uname -s)" | write "$results/meta_env.json"
    (cd "$results" && sha256sum -- *.json *.jsonl) | write "$ALLOCD_RUN_DIR/SHA256SUMS"
}

for point; do
    measure "$point" || allocd_marker_note $?
done
evaluate || allocd_marker_note $?
