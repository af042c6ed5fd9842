"""What the GPU check runs and compares: pure data, without torch.

A scenario is one training run on some ranks. A check compares two of them, or states a figure of
them. Scenarios that share an environment share their processes, so the order keeps them together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tests.gloo.launch import flags
from tests.gloo.scenarios import EVERY

# Variables that are read when a process first uses its GPU: one set of processes for each. NCCL
# comes last, with processes of its own, so that it can spoil nothing else.
ENVIRONMENTS = {
    "gloo": {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "gloo, blocking": {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "gloo, one queue": {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "nccl": {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "nccl, one queue": {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}

# Without Transformer Engine, Apex and compiled kernels; repeatable.
PLAIN = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-create-attention-mask-in-dataloader "
    "--num-workers 0 --deterministic-mode --distributed-timeout-minutes 2"
)
STREAM = "--clip-grad 0 --pipeline-schedule paci --paci-accum 2"
DRAINED = f"{EVERY} --pipeline-schedule paci"
DTYPES = {"fp32": "", "bf16": "--bf16"}

# A model large enough to keep a GPU busy, for memory and speed: 4 microbatches per iteration.
LARGE = (
    "--bf16 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 8191"
)
SMALL = "--bf16"
SPEED = "--global-batch-size 8 --train-iters 10 --clip-grad 0 --eval-iters 0"
SPEED_MICROBATCHES = 4
WARM_UP = 3
"""Iterations that count neither for memory nor for speed: then the optimizer has its state."""

# Options of later versions: field of PaciArguments, name of the scenarios, flags.
OPTIONS = (
    ("paci_extra_in_flight", "extra-in-flight", "--paci-extra-in-flight 1"),
    ("paci_defer_step", "defer-step", "--paci-defer-step"),
)


@dataclass(frozen=True)
class Scenario:
    """One training run."""

    name: str
    ranks: int
    backend: str
    """gloo or nccl."""
    environment: str
    """Key of ``ENVIRONMENTS``."""
    arguments: tuple[str, ...] = ()
    """Megatron's command line; without any it only asks whether the backend works here."""
    hooked: bool = True
    """Whether the plugin is installed; if not, Megatron runs as it is."""
    jitter: bool = False
    """Whether every action is followed by a pause of random length, on the GPU where there is one.
    """
    skip: str = ""
    """Why it is not run, empty if it is."""


@dataclass(frozen=True)
class Check:
    """A statement about two scenarios."""

    name: str
    kind: str
    """equal (losses, evaluations, weights, optimizer state, to the last bit), delay (``left`` has
    none, ``right`` has as much as the schedule says), memory or speed (``left`` is 1F1B)."""
    left: str
    right: str


@dataclass(frozen=True)
class Plan:
    """All scenarios, in the order in which they run, and all checks."""

    scenarios: tuple[Scenario, ...]
    checks: tuple[Check, ...]


def make_plan(device: str, num_gpus: int, fields: Collection[str]) -> Plan:
    """Return what there is to run.

    Args:
        device: cuda or cpu.
        num_gpus: Visible ones; ranks share them if there are fewer than ranks.
        fields: Names of the fields of ``PaciArguments``: an option that is missing is skipped.
    """
    scenarios: list[Scenario] = []
    checks: list[Check] = []
    for ranks, dtypes in ((2, ("fp32", "bf16")), (4, ("bf16",))):
        for dtype in dtypes:
            _add_correctness(scenarios, checks, "gloo", ranks, dtype)
    for field, name, option in OPTIONS:
        skip = "" if field in fields else f"this version has no {option.split()[0]}"
        _add_option(scenarios, checks, name, option, skip)
    for ranks in (2, 4):
        # With a GPU for each rank over NCCL, as one would train; else over gloo.
        backend = "nccl" if device == "cuda" and num_gpus >= ranks else "gloo"
        _add_speed(scenarios, checks, backend, ranks, LARGE if device == "cuda" else SMALL)
    for ranks in (2, 4):
        scenarios.append(Scenario(f"nccl{ranks} works", ranks, "nccl", "nccl"))
        _add_correctness(scenarios, checks, "nccl", ranks, "bf16")
        # The transport moves numbers and computes none.
        checks.append(_equal(f"nccl{ranks} bf16: equals gloo", f"gloo{ranks} bf16 stream",
                             f"nccl{ranks} bf16 stream"))
    _add_environments(scenarios, checks)
    if device == "cpu":
        scenarios = [_without_gpu(scenario) for scenario in scenarios]
    order = list(ENVIRONMENTS)
    scenarios.sort(key=lambda scenario: order.index(scenario.environment))
    return Plan(tuple(scenarios), tuple(checks))


