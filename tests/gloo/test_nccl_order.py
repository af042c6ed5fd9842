"""Order safety of whole jobs: what real runs post, checked by NCCL's rules (nccl_order/rules.py).

From the creation of the first process group to the end: training, evaluations, checkpoints.
"""

from __future__ import annotations

import pytest

from tests.gloo.launch import flags, launch
from tests.gloo.scenarios import TIED
from tests.nccl_order.rules import Mark, OrderError, check, from_plain

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
    }, folder, seconds=180)
    return {name: [from_plain(rank["order"]) for rank in ranks]
            for name, ranks in (two | four).items()}


@pytest.mark.parametrize("name", ["tied", "experts", "tied-4", "replicas"])
def test_a_job_gets_to_its_end(runs, name):
    check(runs[name])
    check(runs[name], one_queue=True)


def test_the_records_hold_the_whole_job(runs):
    """A message that one rank has not sent is missed, so the check looks at something."""
    for name, logs in runs.items():
        assert sum(isinstance(event, Mark) for event in logs[0]) > 64, name
        with pytest.raises(OrderError):
            check([logs[0][:-len(logs[0]) // 3], *logs[1:]])
