"""Today's launcher, as small as it can be: `python polling.py SECONDS COMMAND...`, each command a JSON list.

It starts the commands side by side and asks them in turn, every so many seconds, whether they have ended. The first
that it finds failed makes it terminate the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time


def main(period: float, commands: list[list[str]]) -> int:
    """Returns the code of the first failure that it saw."""
    processes = [subprocess.Popen(command) for command in commands]
    while any(process.poll() is None for process in processes):
        time.sleep(period)
        failed = next((process.returncode for process in processes if process.poll()), 0)
        if failed:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), [json.loads(word) for word in sys.argv[2:]]))