def _equal(name: str, left: str, right: str) -> Check:
    return Check(name, "equal", left, right)


def _run(
    name: str, ranks: int, backend: str, extra: str, *, environment: str = "", **settings
) -> Scenario:
    command = flags(ranks, f"{PLAIN} --distributed-backend {backend} {extra}")
    return Scenario(name, ranks, backend, environment or backend, tuple(command), **settings)


def _add_correctness(
    scenarios: list[Scenario], checks: list[Check], backend: str, ranks: int, dtype: str
) -> None:
    """1F1B of Megatron without any hook, PACI drained every window, and its stream twice."""
    of, flag = f"{backend}{ranks} {dtype}", DTYPES[dtype]
    scenarios += [
        _run(f"{of} 1f1b", ranks, backend, f"{EVERY} {flag}", hooked=False),
        _run(f"{of} drained", ranks, backend, f"{DRAINED} {flag}"),
        _run(f"{of} stream", ranks, backend, f"{STREAM} {flag}"),
        _run(f"{of} stream again", ranks, backend, f"{STREAM} {flag}", jitter=True),
    ]
    checks += [
        _equal(f"{of}: drained equals 1F1B", f"{of} 1f1b", f"{of} drained"),
        _equal(f"{of}: repeats, with random pauses", f"{of} stream", f"{of} stream again"),
        # Guards the two above.
        Check(f"{of}: undrained is delayed", "delay", f"{of} drained", f"{of} stream"),
    ]


def _add_option(
    scenarios: list[Scenario], checks: list[Check], name: str, option: str, skip: str
) -> None:
    """An option of the schedule: drained it changes nothing, and it repeats."""
    of = "gloo2 bf16"
    scenarios += [
        _run(f"{of} {name} drained", 2, "gloo", f"{DRAINED} --bf16 {option}", skip=skip),
        _run(f"{of} {name}", 2, "gloo", f"{STREAM} --bf16 {option}", skip=skip),
        _run(f"{of} {name} again", 2, "gloo", f"{STREAM} --bf16 {option}", skip=skip, jitter=True),
    ]
    checks += [
        _equal(f"{of} {name}: drained equals 1F1B", f"{of} 1f1b", f"{of} {name} drained"),
        _equal(f"{of} {name}: repeats, with random pauses", f"{of} {name}", f"{of} {name} again"),
        Check(f"{of} {name}: undrained is delayed", "delay", f"{of} {name} drained",
              f"{of} {name}"),
    ]


def _add_speed(
    scenarios: list[Scenario], checks: list[Check], backend: str, ranks: int, model: str
) -> None:
    of = f"{backend}{ranks} large"
    paci = f"{SPEED} --pipeline-schedule paci --paci-accum {SPEED_MICROBATCHES}"
    scenarios += [
        _run(f"{of} 1f1b", ranks, backend, f"{model} {SPEED}", hooked=False),
        _run(f"{of} paci", ranks, backend, f"{model} {paci}"),
    ]
    for kind in ("memory", "speed"):
        checks.append(Check(f"{of}: {kind}", kind, f"{of} 1f1b", f"{of} paci"))


def _add_environments(scenarios: list[Scenario], checks: list[Check]) -> None:
    """The same streams where the host waits for every kernel, and with one hardware queue.

    The former over gloo alone: where every launch waits, two neighbours that have each posted a
    receive ahead over NCCL wait for each other (docs/reliability.md).
    """
    for environment, backend, dtype, variable in (
        ("gloo, blocking", "gloo", "fp32", "CUDA_LAUNCH_BLOCKING"),
        ("gloo, blocking", "gloo", "bf16", "CUDA_LAUNCH_BLOCKING"),
        ("gloo, one queue", "gloo", "bf16", "CUDA_DEVICE_MAX_CONNECTIONS"),
        ("nccl, one queue", "nccl", "bf16", "CUDA_DEVICE_MAX_CONNECTIONS"),
    ):
        of, value = f"{backend}2 {dtype}", ENVIRONMENTS[environment][variable]
        name = f"{of} stream, {variable}={value}"
        extra = f"{STREAM} {DTYPES[dtype]}"
        scenarios.append(_run(name, 2, backend, extra, environment=environment))
        checks.append(_equal(f"{of}: equal with {variable}={value}", f"{of} stream", name))


def _without_gpu(scenario: Scenario) -> Scenario:
    needs_one = scenario.environment != "gloo"
    return replace(scenario, skip="needs CUDA") if needs_one else scenario
