"""One rank of a distributed test: runs scenarios of real Megatron training on the CPU.

It runs what comes in on its standard input until that closes (pool.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import queue
import random
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path

from megatron_paci.bench.rank import measure, tear_down
from megatron_paci.cpu import cpu_flags
from tests.gloo.probes import (
    digest,
    live_storage_bytes,
    optimizer_tensors,
    plant_nan,
    wish_to_end,
)

ROOT = Path(__file__).resolve().parents[2]
RANK = int(os.environ["RANK"])


def watch(seconds: float) -> threading.Timer:
    """After ``seconds`` print what this rank was doing last, and end the process.

    Returns:
        What runs until then; cancel it when the work is done.
    """

    def expire() -> None:
        from megatron_paci.build import installed_stage

        stage = installed_stage()
        faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
        print(f"rank {RANK}: no end after {seconds} s;",
              stage.activity.describe() if stage else "no PACI stage is installed", flush=True)
        os._exit(70)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    return timer


def train(arguments: list[str], *, script: str, save_initial: str | None = None,
          replay: dict | None = None, local: dict | None = None,
          sleep_ms: float = 0, sleep_seed: int = 0,
          poison: dict | None = None, stop: dict | None = None, hang: dict | None = None,
          collectives: bool = False, order: bool = False) -> dict:
    """Run a launch script under the hooks; return what this rank saw.

    Args:
        save_initial: File stem; the initial state of the model goes to ``<stem>.rank<r>.pt``.
        replay: Instead of training, replay ``replay["num_stages"]`` stages in this process.
        local: Instead of training, train ``local["num_stages"]`` stages in this process with the
            package's own runner (local_run.py).
        sleep_ms: Most milliseconds of a random sleep after every action.
        sleep_seed: Seed of these sleeps, which differ by rank as well.
        poison: Plant NaN at ``stage`` and ``microbatch``, ``where`` is forward or backward.
        stop: At ``iteration`` on ``rank``, ``how`` is signal or duration: wish to end training.
        hang: On ``rank`` stop for good at ``action``; the time of all is up ``seconds`` later.
        collectives: Note those over several stages while the stream runs; needs 3 iterations.
        order: Note all that is posted and waited for, as events of nccl_order/rules.py.
    """
    import torch
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    from megatron.training import get_args, training

    from megatron_paci.build import installed_stage
    from tests.nccl_order.recorder import Recorder
    from tests.nccl_order.rules import plain

    recorder = Recorder()
    seen: dict = {
        "actions": [], "losses": [], "evaluations": [], "grad_norms": [], "router_metrics": []
    }
    delays = random.Random(f"{sleep_seed} {RANK}")

    def observe(engine, action):
        seen["actions"].append(str(action))
        recorder.mark(str(action))
        if hang and str(action) == hang["action"]:
            watch(hang["seconds"])
            if RANK == hang["rank"]:
                time.sleep(3600)
        time.sleep(delays.uniform(0, sleep_ms / 1000))

    def probe_train(original, *args, **kwargs):
        model, optimizer = args[1][0], args[2]
        if save_initial:
            torch.save(model.module.state_dict(), f"{save_initial}.rank{RANK}.pt")
        if replay:
            from tests.gloo.replay import replay_training

            return replay_training(seen, args, **replay)
        if local:
            from tests.gloo.local_run import train_local_pipeline

            return train_local_pipeline(seen, args, **local)
        result = original(*args, **kwargs)
        seen["weights"] = digest(model.parameters())
        seen["buffers"] = digest(model.module.buffers())
        seen["optimizer"] = digest(optimizer_tensors(optimizer))
        seen["learning_rate"] = optimizer.param_groups[0]["lr"]
        seen["loss_scale"] = optimizer.get_loss_scale().item()
        seen["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
        return result

    def probe_step(original, *args, **kwargs):
        stage = installed_stage()
        if stage is not None and stage.engine.observer is None:
            stage.engine.observer = observe
            if poison and stage.engine.schedule.stage == poison["stage"]:
                plant_nan(stage, poison["microbatch"], poison["where"])
            seen["engine"] = stage.engine
        if stop and (len(seen["losses"]), RANK) == (stop["iteration"], stop["rank"]):
            wish_to_end(stop["how"])
        result = original(*args, **kwargs)
        seen["grad_norms"].append(result[5] if result[5] is None else float(result[5]))
        seen["losses"].append({name: float(value) for name, value in result[0].items()})
        if len(seen["losses"]) == get_args().train_iters:  # PACI has drained, nothing else yet
            seen["bytes"] = live_storage_bytes()
        return result

    def probe_evaluate(original, *args, **kwargs):
        result = original(*args, **kwargs)
        if result[0] is not None:  # it is where the time for training ends in an evaluation
            seen["evaluations"].append({name: float(value) for name, value in result[0].items()})
        return result

    def probe_metrics(original, *args, **kwargs):
        result = original(*args, **kwargs)
        seen["router_metrics"].append({name: float(value) for name, value in result.items()})
        return result

    path = ROOT / script
    sys.path.append(str(path.parent))  # what a script imports from beside it
    sys.argv = [str(path), *arguments, *cpu_flags(arguments)]
    with (
        wrapped(training, "train", probe_train),
        wrapped(training, "train_step", probe_step),
        wrapped(training, "evaluate", probe_evaluate),
        wrapped(MoEMetricsTracker, "_aggregate", probe_metrics),
        across_stages(seen) if collectives else contextlib.nullcontext(),
        recorder.recording() if order else contextlib.nullcontext(),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(path), run_name="__main__")
    tear_down()
    if order:
        seen["order"] = plain(recorder.log)
    if engine := seen.pop("engine", None):
        seen["statistics"] = engine.statistics()
        seen["skipped"], seen["partial"] = engine.window.skipped, engine.window.partial
    return seen


@contextlib.contextmanager
def wrapped(owner, name: str, wrapper):
    """Let ``wrapper(original, ...)`` stand in for a function of a module or class.

    What others have imported of it is not looked for, as ``PatchSet`` does: that takes long.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, replaced)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def across_stages(seen: dict):
    """Note in ``seen["across_stages"]`` the collectives over several stages, and who called them.

    From the end of the first iteration to that of the last but one: the stream begins in the first
    and is drained in the last. The tool for virtual time finds them; its clocks are of no interest.
    """
    from megatron_paci.bench.costs import Costs
    from megatron_paci.bench.virtual_time import VirtualTime

    stages = int(os.environ["WORLD_SIZE"])  # at most
    measurement = VirtualTime(costs=Costs.parse(num_stages=stages))
    measurement.install()
    try:
        yield
        count = len(measurement.clock.iterations) - 3  # the first entry is the start
        result = measurement.result(warmup=1, iterations=count)
        seen["across_stages"] = [
            f"{entry['call']} over {entry['stages']}: {entry['site']} < {entry['callers']}"
            for entry in result["call_sites"]
        ]
    finally:
        measurement.uninstall()


