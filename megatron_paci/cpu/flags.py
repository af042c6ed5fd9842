"""The command-line flags of Megatron-LM that a machine without a GPU needs.

Pure: no torch, no Megatron. Tried with Megatron-Core 0.18 and 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Need(NamedTuple):
    """A flag that a CPU needs.

    ``other`` is a flag that means the opposite: who gives it has chosen, and nothing is added.
    ``fixed`` tells that no other value can work, so a different one is refused.
    """

    flag: str
    value: str | None
    why: str
    other: str | None = None
    fixed: bool = False


class Refusal(NamedTuple):
    """A user's choice that cannot work: the flag at all, or one of some values of it."""

    flag: str
    why: str
    remedy: str
    values: tuple[str, ...] = ()


NEEDS = (
    Need("--distributed-backend", "gloo", "NCCL moves data between GPUs only", fixed=True),
    Need("--transformer-impl", "local", "Transformer Engine has CUDA kernels only", fixed=True),
    Need("--no-persist-layer-norm", None, "a CUDA kernel", "--persist-layer-norm"),
    Need(
        "--no-gradient-accumulation-fusion",
        None,
        "a CUDA kernel",
        "--gradient-accumulation-fusion",
    ),
    Need("--no-masked-softmax-fusion", None, "a CUDA kernel", "--masked-softmax-fusion"),
    Need("--no-bias-gelu-fusion", None, "compiled for a GPU", "--bias-gelu-fusion"),
    Need("--no-bias-swiglu-fusion", None, "compiled for a GPU", "--bias-swiglu-fusion"),
    Need("--no-bias-dropout-fusion", None, "compiled for a GPU", "--bias-dropout-fusion"),
    Need("--no-rope-fusion", None, "a CUDA kernel", "--rope-fusion"),
    Need("--use-cpu-initialization", None, "weights are drawn where they live"),
    Need(
        "--no-create-attention-mask-in-dataloader",
        None,
        "the local attention makes its own causal mask, once and not per microbatch",
        "--create-attention-mask-in-dataloader",
    ),
    Need("--num-workers", "0", "the ranks need the cores that loader processes would take"),
)

_WITHOUT_TE = "needs Transformer Engine, which has CUDA kernels only"
_GRAPHS = "CUDA graphs need a GPU"
_DRIVER = "asks the GPU's driver"

REFUSALS = (
    Refusal("--fp8-format", _WITHOUT_TE, "leave it out; --bf16 and --fp16 work"),
    Refusal("--fp4-format", _WITHOUT_TE, "leave it out; --bf16 and --fp16 work"),
    Refusal("--tp-comm-overlap", _WITHOUT_TE, "leave it out"),
    Refusal("--te-rng-tracker", _WITHOUT_TE, "leave it out"),
    Refusal("--moe-permute-fusion", _WITHOUT_TE, "leave it out"),
    Refusal("--moe-router-fusion", _WITHOUT_TE, "leave it out"),
    Refusal("--moe-grouped-gemm", _WITHOUT_TE, "leave it out"),
    Refusal("--use-transformer-engine-op-fuser", _WITHOUT_TE, "leave it out"),
    Refusal("--cross-entropy-fusion-impl", _WITHOUT_TE, "choose native", ("te",)),
    Refusal("--attention-backend", _WITHOUT_TE, "choose unfused", ("flash", "fused")),
    Refusal("--use-flash-attn", "the kernel is a CUDA one", "leave it out"),
    Refusal(
        "--moe-token-dispatcher-type",
        "DeepEP and its like are CUDA libraries",
        "choose allgather or alltoall",
        ("flex",),
    ),
    Refusal("--moe-enable-deepep", "DeepEP is a CUDA library", "leave it out"),
    Refusal("--use-nccl-ub", "there is no NCCL", "leave it out"),
    Refusal("--use-sharp", "there is no NCCL", "leave it out"),
    Refusal("--use-megatron-fsdp", "its buffers live in GPU memory", "--use-distributed-optimizer"),
    Refusal("--use-torch-fsdp2", "it builds a mesh of GPUs", "--use-distributed-optimizer"),
    Refusal(
        "--cuda-graph-impl",
        _GRAPHS,
        "choose none, or leave it out",
        ("local", "transformer_engine", "full_iteration"),
    ),
    Refusal("--enable-cuda-graph", _GRAPHS, "leave it out"),
    Refusal("--external-cuda-graph", _GRAPHS, "leave it out"),
    Refusal("--optimizer-cuda-graph", _GRAPHS, "leave it out"),
    Refusal("--fine-grained-activation-offloading", "nothing is on a GPU", "leave it out"),
    Refusal("--optimizer-cpu-offload", "nothing is on a GPU", "leave it out"),
    Refusal("--log-straggler", _DRIVER, "leave it out"),
    Refusal("--record-memory-history", _DRIVER, "leave it out"),
    Refusal(
        "--yaml-cfg",
        "the file replaces the command line, so the flags for the CPU would not be seen",
        "give the options as flags",
    ),
)


def cpu_flags(argv: list[str]) -> list[str]:
    """The flags to append to a training script's arguments.

    Args:
        argv: the user's arguments, without the script's own name. Both ``--flag value`` and
            ``--flag=value`` are understood; of a repeated flag the last counts, as for the script.

    Returns:
        What a CPU needs and the user did not give.

    Raises:
        ValueError: the user chose something that needs a GPU; it lists all such choices, each with
            the reason and the remedy.
    """
    given = _given(argv)
    contradictions = []
    flags: list[str] = []
    for need in NEEDS:
        if need.other in given or (need.value is None and need.flag in given):
            continue
        if need.flag not in given:
            flags += [need.flag] if need.value is None else [need.flag, need.value]
        elif need.fixed and given[need.flag] != need.value:
            chosen = f"{need.flag} {given[need.flag]}"
            contradictions.append(f"{chosen}: {need.why}; choose {need.value}, or leave it out")
    for refusal in REFUSALS:
        if refusal.flag not in given:
            continue
        value = given[refusal.flag]
        if not refusal.values:
            contradictions.append(f"{refusal.flag}: {refusal.why}; {refusal.remedy}")
        elif value in refusal.values:
            contradictions.append(f"{refusal.flag} {value}: {refusal.why}; {refusal.remedy}")
    if "--profile" in given and "--use-pytorch-profiler" not in given:
        contradictions.append(f"--profile: {_DRIVER}; add --use-pytorch-profiler, or leave it out")
    if contradictions:
        raise ValueError(
            "These options cannot work on the CPU:\n" + "\n".join(f"  {c}" for c in contradictions)
        )
    return flags


def cpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to set in every rank before torch is imported.

    Args:
        environ: the environment as it is.

    Returns:
        The variables to set. One torch thread per rank, since ranks share the cores, and the one
        connection that Megatron insists on with tensor parallelism; both only if the user has not
        set them. A GPU that is there is hidden.
    """
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    wanted = {name: value for name, value in defaults.items() if name not in environ}
    return wanted | {"CUDA_VISIBLE_DEVICES": ""}


def _given(argv: list[str]) -> dict[str, str | None]:
    """The flags in ``argv``, each with its (first) value if it has one."""
    given: dict[str, str | None] = {}
    for index, argument in enumerate(argv):
        if not argument.startswith("--"):
            continue
        flag, equals, value = argument.partition("=")
        if not equals:
            following = argv[index + 1] if index + 1 < len(argv) else "--"
            given[flag] = None if following.startswith("--") else following
        else:
            given[flag] = value
    return given
