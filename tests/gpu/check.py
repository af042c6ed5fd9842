"""Runs PACI where there is a GPU and compares it with Megatron's 1F1B: one command, one report.

    python tests/gpu/check.py --out DIR
    python tests/gpu/check.py --out DIR --device cpu

Needs PyTorch and the megatron-core wheel; neither Transformer Engine nor Apex, nor that this
project is installed. README.md beside this file says what is checked and how to set it up. Writes
``DIR/results.json`` and ``DIR/results.md``, and goes on after a failure.

Exit status: 0, or 1 if anything failed or the time was up, or 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_paci.arguments import PaciArguments  # noqa: E402
from megatron_paci.bench.ranks import RankError  # noqa: E402
from megatron_paci.version import __version__  # noqa: E402
from tests.gpu.plan import ENVIRONMENTS, Plan, Scenario, make_plan  # noqa: E402
from tests.gpu.ranks import DeviceRanks  # noqa: E402
from tests.gpu.results import markdown, rows_of  # noqa: E402

SECONDS = 450
SECONDS_TO_START = 90
SECONDS_OF_A_SCENARIO = 60


def main(argv: list[str] | None = None) -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(description="Check PACI on CUDA.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: the same scenarios without a GPU, but those that need one")
    parser.add_argument("--seconds", type=float, default=SECONDS,
                        help=f"limit of all of it (default: {SECONDS})")
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="run the scenarios whose name has this in it")
    options = parser.parse_args(argv)

    import torch

    num_gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and not num_gpus:
        sys.stderr.write("PyTorch sees no CUDA device; --device cpu runs what needs none\n")
        return 2
    plan = make_plan(options.device, num_gpus, {each.name for each in fields(PaciArguments)})
    scenarios = [each for each in plan.scenarios if options.only in each.name]
    run = CheckRun(options.out, options.device, num_gpus, options.seconds)
    try:
        run.all(scenarios)
    finally:
        failed = run.report(plan, chosen={each.name for each in scenarios})
    return int(failed)


class CheckRun:
    """One run of the check.

    Attributes:
        outcomes: By name of the scenario: ``ranks``, one result per rank, or why there are none:
            ``failed``, ``skipped`` or, of a backend, ``refused``; and ``seconds``.
    """

    def __init__(self, folder: Path, device: str, num_gpus: int, seconds: float):
        """Start nothing yet; the folder is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._device = device
        self._num_gpus = num_gpus
        self._factor = float(os.environ.get("TEST_TIME_FACTOR", "1"))
        self._begin = time.monotonic()
        self._end = self._begin + seconds * self._factor
        self.outcomes: dict[str, dict[str, Any]] = {}

    def all(self, scenarios: list[Scenario]) -> None:
        """Run the scenarios one after another, those of one environment in the same processes."""
        for environment, values in ENVIRONMENTS.items():
            chosen = [each for each in scenarios if each.environment == environment]
            folder = self._folder / "ranks" / environment.replace(", ", "-").replace(" ", "-")
            ranks = DeviceRanks(folder, self._device, self._variables() | values)
            try:
                for scenario in chosen:
                    begin = time.monotonic()
                    outcome = self._one(scenario, ranks)
                    outcome["seconds"] = time.monotonic() - begin
                    self.outcomes[scenario.name] = outcome
                    self._say(scenario.name, outcome)
            finally:
                ranks.close()

    def _one(self, scenario: Scenario, ranks: DeviceRanks) -> dict[str, Any]:
        if skip := scenario.skip or self._refused(scenario):
            return {"skipped": skip}
        allowed = SECONDS_OF_A_SCENARIO + SECONDS_TO_START * (ranks.started < scenario.ranks)
        seconds = min(allowed * self._factor, self._end - time.monotonic() - 15)
        if seconds < 10:
            return {"failed": "not run: the time was up"}
        message = asdict(scenario)
        name = message.pop("name")
        try:
            results = ranks.run(scenario.ranks, {name: message}, seconds=seconds)[name]
        except RankError as error:
            if not scenario.arguments and self._num_gpus < scenario.ranks:
                return {"refused": str(error)}
            return {"failed": str(error)}
        refusals = [each["refused"] for each in results if "refused" in each]
        if refusals:
            ranks.close()  # what is left of a backend that failed is of no use
            if self._num_gpus >= scenario.ranks:
                return {"failed": refusals[0]}
            return {"refused": refusals[0]}
        return {"ranks": results}

    def _refused(self, scenario: Scenario) -> str:
        """Return why the backend does not work here, as it turned out before."""
        probe = self.outcomes.get(f"{scenario.backend}{scenario.ranks} works", {})
        if "refused" not in probe:
            return ""
        reason = " ".join(probe["refused"].split())
        return f"refused by {scenario.backend.upper()}, ranks share a GPU: {reason[:200]}"

    def _variables(self) -> dict[str, str]:
        """Return the environment variables of all ranks."""
        variables = {
            "TORCHDYNAMO_DISABLE": "1",  # no compiler is needed, and nothing waits for one
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",
            "CUDA_MODULE_LOADING": "EAGER",  # loading a kernel later may wait for the device
            "PYTHONUNBUFFERED": "1",
        }
        if 0 < self._num_gpus < 4:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # NCCL 2.30; older ones refuse
        return variables

    def _say(self, name: str, outcome: Mapping[str, Any]) -> None:
        state = next((key for key in ("failed", "skipped", "refused") if key in outcome), "done")
        reason = f": {outcome[state]}" if state != "done" else ""
        seconds = time.monotonic() - self._begin
        sys.stdout.write(f"{seconds:6.1f} s  {name} {state}{reason}\n")
        sys.stdout.flush()
        self._write({"facts": self._facts(), "scenarios": self.outcomes})

    def report(self, plan: Plan, chosen: set[str]) -> bool:
        """Write and print the report.

        Returns:
            Whether anything failed.
        """
        checks = tuple(each for each in plan.checks if {each.left, each.right} <= chosen)
        rows = rows_of(checks, self.outcomes, device=self._device, num_gpus=self._num_gpus)
        facts = self._facts() | {"seconds": round(time.monotonic() - self._begin)}
        self._write({
            "facts": facts,
            "checks": [asdict(row) for row in rows],
            "scenarios": self.outcomes,
        })
        text = markdown(rows, facts, self.outcomes)
        (self._folder / "results.md").write_text(text)
        sys.stdout.write(f"\n{text}")
        return any(row.outcome == "failed" for row in rows)

    def _facts(self) -> dict[str, Any]:
        import torch

        from tests.gpu.older_torch import keeps_order

        devices = [torch.cuda.get_device_name(each) for each in range(self._num_gpus)]
        facts = {
            "megatron_paci": __version__,
            "Megatron-Core": importlib.metadata.version("megatron-core"),
            "PyTorch": torch.__version__,
            "device": ", ".join(devices) or "CPU",
        }
        if devices:
            facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if not keeps_order():
            facts["order of ranks"] = "by tests/gpu/older_torch.py: megatron_paci needs a newer one"
        return facts

    def _write(self, results: dict[str, Any]) -> None:
        (self._folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
