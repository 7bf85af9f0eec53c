"""Seconds until `import collie` is done, and until its Trainer is, in fresh interpreters, beside `import torch`.

python benchmarks/import_time.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

STATEMENTS = ("pass", "import collie", "import torch", "from collie import CollieConfig", "from collie import Trainer")


def seconds(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(rounds):
        for statement in STATEMENTS:
            times[statement].append(seconds(statement))
    for statement, values in times.items():
        print(f"{statement:32}  {statistics.median(values):7.3f} s")


if __name__ == "__main__":
    main()
