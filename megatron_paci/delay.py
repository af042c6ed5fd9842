"""What is known of delayed gradients: how much delay is safe, and what to do about more. Pure."""

SAFE_DRIFT = 1
"""The largest bound on drift that is taken without a warning. What more costs: docs/convergence.md,
Accumulation."""

COMPARE = "python -m megatron_paci compare --short"
"""The command that tells what delay does to one's own training."""

REMEDY = (
    "accumulate more backward passes per update (a larger --paci-accum, with more microbatches per "
    "iteration if need be), start synchronously (--paci-accum-schedule sync:0,A:SAMPLES), or lower "
    "the learning rate"
)
"""What helps where delay costs too much."""
