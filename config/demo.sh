#!/bin/sh
# Shows what a supervised run looks like, on this machine or inside an allocation of four nodes: one that succeeds,
# with its latencies, and one whose server dies in the middle. Exits 0 only if both ended as they should.
#
#     config/demo.sh                        about 15 s
#     ALLOCCTL=allocctl config/demo.sh      another allocctl than the checkout's
set -eu
cd "$(dirname "$0")/.."

allocctl=${ALLOCCTL:-.venv/bin/allocctl}
command -v "$allocctl" >/dev/null || {
    echo "demo: $allocctl is not there: install allocd into .venv (uv sync), or set ALLOCCTL" >&2
    exit 78
}
mkdir -p runs
base=$(mktemp -d runs/demo-XXXXXX) # where every node can see it

title() {
    printf '\n== %s\n' "$1"
}

# Run a plan in a directory of its own. Sets $code and $run, the run's directory.
supervise() { # NAME PLAN
    code=0
    "$allocctl" run "$2" --dir "$base/$1" || code=$?
    run=
    for directory in "$base/$1"/*/; do
        [ ! -f "$directory/journal.jsonl" ] || run=${directory%/}
    done
    [ -n "$run" ] || {
        echo "demo: no run was made in $base/$1 (exit code $code)" >&2
        exit 1
    }
}

latencies() { # RESULT
    python3 - "$1" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    result = json.load(file)
requests = result["requests"]
print(f"{requests['completed']} requests completed, {requests['failed']} failed, in {result['seconds']:.1f} s")
print("connections  requests/s   mean ms    p50 ms    p90 ms    p99 ms")
for level in result["levels"]:
    latency = level["latency_ms"]
    numbers = "".join(f"{latency[name]:10.1f}" for name in ("mean", "p50", "p90", "p99"))
    print(f"{level['concurrency']:11}{level['requests_per_second']:12.1f}{numbers}")
PYTHON
}

title "A load test of three servers: config/plans/demo.toml"
supervise success config/plans/demo.toml
good=$code
if [ "$good" -eq 0 ]; then
    title "What was measured: $run/results/results.json"
    latencies "$run/results/results.json"
fi
title "How the verdict came about: allocctl explain $run"
"$allocctl" explain "$run"

title "The same, and one server exits 3 on the way: config/plans/demo-failure.toml"
supervise failure config/plans/demo-failure.toml
bad=$code
title "What happened: allocctl explain $run"
"$allocctl" explain "$run"

title "Both runs are in $base"
if [ "$good" -eq 0 ] && [ "$bad" -eq 3 ]; then
    echo "demo: as expected: exit code 0, then 3, the dead server's own"
    exit 0
fi
echo "demo: expected exit codes 0 and 3, found $good and $bad" >&2
exit 1
