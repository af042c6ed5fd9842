"""One rank of a benchmark: trains each run of a list, one after another, and measures it.

Started by ``ranks.run_ranks`` as ``python -m megatron_paci.bench.rank FOLDER``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags


def end_with_parent() -> None:
    """End this process when the one that started it is gone: its end of our stdin closes then."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(70)

    threading.Thread(target=watch, daemon=True).start()


class Measurement(Protocol):
    """What is put around a training run, and tells this rank's result afterwards."""

    def install(self) -> None:
        """Wrap what is measured; called after ``megatron_paci.install()``."""

    def uninstall(self) -> None:
        """Give every wrapped function back."""

    def result(self, **parameters: Any) -> dict[str, Any]:
        """Return plain values; called between training and ``uninstall``.

        Args:
            parameters: What the run has under ``result``.
        """


def virtual_time(run: dict[str, Any]) -> Measurement:
    """Return the measurement of a run that ``virtual.VirtualRun`` has planned."""
    from megatron_paci.bench.costs import Costs, time
    from megatron_paci.bench.virtual_time import VirtualTime

    return VirtualTime(
        costs=Costs.parse(num_stages=run["num_stages"], **run["costs"]),
        latency=time(run["latency"]),
    )


def emulated(run: dict[str, Any]) -> Measurement:
    """Return the device of a run that ``emulated.EmulatedRun`` has planned."""
    from megatron_paci.bench.emulated_device import EmulatedDevice

    return EmulatedDevice(**run["seconds"][int(os.environ["RANK"])])


class NoMeasurement:
    """For a run whose trace tells all."""

    def install(self) -> None:
        """Do nothing."""

    def uninstall(self) -> None:
        """Do nothing."""

    def result(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


# What a run names as its "measurement".
MEASUREMENTS: dict[str, Callable[[dict[str, Any]], Measurement]] = {
    "virtual": virtual_time,
    "emulated": emulated,
    "none": lambda run: NoMeasurement(),
}


def measure(run: dict[str, Any]) -> dict[str, Any]:
    """Train one run and return what its measurement tells on this rank.

    Args:
        run: What ``for_ranks`` of its parameters has made: ``measurement``, ``script``,
            ``arguments``, ``result``, and what the measurement needs.
    """
    import megatron_paci
    from megatron_paci.compatibility import ConfigurationError

    os.environ["MASTER_PORT"] = str(run["port"])
    arguments = run["arguments"]
    sys.argv = [run["script"], *arguments, *cpu_flags(arguments)]
    measurement = MEASUREMENTS[run["measurement"]](run)
    # The plugin is there under every schedule: with another one than PACI it only passes through.
    megatron_paci.install()
    try:
        measurement.install()
        try:
            try:
                runpy.run_path(run["script"], run_name="__main__")
            except SystemExit as end:  # Megatron also leaves training by this, with status 0
                if end.code:
                    raise
            except ConfigurationError as error:
                sys.exit(str(error))
            return measurement.result(**run["result"])
        finally:
            measurement.uninstall()
    finally:
        megatron_paci.uninstall()


def tear_down() -> None:
    """Forget Megatron's global state, so that the next run starts as a process would."""
    import torch
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import training

    torch.distributed.barrier()
    training.destroy_global_state()
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker = {}
    # Megatron keeps these; a process that has them makes one collective more when it starts.
    training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Run what ``FOLDER/runs.json`` lists; results go to ``FOLDER/<number>.rank<r>.json``."""
    folder = Path(sys.argv[1])
    faulthandler.register(signal.SIGUSR1)  # sent when the time is up
    end_with_parent()
    os.environ.update(cpu_environment(os.environ))
    CpuDevice().install()  # for the life of this process
    for number, run in enumerate(json.loads((folder / "runs.json").read_text())):
        result = measure(run)
        tear_down()
        (folder / f"{number}.rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        elif isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")  # else argparse, which has said why
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one: end at once, so that all are ended
