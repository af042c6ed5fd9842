"""Schedules by name: the orders of all stages over several iterations, and where they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_paci.schedule import StageSchedule
from megatron_paci.simulate import orders
from megatron_paci.simulate.orders import Task, Work
from megatron_paci.simulate.timing import Path

LABELS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zbv": "ZBV",
    "paci": "PACI",
}
NAMES = tuple(LABELS)
ALIASES = {"zb-2p": "zb-h2", "zb-v": "zbv"}


@dataclass(frozen=True)
class Plan:
    """What all stages do in a number of iterations."""

    label: str
    orders: Sequence[Sequence[Task]]
    """Per stage; microbatches count on from iteration to iteration."""
    path: Path
    num_microbatches: int
    """Per iteration."""
    joint_steps: bool
    """Whether the optimizer step is one of all stages together."""
    in_flight: int | None = None
    """Most microbatches in flight on the first stage of a stream; None if every iteration ends with
    a flush."""
    drift: int = 0
    """Most steps that a stage takes between a forward and its backward, on the worst stage."""

    @property
    def num_stages(self) -> int:
        """Pipeline size N."""
        return len(self.orders)

    @property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return len(self.path) // self.num_stages


def plan(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    iterations: int = 1,
    accumulation: int | None = None,
    chunks: int = 2,
    extra_in_flight: int = 0,
    defer_step: bool = False,
) -> Plan:
    """Return what the stages do under the schedule called ``name``, one of ``NAMES``.

    Args:
        accumulation: PACI: backward passes per step; None for all microbatches of an iteration.
        chunks: Interleaved: model chunks per stage.
        extra_in_flight: PACI: as in ``StageSchedule``; with it latency need not cost time.
        defer_step: PACI: likewise.
    """
    n, m = num_stages, num_microbatches
    plain = [(stage, 0) for stage in range(n)]
    if name == "paci":
        stages = [
            StageSchedule(stage, n, accumulation or m, extra_in_flight, defer_step)
            for stage in range(n)
        ]
        found = paci(stages, m, iterations=iterations)
        more = f", +{extra_in_flight} in flight per link" if extra_in_flight else ""
        return replace(found, label=found.label + more)
    generators: dict[str, Callable[[int], Iterator[Task]]] = {
        "gpipe": lambda stage: orders.gpipe(m),
        "1f1b": lambda stage: orders.one_f_one_b(stage, n, m),
        "interleaved": lambda stage: orders.interleaved(stage, n, m, chunks),
        "zb-h1": lambda stage: orders.zb_h1(stage, n, m),
        "zb-h2": lambda stage: orders.zb_h2(stage, n, m),
        "zbv": lambda stage: orders.zbv(stage, n, m),
    }
    paths = {
        "interleaved": [(stage, chunk) for chunk in range(chunks) for stage in range(n)],
        "zbv": plain + [(stage, 1) for stage in reversed(range(n))],
    }
    label = LABELS[name] + (f", v={chunks}" if name == "interleaved" else "")
    return Plan(
        label,
        [_repeat(list(generators[name](stage)), m, iterations) for stage in range(n)],
        paths.get(name, plain),
        m,
        # Without a flush of all stages together these two have no bubble; their paper checks the
        # update afterwards ("post-validation") instead.
        joint_steps=name not in ("zb-h2", "zbv"),
    )


def paci(
    stages: Sequence[StageSchedule], num_microbatches: int, *, iterations: int = 1
) -> Plan:
    """Return PACI with the given orders, first stage first."""
    count = num_microbatches * iterations
    return Plan(
        LABELS["paci"],
        [list(orders.from_actions(stage.finite(count))) for stage in stages],
        [(stage, 0) for stage in range(len(stages))],
        num_microbatches,
        joint_steps=False,
        in_flight=stages[0].depth,
        drift=max(stage.drift_bound for stage in stages),
    )


def _repeat(order: list[Task], num_microbatches: int, iterations: int) -> list[Task]:
    """Return an iteration so many times, each followed by its step."""
    return [
        task
        for number in range(iterations)
        for task in (
            *(replace(task, index=task.index + number * num_microbatches) for task in order),
            Task(Work.STEP, number),
        )
    ]
