"""One rank of the GPU check: runs the scenarios that come in on its standard input.

``worker.py DEVICE FOLDER``; DEVICE is cuda, or cpu for the same without a GPU. A message is a line
of JSON, see ``tests.gloo.pool.RankPool.run``; it ends when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_paci.bench.rank import tear_down  # noqa: E402
from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags  # noqa: E402
from tests.gloo.probes import digest, optimizer_tensors  # noqa: E402
from tests.gloo.worker import lines_of_input, megatron_wheel_helpers, watch  # noqa: E402
from tests.gpu.plan import WARM_UP  # noqa: E402

RANK = int(os.environ["RANK"])
SCRIPT = ROOT / "examples/pretrain_gpt.py"


def prepare(device: str) -> None:
    """Make this process one that uses a GPU, or none, for its life, and its mock data small."""
    if device == "cpu":
        os.environ.update(cpu_environment(os.environ))
        CpuDevice().install()
    import torch
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    from tests.gpu.older_torch import keep_order_of_ranks, keeps_order

    if not keeps_order():
        keep_order_of_ranks()
    if device == "cuda":  # ranks take turns over the GPUs that there are
        os.environ["LOCAL_RANK"] = str(RANK % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    MockGPTLowLevelDataset.size = 1000  # its 100,000 documents take longer than the training


def run_scenario(scenario: dict[str, Any], device: str) -> dict[str, Any]:
    """Run one scenario, given as the fields of ``plan.Scenario`` and its port."""
    os.environ["MASTER_PORT"] = str(scenario["port"])
    if not scenario["arguments"]:
        return try_backend(scenario["backend"])

    import megatron_paci
    from tests.gpu.host_transport import host_transport

    # On the CPU every message takes the way around, so that it has been gone once.
    through_host = (lambda tensor: tensor.is_cuda) if device == "cuda" else (lambda tensor: True)
    hooked = scenario["hooked"]
    if hooked:
        megatron_paci.install()
    try:
        with (
            megatron_wheel_helpers(hooked),
            host_transport(through_host) if scenario["backend"] == "gloo"
            else contextlib.nullcontext(),
        ):
            return train(scenario["arguments"], device, jitter=scenario["jitter"])
    finally:
        if hooked:
            megatron_paci.uninstall()


def try_backend(backend: str) -> dict[str, Any]:
    """Reduce once and pass a message round; return why the backend refused, if it did."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        number = torch.ones(1, device="cuda")
        dist.all_reduce(number)
        size = dist.get_world_size()
        received = torch.zeros(1, device="cuda")
        for request in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, number, (RANK + 1) % size),
            dist.P2POp(dist.irecv, received, (RANK - 1) % size),
        ]):
            request.wait()
        if received.item() != size:
            raise RuntimeError(f"a message of {size} arrived as {received.item()}")
        dist.destroy_process_group()
    except dist.DistBackendError as error:
        return {"refused": str(error)}
    return {}


def train(arguments: list[str], device: str, *, jitter: bool) -> dict[str, Any]:
    """Run the launch script; return what this rank saw.

    Args:
        jitter: Pause after every action, for a random time of up to 2 ms: on the GPU, where there
            is one, so that its stream falls behind the host and the messages.

    Returns:
        Of this rank, ``losses`` and ``evaluations``, hashes of ``weights`` and ``optimizer``,
        seconds at the ``ends`` of iterations, bytes of ``parameters`` and, above what was there
        before, of the ``peak`` after the first iterations; ``statistics`` of the engine.
    """
    import torch
    from megatron.training import get_args

    from megatron_paci.build import installed_stage
    from megatron_paci.patching import Patch, PatchSet

    seen: dict[str, Any] = {"losses": [], "evaluations": [], "ends": []}
    before = torch.cuda.memory_allocated()
    pause = random_pause(device) if jitter else None

    def probe_train(original, *args, **kwargs):
        model, optimizer = args[1][0], args[2]
        result = original(*args, **kwargs)
        seen["peak"] = torch.cuda.max_memory_allocated() - before
        parameters = list(model.parameters())
        seen["parameters"] = sum(p.numel() * p.element_size() for p in parameters)
        seen["weights"] = digest(p.cpu() for p in parameters)
        seen["optimizer"] = digest(tensor.cpu() for tensor in optimizer_tensors(optimizer))
        return result

    def probe_step(original, *args, **kwargs):
        stage = installed_stage()
        if stage is not None:
            seen["engine"] = stage.engine
            if pause is not None:
                stage.engine.observer = pause
        result = original(*args, **kwargs)
        # Where there is a loss, on the last stage, this waits for the GPU.
        seen["losses"].append({name: float(value) for name, value in result[0].items()})
        seen["ends"].append(time.perf_counter())
        if len(seen["losses"]) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        return result

    def probe_evaluate(original, *args, **kwargs):
        result = original(*args, **kwargs)
        seen["evaluations"].append({name: float(value) for name, value in result[0].items()})
        return result

    training = "megatron.training.training"
    probes = PatchSet((
        Patch(f"{training}:train", probe_train, (), "probe"),
        Patch(f"{training}:train_step", probe_step, (), "probe"),
        Patch(f"{training}:evaluate", probe_evaluate, (), "probe"),
    ))
    sys.argv = [str(SCRIPT), *arguments, *(cpu_flags(arguments) if device == "cpu" else ())]
    probes.install()
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        seen["iterations"] = get_args().train_iters
        seen["tokens"] = get_args().global_batch_size * get_args().seq_length
    finally:
        probes.uninstall()
    tear_down()
    if engine := seen.pop("engine", None):
        seen["statistics"] = engine.statistics()
    gc.collect()
    torch.cuda.empty_cache()
    return seen


def random_pause(device: str) -> Callable[..., None]:
    """Return an observer of the engine that lets the device sleep, each rank differently."""
    import torch

    times = random.Random(RANK)

    def pause(engine: Any, action: Any) -> None:
        seconds = times.uniform(0, 0.002)
        if device == "cuda":
            torch.cuda._sleep(int(seconds * 1.5e9))  # in clock cycles of about as many per second
        else:
            time.sleep(seconds)

    return pause


def serve(device: str, folder: Path) -> None:
    """Run the scenarios of one message after another; results go to ``<number>.rank<r>.json``."""
    for line in lines_of_input():
        message = json.loads(line)
        size = str(message["world_size"])
        os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        timer = watch(round(message["until"] - time.time(), 1))
        results = []
        for scenario in message["scenarios"]:
            print(f"=== {scenario['name']}", flush=True)
            results.append(run_scenario(scenario, device))
        timer.cancel()
        # Whole at once: who waits for the file reads it as soon as it is there.
        unfinished = folder / f"{message['number']}.rank{RANK}.unfinished"
        unfinished.write_text(json.dumps(results))
        unfinished.rename(unfinished.with_suffix(".json"))


if __name__ == "__main__":
    try:
        prepare(sys.argv[1])
        serve(sys.argv[1], Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # other ranks may wait for this one: end at once, so that all are ended
