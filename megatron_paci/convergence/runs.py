"""How runs are described: schedules, with the learning rates that were found for them."""

from __future__ import annotations

from megatron_paci.accumulation import SYNC
from megatron_paci.convergence.settings import Settings

BATCH = 32
RATES = {
    "adam": {SYNC: 2e-3, 1: 5e-4, 2: 2.5e-4, 4: 5e-4, 8: 5e-4, 16: 1e-3},
    "nadam": {SYNC: 1e-3, 4: 5e-4, 16: 1e-3},
    "muon": dict.fromkeys((SYNC, 4, 8, 16), 4e-3),
    "sgd": dict.fromkeys((SYNC, 4, 16), 0.1),
}
"""Learning rates by optimizer and accumulation, for the experiments that do not vary them: the best
in ``rate``, ``low_rate``, ``muon``, ``nadam`` and ``sgd``. With AdamW a=8 was tried at 5e-4 and
1e-3. NAdam with a=16 was best at 2e-3 with one seed, and is not with three (``nesterov``)."""
START_RATES = {(4, 36): 5e-4, (4, 72): 1e-3, (16, 36): 2e-3, (16, 72): 2e-3}
"""Of AdamW by accumulation and iterations of 1F1B before; the best in ``start_rate``."""
MUON = {"optimizer": "muon", "beta1": 0.8}
"""Muon with the best momentum in ``muon_momentum``."""
NADAM = {"optimizer": "nadam", "beta1": 0.9}
"""NAdam with the best momentum in ``nadam``."""


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
