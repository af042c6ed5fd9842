"""The experiments: which runs each consists of. Runs that several share are trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_paci.accumulation import SYNC
from megatron_paci.convergence.runs import (
    MUON,
    NADAM,
    RATES,
    START_RATES,
    flush,
    paci,
    rates,
    three_schedules,
)
from megatron_paci.convergence.settings import Settings


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


def low_rates() -> dict[str, Settings]:
    """Learning rates of the smallest accumulations, down to one that is too low."""
    tried = ((5e-4, (1, 2, 4)), (2.5e-4, (1, 2, 4)), (1.25e-4, (1, 2)))
    return {"1F1B, lr 0.0005": flush(lr=5e-4)} | {
        f"a={a}, lr {lr:g}": paci(a, lr=lr) for lr, accumulations in tried for a in accumulations
    }


def optimizers() -> dict[str, Settings]:
    """Megatron's optimizers with their best momenta and learning rates."""
    return {
        f"{name}, {label}": settings
        for name, changes in (("AdamW", {}), ("SGD", {"optimizer": "sgd"}), ("Muon", MUON))
        for label, settings in three_schedules(**changes).items()
    }


def nesterov() -> dict[str, Settings]:
    """NAdam at the rates that three seeds bear, and with a=16 at the one that was best in one."""
    return {"1F1B, AdamW": flush()} | {
        f"{label}, NAdam": settings for label, settings in three_schedules(**NADAM).items()
    } | {"a=16, NAdam, lr 0.002": paci(16, lr=2e-3, **NADAM)}


def depth() -> dict[str, Settings]:
    """More stages at the same accumulation, for one model of 32 thin layers.

    1F1B computes the same with any N, which decides only from which seeds its weights are drawn;
    at the learning rate of PACI it shows how much of the difference is due to that rate.
    """
    model = {"layers": 32, "hidden": 56, "iterations": 180, "warmup": 9}
    rate = RATES["adam"][8]
    return {"1F1B": flush(**model), f"1F1B, lr {rate:g}": flush(lr=rate, **model)} | {
        f"N={stages}, a=8": paci(8, stages=stages, **model) for stages in (4, 8, 16, 32)
    }


def stability() -> dict[str, Settings]:
    """Learning rates beyond those of ``rate``, until something breaks."""
    return {
        label: replace(settings, iterations=120, warmup=6)
        for label, settings in rates("adam", (1.6e-2, 6.4e-2, 2.56e-1)).items()
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


def _long(iterations: int) -> dict[str, int]:
    return {"iterations": iterations, "warmup": iterations // 20, "validations": 20}


LONG = _long(1500)


def time_to_loss() -> dict[str, Settings]:
    """Longer runs with Muon, for the time to a validation loss."""
    return {"1F1B, Muon": flush(**MUON, **LONG), "a=16, Muon": paci(16, **MUON, **LONG)}


def time_with_more_updates(of_flush: int, of_paci: int) -> dict[str, Settings]:
    """With as many updates as 1F1B PACI ends a little above it, so it gets some more."""
    return {
        "1F1B, Muon": flush(**MUON, **_long(of_flush)),
        f"a=16, Muon, {of_paci} updates": paci(16, **MUON, **_long(of_paci)),
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
     lambda: rates("adam", (5e-4, 1e-3, 2e-3, 4e-3)), _to_1f1b_before, 3),
    ("low_rate", "Do small accumulations want a lower one still?", low_rates, _to_first, 3),
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
    ("nesterov", "Does Nesterov momentum make up for delay?", nesterov,
     lambda runs: _to_1f1b_before(runs) | {"1F1B, NAdam": "1F1B, AdamW"}, 3),
    ("sgd", "Which learning rate does SGD want?",
     lambda: rates("sgd", (0.05, 0.1, 0.2)), _to_1f1b_before, SWEEP),
    ("optimizers", "What does delay cost which optimizer?", optimizers, _to_1f1b_before, 3),
    ("recipe", "What do Muon and a synchronous start do together?", recipe, _to_first, 3),
    ("clipping", "Which norm should clip?", clipping, _to_1f1b_before, 3),
    ("tied", "Do tied embeddings learn as well?", tied, _to_1f1b_before, 3),
    ("recomputation", "Does recomputing with newer weights matter?",
     recomputation, _to_first, 3),
    ("depth", "How does the number of stages count?", depth, _to_first, 3),
    ("stability", "Which learning rate breaks which schedule?", stability, _to_1f1b_before, 3),
    ("time", "How long does it take to a validation loss, with Muon?",
     time_to_loss, _to_first, 3),
    ("time_longer", "How long does it take with some more updates than 1F1B?",
     lambda: time_with_more_updates(1500, 1700), _to_first, 3),
    ("time_longest", "How long does it take over 2400 updates of 1F1B?",
     lambda: time_with_more_updates(2400, 2700), _to_first, 1),  # three take over an hour
    ("time_adam", "How long does it take with AdamW?", time_with_adam, _to_first, 3),
)

EXPERIMENTS = {
    name: Experiment(name, question, runs := build(), baselines(runs), seeds)
    for name, question, build, baselines, seeds in _TABLE
}
