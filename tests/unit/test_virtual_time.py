"""Virtual time goes into the real Megatron and out again; one process, one stage."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def one_rank():
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def functions() -> dict[tuple[str, str], object]:
    """Return every callable global of torch.distributed, Megatron and this project."""
    return {
        (module_name, name): value
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(("torch.distributed", "megatron"))
        for name, value in list(vars(module).items())
        if callable(value)
    }


class Optimizer:
    def step_with_ready_grads(self):
        return True

    def step(self):
        return self.step_with_ready_grads()


def test_install_measures_and_uninstall_restores_by_identity(one_rank):
    import megatron.training.training as training
    from megatron.core.pipeline_parallel import schedules

    import megatron_paci
    from megatron_paci.bench.costs import Costs
    from megatron_paci.bench.virtual_time import VirtualTime

    megatron_paci.install()
    measurement = VirtualTime(costs=Costs.parse(num_stages=1, step="1/2"))
    optimizer = Optimizer()
    original_train = training.train
    try:
        before = functions()
        measurement.install()
        assert training.train is not before["megatron.training.training", "train"]

        def loop(forward_step_func, model, optimizer, *args):
            return optimizer.step()

        assert measurement._train(loop, None, [None], optimizer) is True
        assert measurement.clock.loop.now == 0.5  # the step of this object was timed
        assert not vars(optimizer)
        assert schedules.forward_step is not before[schedules.__name__, "forward_step"]
        with pytest.raises(RuntimeError, match="0 iterations were trained"):
            measurement.result(warmup=0, iterations=1)
        measurement.uninstall()
        after = functions()
        assert all(after[key] is before[key] for key in before)
        assert after.keys() == before.keys()
    finally:
        megatron_paci.uninstall()
    assert training.train is not original_train
