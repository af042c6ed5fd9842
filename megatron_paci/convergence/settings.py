"""What a run of an experiment is: one frozen value that determines every number of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_paci.accumulation import parse_phases, value_at

OPTIMIZERS = ("adam", "nadam", "muon", "sgd")
NORMS = ("pipelined", "local", "global")
CLIP_RULES = ("none", *NORMS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. All stages are equal but for the embedding and the output layer."""

    stages: int = 8
    """Pipeline size N."""

    schedule: str = "sync"
    """As ``--paci-accum-schedule``: ``sync`` is 1F1B, a number is PACI's accumulation."""

    batch: int = 32
    """Sequences per iteration."""

    microbatch: int = 2
    """Sequences per microbatch; an iteration has ``batch / microbatch`` of them."""

    iterations: int = 360
    layers: int = 8
    hidden: int = 104
    heads: int = 4
    sequence: int = 96
    """Tokens, which are bytes, per sequence."""

    tied: bool = False
    """Whether the output layer uses the weights of the embedding."""

    optimizer: str = "adam"
    """``adam`` is AdamW; ``nadam`` AdamW with Nesterov momentum; ``muon`` Megatron's."""

    lr: float = 1e-3
    warmup: int = 18
    """Iterations of linear warm-up; then a cosine down to a tenth."""

    weight_decay: float = 0.1
    beta1: float = 0.9
    """Momentum, of every optimizer."""

    beta2: float = 0.95
    clip: str = "none"
    """What norm the gradients are clipped by: ``pipelined`` and ``local`` as ``--paci-clip``,
    ``global`` the true one of the window, which only this process can know. 1F1B always takes the
    true one, as Megatron does."""

    clip_grad: float = 1.0
    """Largest norm, where there is clipping."""

    stash: bool = False
    """Whether backwards take the weights of their forward (weight stashing) and not eq. 1."""

    recompute: bool = False
    """Whether activations are computed again in the backward, with the weights of then."""

    rate_iterations: int = 0
    """PipeMare's rule divides a stage's learning rate by its delay, fading over so many
    iterations; 0 for not at all."""

    seed: int = 1
    """Of the weights and of the order of the samples."""

    validations: int = 10
    """How often validation loss is measured; before each the pipeline is drained, as Megatron's
    loop with PACI does."""

    validation_batches: int = 8
    """Iterations' worth of sequences that each takes; the same for all runs."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: The message says what is wrong and what would do.
        """
        counts = ("stages", "batch", "microbatch", "iterations", "layers", "hidden", "heads",
                  "sequence", "validations", "validation_batches", "seed")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give at least 1")
        for divisor, number in (("microbatch", "batch"), ("stages", "layers"),
                                ("heads", "hidden"), ("validations", "iterations")):
            if getattr(self, number) % getattr(self, divisor):
                raise ValueError(
                    f"{divisor} {getattr(self, divisor)} does not divide {number} "
                    f"{getattr(self, number)}"
                )
        for name, allowed in (("optimizer", OPTIMIZERS), ("clip", CLIP_RULES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(allowed)}")
        if not self.lr > 0 or (self.clip != "none" and not self.clip_grad > 0):
            raise ValueError("a learning rate and a norm to clip at are larger than 0")
        if not 0 <= self.warmup < self.iterations or self.rate_iterations < 0:
            raise ValueError("give warm-up shorter than the run, and no negative iterations")
        for first, accumulation in self.phases.items():
            if self.num_microbatches % (accumulation or self.num_microbatches):
                raise ValueError(
                    f"schedule {self.schedule}: accumulation {accumulation} does not divide the "
                    f"{self.num_microbatches} microbatches of an iteration"
                )
            if first % self.batch:
                raise ValueError(
                    f"schedule {self.schedule}: sample {first} is not at the end of an iteration "
                    f"of {self.batch}"
                )

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration."""
        return self.batch // self.microbatch

    @property
    def phases(self) -> Mapping[int, int]:
        """The schedule's accumulations by the sample from which on they hold."""
        return parse_phases(self.schedule)

    def accumulation_at(self, iteration: int) -> int:
        """Return the accumulation of an iteration, counted from 0; ``SYNC`` for 1F1B."""
        return value_at(self.phases, iteration * self.batch)

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the default."""
        return {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != each.default
        }

    def key(self) -> str:
        """Return a name for files; runs that differ in a field have different ones.

        A field that is added later, with the default that changes nothing, leaves it as it is.
        """
        text = json.dumps(self.changed(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def megatron_flags(self) -> list[str]:
        """Return the flags for Megatron, but for what the stages of one process differ in.

        With ``--pipeline-model-parallel-size N --pipeline-schedule paci --paci-accum a`` they are
        those of the distributed run.
        """
        flags = {
            "num-layers": self.layers, "hidden-size": self.hidden,
            "num-attention-heads": self.heads, "seq-length": self.sequence,
            "max-position-embeddings": self.sequence, "position-embedding-type": "rope",
            "disable-bias-linear": None,
            "tokenizer-type": "NullTokenizer", "vocab-size": 255,
            "make-vocab-size-divisible-by": 64, "mock-data": None,
            "attention-dropout": 0, "hidden-dropout": 0, "micro-batch-size": self.microbatch,
            "global-batch-size": self.batch, "train-iters": self.iterations,
            "optimizer": {"nadam": "adam"}.get(self.optimizer, self.optimizer),
            "lr": self.lr, "min-lr": self.lr / 10, "lr-decay-style": "cosine",
            "lr-warmup-iters": self.warmup, "weight-decay": self.weight_decay,
            "adam-beta1": self.beta1, "adam-beta2": self.beta2, "sgd-momentum": self.beta1,
            "muon-momentum": self.beta1,
            "clip-grad": 0 if self.clip == "none" else self.clip_grad, "seed": self.seed,
            "rerun-mode": "disabled", "eval-iters": 0, "log-interval": 1,
            # As the plugin has it: the window decides what becomes of such a gradient.
            "no-check-for-nan-in-loss-and-grad": None,
        }
        if not self.tied:
            flags["untie-embeddings-and-output-weights"] = None
        if self.optimizer == "muon":
            flags["muon-nesterov"] = None
        if self.recompute:
            flags |= {"recompute-granularity": "full", "recompute-method": "uniform",
                      "recompute-num-layers": 1}
        return [
            text for name, value in flags.items()
            for text in ((f"--{name}",) if value is None else (f"--{name}", str(value)))
        ]
