"""The experiments: which runs each consists of. Runs that several share are trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_paci.accumulation import SYNC
from megatron_paci.convergence.settings import Settings

BATCH = 32
RATES = {
    "adam": {SYNC: 2e-3, 1: 5e-4, 2: 5e-4, 4: 5e-4, 8: 5e-4, 16: 1e-3},
    "nadam": {SYNC: 1e-3, 4: 5e-4, 16: 1e-3},
    "muon": dict.fromkeys((SYNC, 4, 8, 16), 4e-3),
    "sgd": dict.fromkeys((SYNC, 4, 16), 0.1),
}
"""Learning rates by optimizer and accumulation, for the experiments that do not vary them: the best
in ``rate``, ``muon``, ``nadam`` and ``sgd``. With AdamW a=8 was tried at 5e-4 and 1e-3; a=1 and a=2
take the rate of a=4; NAdam with a=16 was best at 2e-3 with one seed, and is not with three."""
START_RATES = {(4, 36): 5e-4, (4, 72): 1e-3, (16, 36): 2e-3, (16, 72): 2e-3}
"""Of AdamW by accumulation and iterations of 1F1B before; the best in ``start_rate``."""
MUON = {"optimizer": "muon", "beta1": 0.8}
"""Muon with the best momentum in ``muon_momentum``."""
NADAM = {"optimizer": "nadam", "beta1": 0.9}
"""NAdam with the best momentum in ``nadam``."""


@dataclass(frozen=True)
class Experiment:
    """A question and the runs that answer it."""

    name: str
    question: str
    runs: dict[str, Settings]
    """By label, without the seed. The first one is what the others are compared with, unless
    ``baselines`` names another."""

    baselines: dict[str, str]
    """Label of a run to that of the run that it is compared with."""

    seeds: int = 3

    def baseline(self, label: str) -> str:
        """Return the label of what a run is compared with."""
        return self.baselines.get(label, next(iter(self.runs)))

    def seeded(self) -> list[tuple[str, Settings]]:
        """Return all runs, seed after seed, so that a part of them is already a comparison."""
        return [
            (label, replace(settings, seed=seed))
            for seed in range(1, self.seeds + 1)
            for label, settings in self.runs.items()
        ]


def flush(**changes) -> Settings:
    """Return 1F1B. Its result does not depend on the size of microbatches but for rounding."""
    if "lr" not in changes:
        changes["lr"] = RATES[changes.get("optimizer", "adam")][SYNC]
    return Settings(**{"schedule": "sync", "batch": BATCH, "microbatch": BATCH // 4, **changes})


def paci(accumulation: int, *, start: int = 0, **changes) -> Settings:
    """Return PACI, one window per iteration: ``accumulation`` microbatches make the batch.

    Args:
        start: Iterations of 1F1B before.
    """
    if "lr" not in changes:
        changes["lr"] = RATES[changes.get("optimizer", "adam")][accumulation]
    schedule = f"sync:0,{accumulation}:{start * BATCH}" if start else str(accumulation)
    return flush(**{"schedule": schedule, "microbatch": BATCH // accumulation, **changes})


def accumulation() -> dict[str, Settings]:
    """Flush against PACI at equal samples and equal batch per update."""
    return {"1F1B": flush()} | {f"a={a}": paci(a) for a in (1, 2, 4, 8, 16)}


def mismatch() -> dict[str, Settings]:
    """Eq. 1 against weight stashing."""
    runs = {"1F1B": flush()}
    for a in (1, 4, 16):
        runs |= {f"a={a}, eq. 1": paci(a), f"a={a}, stashed weights": paci(a, stash=True)}
    return runs


def clipping() -> dict[str, Settings]:
    """No clipping, and three norms to clip by; the largest norm is one that is often exceeded."""
    clipped = {
        f"a=4, {rule}": paci(4, clip=rule, clip_grad=0.3)
        for rule in ("local", "pipelined", "global")
    }
    return {
        "1F1B, not clipped": flush(), "a=4, none": paci(4),
        "1F1B, clipped": flush(clip="global", clip_grad=0.3), **clipped,
    }


def tied() -> dict[str, Settings]:
    """Untied and tied embeddings."""
    runs = {}
    for name, shares in (("untied", False), ("tied", True)):
        runs |= {f"{name}, {label}": settings
                 for label, settings in three_schedules(tied=shares).items()}
    return runs


def recomputation() -> dict[str, Settings]:
    """Stored activations, and activations recomputed with the weights of the backward."""
    runs = {"1F1B": flush()}
    for a in (1, 4, 16):
        runs |= {f"a={a}, stored": paci(a), f"a={a}, recomputed": paci(a, recompute=True)}
    return runs


def rates(optimizer: str, values: tuple[float, ...]) -> dict[str, Settings]:
    """Every schedule at every learning rate."""
    return {
        f"{label}, lr {lr:g}": settings
        for lr in values
        for label, settings in three_schedules(lr=lr, optimizer=optimizer).items()
    }


def three_schedules(**changes) -> dict[str, Settings]:
    """1F1B, and PACI with drift up to 2 and 1."""
    return {"1F1B": flush(**changes), "a=4": paci(4, **changes), "a=16": paci(16, **changes)}


def optimizers() -> dict[str, Settings]:
    """Every optimizer with its best momentum and learning rates, one with a rate besides."""
    return {
        f"{name}, {label}": settings
        for name, changes in (
            ("AdamW", {}), ("NAdam", NADAM), ("SGD", {"optimizer": "sgd"}), ("Muon", MUON)
        )
        for label, settings in three_schedules(**changes).items()
    } | {"NAdam, a=16, lr 0.002": paci(16, lr=2e-3, **NADAM)}


def depth() -> dict[str, Settings]:
    """More stages at the same accumulation, for one model of 32 thin layers.

    There is one 1F1B: N decides only from which seeds its weights are drawn.
    """
    model = {"layers": 32, "hidden": 56, "iterations": 180, "warmup": 9}
    return {"1F1B": flush(**model)} | {
        f"N={stages}, a=8": paci(8, stages=stages, **model) for stages in (4, 8, 16, 32)
    }


def stability() -> dict[str, Settings]:
    """Learning rates beyond those of ``rate``, until something breaks."""
    return {
        label: replace(settings, iterations=120, warmup=6)
        for label, settings in rates("adam", (1.6e-2, 6.4e-2)).items()
    }


def start() -> dict[str, Settings]:
    """A synchronous start of two lengths, with the best learning rates in ``start_rate``."""
    return three_schedules() | _started((a, n, lr) for (a, n), lr in START_RATES.items())


def start_rates() -> dict[str, Settings]:
    """A synchronous start with the learning rates of the accumulation and higher ones."""
    return {"1F1B": flush()} | _started([
        (4, 36, 5e-4), (4, 36, 1e-3), (4, 72, 5e-4), (4, 72, 1e-3), (4, 72, 2e-3),
        (16, 36, 1e-3), (16, 36, 2e-3), (16, 72, 1e-3), (16, 72, 2e-3),
    ])


def _started(choices: Iterable[tuple[int, int, float]]) -> dict[str, Settings]:
    return {
        f"a={a}, 1F1B for {n}, lr {lr:g}": paci(a, start=n, lr=lr) for a, n, lr in choices
    }


def nadam() -> dict[str, Settings]:
    """NAdam with two momenta and learning rates, half of them with a=4."""
    runs = {}
    for beta in (0.9, 0.97):
        changes = {"optimizer": "nadam", "beta1": beta}
        for lr in (1e-3, 2e-3):
            runs |= {f"{beta:g}, 1F1B, lr {lr:g}": flush(lr=lr, **changes),
                     f"{beta:g}, a=16, lr {lr:g}": paci(16, lr=lr, **changes),
                     f"{beta:g}, a=4, lr {lr / 2:g}": paci(4, lr=lr / 2, **changes)}
    return runs


def discount() -> dict[str, Settings]:
    """PipeMare's rule for the learning rate, and longer warm-up, with the rate of 1F1B."""
    rate = RATES["adam"][SYNC]
    return {
        "1F1B": flush(), "1F1B, warm-up 100": flush(warmup=100),
        "a=4": paci(4, lr=rate), "a=4, warm-up 100": paci(4, lr=rate, warmup=100),
        "a=4, rule for 50": paci(4, lr=rate, rate_iterations=50),
        "a=4, rule for 250": paci(4, lr=rate, rate_iterations=250),
    }


