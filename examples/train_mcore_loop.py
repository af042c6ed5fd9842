"""PACI in a training loop of one's own, on Megatron-Core alone (no megatron.training).

    torchrun --nproc-per-node 2 examples/train_mcore_loop.py            # on GPUs
    torchrun --nproc-per-node 2 examples/train_mcore_loop.py --cpu      # without any

One pipeline stage per process trains a tiny GPT to repeat a sequence. The five lines marked PACI
are all that differs from a loop around Megatron's own schedules: there is no optimizer step, since
every stage takes its own inside ``run``.
"""

from __future__ import annotations

import os
import sys
from functools import partial

CPU = "--cpu" in sys.argv
if CPU:
    from megatron_paci.cpu import CpuDevice

    CpuDevice().install()  # before anything imports Megatron

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_paci.build import MegatronStage  # noqa: E402

SEQUENCE, MICROBATCH, VOCABULARY = 16, 4, 32
MICROBATCHES, ITERATIONS = 4, 60


def batches():
    """Yield tokens and labels, (microbatch size, sequence): count up from a random start."""
    generator = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(VOCABULARY, (MICROBATCH, 1), generator=generator)
        text = (start + torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield text[:, :-1].cuda(), text[:, 1:].cuda()


def forward_step(data_iterator, model):
    """Run one microbatch; every stage reads the same data, as Megatron's stages do."""
    tokens, labels = next(data_iterator)
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    output = model(tokens, positions, None, labels=labels)
    return output, partial(mean_loss)


def mean_loss(losses):
    """Return the loss and what is logged of it."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().view(1)}


def build_model() -> DistributedDataParallel:
    """Build this process's stage."""
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, use_cpu_initialization=CPU,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32, persist_layer_norm=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads, deallocate_pipeline_outputs=True,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def main() -> None:
    """Train and print the loss."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo" if CPU else "nccl")
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)

    model = build_model()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), [model])
    data = batches()

    stage = MegatronStage(model, optimizer, None, accumulation=2)                       # PACI
    for iteration in range(ITERATIONS):
        losses = stage.run(forward_step, data, MICROBATCHES,                            # PACI
                           seq_length=SEQUENCE, micro_batch_size=MICROBATCH)
        if stage.is_last_stage and (iteration + 1) % 20 == 0:
            mean = sum(entry["loss"].item() for entry in losses) / len(losses)
            print(f"iteration {iteration + 1}: loss {mean:.3f}", flush=True)
    stage.drain()                                                                       # PACI
    stage.close()                                                                       # PACI
    stage.destroy_groups()                                                              # PACI
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
