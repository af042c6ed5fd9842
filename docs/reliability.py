"""Measures the table of docs/reliability.md. Run: python docs/reliability.py [FAULT...]

Starts a small job with torchrun for every fault (tests/gloo/faults.py), or for those named, lets it
happen and checks what becomes of the job (tests/gloo/fault_run.py). Ends with status 1 if anything
is not as it should be; the reason and the outputs of the ranks are printed then.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.gloo.fault_run import FaultError, Observed, run_undisturbed  # noqa: E402
from tests.gloo.faults import FAULTS, Ending, Fault  # noqa: E402

LIMIT = 300  # seconds for one job


def main(names: list[str]) -> int:
    """Print the rows of the faults as Markdown; return the number of those that went wrong."""
    wrong = 0
    print("| fault | what happens | seconds until all ranks ended | lost iterations | command |")
    print("| --- " * 5 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = {}
        for name in names:
            fault, folder = FAULTS[name], Path(scratch, name)
            if fault.stages not in undisturbed:
                undisturbed[fault.stages] = run_undisturbed(
                    Fault(words="a job", happens="", stages=fault.stages),
                    Path(scratch, f"undisturbed-{fault.stages}"), limit=LIMIT,
                )
            began = time.monotonic()
            try:
                observed = Observed(fault, folder, limit=LIMIT)
                # One that ends by a signal drains where no other job does.
                observed.check(
                    None if fault.ending is Ending.SAVES else undisturbed[fault.stages]
                )
            except FaultError as error:
                wrong += 1
                print(f"{name}: {error}", file=sys.stderr)
                continue
            seconds = "goes on" if observed.seconds is None else f"{observed.seconds:.1f}"
            lost = "-" if observed.lost is None else observed.lost
            print(f"| {fault.words} | {fault.happens} | {seconds} | {lost} | "
                  f"`python docs/reliability.py {name}` |", flush=True)
            print(f"{name}: {time.monotonic() - began:.0f} s, processes gone "
                  f"{observed.longest:.1f} s after torchrun", file=sys.stderr, flush=True)
    print(f"{len(names)} faults, {wrong} not as they should be", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or list(FAULTS))))