def run_scenario(scenario: dict) -> dict:
    """Run one scenario: with ``plugin`` false without any hook; a measurement as benchmarks do."""
    import megatron_paci

    if "measurement" in scenario:
        result = measure(scenario)
        tear_down()
        return result
    os.environ["MASTER_PORT"] = str(scenario.pop("port"))
    hooked = scenario.pop("plugin", True)
    if hooked:
        megatron_paci.install()
    try:
        with megatron_wheel_helpers(hooked):
            return train(scenario.pop("arguments"), script=scenario.pop(
                "script", "examples/pretrain_gpt.py"), **scenario)
    finally:
        if hooked:
            megatron_paci.uninstall()


@contextlib.contextmanager
def megatron_wheel_helpers(hooked: bool):
    """Give a run without hooks the built helper, and spare it the make call (data_helpers.py)."""
    if hooked:
        yield
        return
    from megatron.core.datasets import utils

    from megatron_paci.data_helpers import ensure_helpers

    ensure_helpers(build=lambda: None)
    original, utils.compile_helpers = utils.compile_helpers, lambda: None
    yield
    utils.compile_helpers = original


def run_all(scenarios: list[dict]) -> list[dict]:
    """Run scenarios one after another; the name of each is printed, for who reads the output."""
    results = []
    for scenario in scenarios:
        print(f"=== {scenario.pop('name')}", flush=True)
        gc.collect()
        gc.freeze()  # live_storage_bytes need not look through all that was imported before
        results.append(run_scenario(scenario))
    return results


def serve(folder: Path) -> None:
    """Run the scenarios of one message after another; standard input has one per line.

    A message has ``number``, ``world_size``, ``until`` (when it has to be done, as ``time.time``
    counts) and ``scenarios``.
    The list of results goes to ``<number>.rank<r>.json``.
    """
    for line in lines_of_input():
        message = json.loads(line)
        size = str(message["world_size"])
        os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        timer = watch(round(message["until"] - time.time(), 1))
        text = json.dumps(run_all(message["scenarios"]))
        timer.cancel()
        # Whole at once: who waits for the file reads it as soon as it is there.
        unfinished = folder / f"{message['number']}.rank{RANK}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(unfinished.with_suffix(".json"))


def lines_of_input():
    """Yield the lines of standard input; when it closes, end the process, whatever it does."""
    lines = queue.SimpleQueue()

    def read() -> None:
        # Not sys.stdin: a process that Megatron forks from this one closes that, and would wait for
        # this thread to give it free.
        with open(0, closefd=False) as file:
            for line in file:
                lines.put(line)
        os._exit(70)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()


def main(folder: Path) -> None:
    try:
        serve(folder)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # other ranks may wait for this one: end at once, so that all are ended