def muon_momentum() -> dict[str, Settings]:
    """Muon with several momenta."""
    runs = {}
    for beta in (0.6, 0.8, 0.9, 0.95):
        changes = {"optimizer": "muon", "beta1": beta}
        runs |= {f"{beta:g}, 1F1B": flush(**changes), f"{beta:g}, a=16": paci(16, **changes)}
    return runs


def recipe() -> dict[str, Settings]:
    """Muon, and a synchronous start besides."""
    runs = {"1F1B, Muon": flush(**MUON), "1F1B, AdamW": flush()}
    for a in (4, 8, 16):
        runs |= {f"a={a}, Muon": paci(a, **MUON),
                 f"a={a}, Muon, 1F1B for 36": paci(a, start=36, **MUON)}
    return runs


LONG = {"iterations": 1500, "warmup": 75, "validations": 20}


def time_to_loss() -> dict[str, Settings]:
    """Longer runs with Muon, for the time to a validation loss.

    With as many updates PACI ends a little above 1F1B, so there are some with more.
    """
    longer = {**LONG, "iterations": 1700, "warmup": 85}
    return {
        "1F1B, Muon": flush(**MUON, **LONG),
        "a=16, Muon": paci(16, **MUON, **LONG),
        "a=16, Muon, 1700 updates": paci(16, **MUON, **longer),
    }


