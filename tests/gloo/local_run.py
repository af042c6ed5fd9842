"""Trains with megatron_paci.convergence where Megatron's ``train`` would: to compare the two."""

from __future__ import annotations

import io
import itertools


def train_local_pipeline(
    seen: dict, train_args: tuple, *, num_stages: int, initial: str, phases: list,
    clip: str = "pipelined", stop: dict | None = None, **variant,
):
    """Train all iterations with all stages in this process; stands in for Megatron's ``train``.

    Args:
        seen: Receives ``losses`` per iteration and, per stage, ``weights`` and ``optimizer``.
        initial: File stem of the weights to begin with, those of a distributed run: on a CPU
            Megatron warms up functions with random numbers before it draws the weights.
        phases: [iterations, accumulation] one after another; accumulation 0 for 1F1B.
        clip: As for ``LocalPipeline``.
        stop: After ``iteration`` drain; with ``anew`` build everything again and load its state.
        variant: Fields of ``Variant``.
    """
    import torch
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    from megatron_paci.convergence.pipeline import LocalPipeline
    from megatron_paci.convergence.stage import Variant
    from tests.gloo.probes import digest, optimizer_tensors

    forward_step_func, data_iterator = train_args[0], train_args[4]
    iterators = itertools.tee(iter(lambda: next(data_iterator), None), num_stages)
    microbatches = get_num_microbatches()

    def build():
        return LocalPipeline(
            num_stages, accumulation=microbatches, clip=clip, variant=Variant(**variant)
        )

    def enter(accumulation: int) -> None:
        pipeline.joint = not accumulation
        pipeline.set_accumulation(accumulation or microbatches)

    pipeline, losses, iteration = build(), [], 0
    if (first := pipeline.stages[0].tied_weight) is not None:
        assert torch.equal(first, pipeline.stages[-1].tied_weight)
    for index, stage in enumerate(pipeline.stages):
        weights = torch.load(f"{initial}.rank{index}.pt", weights_only=False)
        stage.model.module.load_state_dict(weights)
    for iterations, accumulation in phases:
        losses += pipeline.drain()
        enter(accumulation)
        for _ in range(iterations):
            losses += pipeline.run(forward_step_func, iterators, microbatches)
            iteration += 1
            if not accumulation:
                losses += pipeline.drain()
            if stop and iteration == stop["iteration"]:
                losses += pipeline.drain()
                if stop["anew"]:
                    state = io.BytesIO()
                    torch.save(pipeline.state_dict(), state)
                    state.seek(0)
                    pipeline = build()
                    pipeline.load_state_dict(torch.load(state, weights_only=False))
                    enter(accumulation)
    losses += pipeline.drain()
    for start in range(0, len(losses), microbatches):
        total = torch.stack([entry["lm loss"] for entry in losses[start:start + microbatches]])
        total = total.sum(dim=0)
        seen["losses"].append({"lm loss": float(total[0] / total[1])})
    seen["weights"] = [digest(stage.model.parameters()) for stage in pipeline.stages]
    seen["optimizer"] = [digest(optimizer_tensors(stage.optimizer)) for stage in pipeline.stages]
    seen["skipped"] = [stage.window.skipped for stage in pipeline.stages]
    return get_args().train_iters, 0
