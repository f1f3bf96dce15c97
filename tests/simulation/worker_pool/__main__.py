"""Run the simulator of a worker pool. The same seed gives the same run.

python -m tests.simulation.worker_pool --seed 7                one run
python -m tests.simulation.worker_pool --seed 1 --seeds 1000   many runs; stops at the first complaint
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.simulation.worker_pool.scenarios import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.worker_pool", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0, help="virtual seconds in which faults occur")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a complaint")
    options = parser.parse_args()
    logging.getLogger("heapline.assign").setLevel(logging.CRITICAL)
    began, bad = time.perf_counter(), 0
    for seed in range(options.seed, options.seed + options.seeds):
        report = run_seed(seed, options.seconds, options.workers)
        if report.complaints:
            bad += 1
            print(report.text() if not options.keep_going else f"seed {seed}: {report.complaints[0]}", flush=True)
            if not options.keep_going:
                return 1
    took = time.perf_counter() - began
    print(f"{options.seeds} seed(s), {bad} with complaints, {took / options.seeds:.2f} s each")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