def time_with_adam() -> dict[str, Settings]:
    """The same with AdamW."""
    return {
        "1F1B, AdamW": flush(**LONG),
        "a=16, AdamW, 1F1B for 75": paci(16, start=75, lr=2e-3, **LONG),
    }


def _to_first(runs: dict[str, Settings]) -> dict[str, str]:
    return {}


def _to_1f1b_before(runs: dict[str, Settings]) -> dict[str, str]:
    baselines, latest = {}, ""
    for label, settings in runs.items():
        latest = label if settings.schedule == "sync" else latest
        baselines[label] = latest
    return baselines


SWEEP = 1
"""Seeds where a setting is chosen among ones that differ by far more than seeds do."""

_TABLE: tuple[tuple[str, str, Callable, Callable, int], ...] = (
    ("rate", "Which learning rate does each schedule want?",
     lambda: rates("adam", (5e-4, 1e-3, 2e-3, 4e-3)) | {"a=4, lr 0.00025": paci(4, lr=2.5e-4)},
     lambda runs: _to_1f1b_before(runs) | {"a=4, lr 0.00025": "1F1B, lr 0.0005"}, 3),
    ("accumulation", "What does the accumulation a do, at equal batch?",
     accumulation, _to_first, 3),
    ("mismatch", "Does it matter that backwards see newer weights?", mismatch, _to_first, 3),
    ("start", "Does a synchronous start help?", start, _to_first, 3),
    ("start_rate", "Which learning rate does a synchronous start allow?",
     start_rates, _to_first, SWEEP),
    ("discount", "Does a smaller rate on early stages, or longer warm-up?",
     discount, _to_first, SWEEP),
    ("muon", "Which learning rate does Muon want?",
     lambda: rates("muon", (2e-3, 4e-3, 8e-3)), _to_1f1b_before, SWEEP),
    ("muon_momentum", "Which momentum does Muon want?",
     muon_momentum, _to_1f1b_before, SWEEP),
    ("nadam", "Which momentum does NAdam want?", nadam, _to_1f1b_before, SWEEP),
    ("sgd", "Which learning rate does SGD want?",
     lambda: rates("sgd", (0.05, 0.1, 0.2)), _to_1f1b_before, SWEEP),
    ("optimizers", "What does delay cost which optimizer?", optimizers,
     lambda runs: _to_1f1b_before(runs) | {"NAdam, a=16, lr 0.002": "NAdam, 1F1B"}, 3),
    ("recipe", "What do Muon and a synchronous start do together?", recipe, _to_first, 3),
    ("clipping", "Which norm should clip?", clipping, _to_1f1b_before, 3),
    ("tied", "Do tied embeddings learn as well?", tied, _to_1f1b_before, 3),
    ("recomputation", "Does recomputing with newer weights matter?",
     recomputation, _to_first, 3),
    ("depth", "How does the number of stages count?", depth, _to_first, 3),
    ("stability", "Which learning rate breaks which schedule?", stability, _to_1f1b_before, 3),
    ("time", "How long does it take to a validation loss, with Muon?",
     time_to_loss, _to_first, 3),
    ("time_adam", "And with AdamW?", time_with_adam, _to_first, 3),
)

EXPERIMENTS = {
    name: Experiment(name, question, runs := build(), baselines(runs), seeds)
    for name, question, build, baselines, seeds in _TABLE
}
