"""Order safety of whole jobs: what real runs post, checked by NCCL's rules (nccl_order/rules.py).

From the creation of the first process group to the end: training, evaluations, checkpoints.
"""

from __future__ import annotations

import pytest

from tests.gloo.launch import flags, launch
from tests.gloo.scenarios import TIED
from tests.nccl_order.rules import (
    Collective,
    Mark,
    Messages,
    OrderError,
    Wait,
    check,
    from_plain,
)

PACI = "--pipeline-schedule paci --eval-interval 2 --eval-iters 1 --save-interval 3"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the log of every rank by scenario."""
    folder = tmp_path_factory.mktemp("order")

    def scenario(name, num_stages, extra, base=TIED):
        arguments = f"{PACI} {extra} --save {folder / name}"
        return {"arguments": flags(num_stages, arguments, base), "order": True}

    two = launch(2, {
        "tied": scenario("tied", 2, "--paci-accum 4"),
        "experts": scenario("experts", 2, f"--paci-accum 2 {EXPERTS}"),
    }, folder, seconds=180)
    four = launch(4, {
        "tied-4": scenario("tied-4", 4, "--paci-accum 4 --clip-grad 1"),
        "replicas": scenario("replicas", 2, "--paci-accum 2 --use-distributed-optimizer "
                             "--overlap-grad-reduce --overlap-param-gather --global-batch-size 32"),
        "deferred": scenario("deferred", 2, "--paci-accum 2 --overlap-grad-reduce "
                             "--global-batch-size 32 --paci-defer-step --paci-extra-in-flight 1"),
    }, folder, seconds=240)
    return {name: [from_plain(rank["order"]) for rank in ranks]
            for name, ranks in (two | four).items()}


@pytest.mark.parametrize("name", ["tied", "experts", "tied-4", "replicas", "deferred"])
def test_a_job_gets_to_its_end(runs, name):
    check(runs[name])
    if name != "deferred":  # one hardware queue cannot order more microbatches in flight
        check(runs[name], one_queue=True)


def forwards_during_reductions(log):
    """Return how many forwards ran between the start of each reduction over replicas and its end.

    A reduction is of the gradients of a bucket: thousands of bytes.
    """
    waits = {event.operation: place for place, event in enumerate(log) if isinstance(event, Wait)}
    operations = [(place, event) for place, event in enumerate(log)
                  if isinstance(event, Messages | Collective)]
    return [
        sum(isinstance(event, Mark) and event.text.startswith("F")
            for event in log[place:waits[number]])
        for number, (place, collective) in enumerate(operations)
        if isinstance(collective, Collective) and collective.num_bytes > 5000
        and "reduce" in collective.name
    ]


def test_gradients_are_reduced_during_the_forward_that_a_step_waits_for(runs):
    """Drains have no such forward, and Megatron begins its first reduction late."""
    for log in runs["deferred"]:
        found = forwards_during_reductions(log)
        assert set(found) == {0, 1} and found.count(1) > found.count(0)
    for log in runs["replicas"]:
        assert set(forwards_during_reductions(log)) == {0}


def test_the_records_hold_the_whole_job(runs):
    """A message that one rank has not sent is missed, so the check looks at something."""
    for name, logs in runs.items():
        assert sum(isinstance(event, Mark) for event in logs[0]) > 64, name
        with pytest.raises(OrderError):
            check([logs[0][:-len(logs[0]) // 3], *logs[1:]])
