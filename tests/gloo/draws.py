"""What the property test draws: combinations of flags that Megatron accepts and PACI supports."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache

from hypothesis import strategies as st

from megatron_paci.compatibility import violations
from tests.gloo.scenarios import variant_flags

ITERATIONS = 4
HIDDEN, SEQUENCE = 32, 16
BASE = (
    f"--hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQUENCE} "
    f"--max-position-embeddings {SEQUENCE} --mock-data --tokenizer-type NullTokenizer "
    f"--vocab-size 127 --log-interval 1 --train-iters {ITERATIONS} --lr 1e-2 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --rerun-mode disabled"
)
EVERY = "--eval-interval 1 --eval-iters 1"  # drains after every iteration
NEVER = "--eval-interval 1000 --eval-iters 1"

# Pipeline stages, data-parallel replicas, tensor-parallel and context-parallel ranks; those that
# matter most twice.
TOPOLOGIES = [
    (2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 2, 1), (2, 1, 1, 2),
    (3, 1, 1, 1), (3, 1, 1, 1), (4, 1, 1, 1), (4, 1, 1, 1), (1, 1, 1, 1), (1, 2, 2, 1),
]
MICROBATCHES = [4, 2, 6, 3, 5, 1]  # the first is the simplest draw: a stream that fills
# A small fp16 scale: sums over the tokens of a window must not overflow, as stock would stop then.
PRECISION = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --loss-scale 8",
    "fp16-dynamic": "--fp16 --initial-loss-scale 8 --loss-scale-window 2",
}
CLIP = {"off": "--clip-grad 0", "pipelined": "--clip-grad 0.3", "local": "--clip-grad 0.3"}
RECOMPUTE = {
    "none": "",
    "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}
REDUCTION = {
    "plain": "",
    "overlap": "--overlap-grad-reduce",
    "sharded": "--use-distributed-optimizer",
    "sharded-overlap": "--use-distributed-optimizer --overlap-grad-reduce",
    "sharded-overlaps": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
MODEL = {
    "gpt": "",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-1 --disable-bias-linear",
    "expert-bias": "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type none --disable-bias-linear",
    "mtp": "--mtp-num-layers 1 --position-embedding-type rope",
}
ARCHITECTURE = {
    "rope": "--position-embedding-type rope",
    "swiglu": "--swiglu --disable-bias-linear",
    "gqa": "--group-query-attention --num-query-groups 2",
    "rmsnorm": "--normalization RMSNorm",
}
LAYERS = ("one", "two", "more-first", "more-last", "layout")


@dataclass(frozen=True)
class Setup:
    """One draw."""

    stages: int = 2
    replicas: int = 1
    tensor: int = 1
    context: int = 1
    microbatches: int = 4
    accumulation: int = 2
    extra_in_flight: int = 0
    defer_step: bool = False
    micro_batch_size: int = 1
    precision: str = "fp32"
    tied: bool = False
    clip: str = "off"
    per_token: bool = False
    recompute: str = "none"
    dropout: float = 0.0
    optimizer: str = "adam"
    reduction: str = "plain"
    sequence_parallel: bool = False
    model: str = "gpt"
    layers: str = "one"
    architecture: tuple[str, ...] = ()
    seed: int = 1

    @property
    def world_size(self) -> int:
        return self.stages * self.ranks_of_a_stage

    @property
    def ranks_of_a_stage(self) -> int:
        return self.replicas * self.tensor * self.context

    def stage_of(self, rank: int) -> int:
        """Return the stage of a global rank: they are numbered stage by stage."""
        return rank // self.ranks_of_a_stage

    def common(self) -> str:
        """Return the flags that all four runs share."""
        batch = self.microbatches * self.micro_batch_size * self.replicas
        parts = [
            BASE,
            f"--pipeline-model-parallel-size {self.stages}",
            f"--tensor-model-parallel-size {self.tensor}",
            f"--context-parallel-size {self.context}",
            f"--micro-batch-size {self.micro_batch_size} --global-batch-size {batch}",
            f"--attention-dropout {self.dropout} --hidden-dropout {self.dropout}",
            f"--optimizer {self.optimizer} --seed {self.seed}",
            MODEL[self.model], PRECISION[self.precision], RECOMPUTE[self.recompute],
            REDUCTION[self.reduction], self._layers(),
            *(ARCHITECTURE[name] for name in self.architecture),
        ]
        if not self.tied:
            parts.append("--untie-embeddings-and-output-weights")
        if self.per_token:
            parts.append("--calculate-per-token-loss")
        if self.model.startswith("expert") and self.replicas > 1:
            parts.append(f"--expert-model-parallel-size {self.replicas}")
        if self.sequence_parallel:
            parts.append("--sequence-parallel")
        return " ".join(parts)

    def _layers(self) -> str:
        n = self.stages
        return {
            "one": f"--num-layers {n}",
            "two": f"--num-layers {2 * n}",
            "more-first": f"--num-layers {n + 1} --decoder-first-pipeline-num-layers 2",
            "more-last": f"--num-layers {n + 1} --decoder-last-pipeline-num-layers 2",
            "layout": f"--num-layers {n + 1} --pipeline-model-parallel-layout "
                      f"Et|{'t|' * (n - 2)}tt{'m' * (self.model == 'mtp')}L",
        }[self.layers]

    def drained(self) -> list[str]:
        # With one stage the norm is Megatron's own; else it lags behind.
        clip = CLIP[self.clip] if self.stages == 1 else CLIP["off"]
        return f"{self.common()} {EVERY} {clip}".split()

    def stream(self) -> list[str]:
        local = "--paci-clip local" if self.clip == "local" else ""
        variant = variant_flags(self.extra_in_flight, self.defer_step)
        paci = f"--pipeline-schedule paci --paci-accum {self.accumulation} {variant}"
        return f"{self.common()} {NEVER} {CLIP[self.clip]} {paci} {local}".split()

    def runs(self) -> dict[str, dict]:
        """Return the scenarios of the four trainings."""
        return {
            "stock": {"arguments": self.drained(), "plugin": False},
            "drained": {"arguments": [
                *self.drained(), "--pipeline-schedule", "paci",
                *variant_flags(self.extra_in_flight, self.defer_step).split(),
            ]},
            "stream": {"arguments": self.stream(), "collectives": True},
            "again": {"arguments": self.stream(), "sleep_ms": 5},
        }


@cache
def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_paci.arguments import add_paci_arguments

    return add_paci_arguments(add_megatron_arguments(argparse.ArgumentParser()))


def supported(setup: Setup) -> bool:
    """Whether the plugin lets the flags of a draw through."""
    args = parser().parse_args(setup.stream())
    args.rank, args.world_size = 0, setup.world_size
    return not violations(args)


@st.composite
def setups(draw) -> Setup:
    """Draw what Megatron itself accepts."""
    stages, replicas, tensor, context = draw(st.sampled_from(TOPOLOGIES))
    model = draw(st.sampled_from(["gpt", *MODEL]))
    has_experts = model.startswith("expert")
    microbatches = draw(st.sampled_from(MICROBATCHES))
    divisors = [a for a in range(1, microbatches + 1) if microbatches % a == 0]
    optimizer = draw(st.sampled_from(["adam", "sgd"]))
    # Megatron shards the state of Adam only.
    several = replicas * context > 1
    reductions = list(REDUCTION)[: 5 if optimizer == "adam" else 2] if several else ["plain"]
    return Setup(
        stages=stages,
        replicas=replicas,
        tensor=tensor,
        context=context,
        microbatches=microbatches,
        accumulation=draw(st.sampled_from(divisors)),
        extra_in_flight=draw(st.sampled_from([0, 0, 1, 2])),
        defer_step=draw(st.booleans()),
        micro_batch_size=draw(st.integers(1, 2)),
        precision=draw(st.sampled_from(list(PRECISION))),
        tied=draw(st.booleans()),
        clip=draw(st.sampled_from(list(CLIP))),
        per_token=draw(st.booleans()),
        recompute=draw(st.sampled_from(list(RECOMPUTE))),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        optimizer=optimizer,
        reduction=draw(st.sampled_from(reductions)),
        # Megatron splits experts over tensor-parallel ranks only with sequence parallelism.
        sequence_parallel=tensor > 1 and (has_experts or draw(st.booleans())),
        model=model,
        layers=draw(st.sampled_from(LAYERS if stages > 1 else LAYERS[:2])),
        architecture=tuple(sorted(draw(st.sets(st.sampled_from(list(ARCHITECTURE)))))),
        seed=draw(st.integers(1, 1000)),
    )
