"""megatron_paci.cpu.flags: what is added for the CPU, what is left to the user, what is refused."""

import subprocess
import sys

import pytest

from megatron_paci.cpu.flags import NEEDS, REFUSALS, cpu_environment, cpu_flags


def test_adds_everything_a_cpu_needs():
    assert cpu_flags([]) == (
        "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
        "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
        "--use-cpu-initialization --no-create-attention-mask-in-dataloader --num-workers 0"
    ).split()


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.flag)
def test_adds_nothing_that_was_given(need):
    value = need.value or ""
    for given in ([need.flag, value], [f"{need.flag}={value}"]):
        given = given if need.value else [need.flag]
        assert need.flag not in cpu_flags(given)
        assert len(cpu_flags(given)) == len(cpu_flags([])) - (2 if need.value else 1)


def test_leaves_a_harmless_choice_to_the_user():
    assert "--num-workers" not in cpu_flags(["--num-workers", "2"])
    assert "--num-workers" not in cpu_flags(["--num-workers=2"])
    assert "--no-rope-fusion" not in cpu_flags(["--rope-fusion"])
    mask = "--create-attention-mask-in-dataloader"
    assert "--no-create-attention-mask-in-dataloader" not in cpu_flags([mask])


def test_a_value_is_not_a_flag_and_a_negative_number_is_a_value():
    assert "--num-workers" in cpu_flags(["--data-path", "num-workers"])
    assert "--no-rope-fusion" in cpu_flags(["--seed", "-1", "--lr", "1e-3"])


def test_of_a_repeated_flag_the_last_counts():
    cpu_flags(["--distributed-backend", "nccl", "--distributed-backend=gloo"])
    with pytest.raises(ValueError, match="--distributed-backend nccl"):
        cpu_flags(["--distributed-backend=gloo", "--distributed-backend", "nccl"])


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_refuses_each_with_reason_and_remedy(refusal):
    for value in refusal.values or (None,):
        with pytest.raises(ValueError) as error:
            cpu_flags([refusal.flag] if value is None else [f"{refusal.flag}={value}"])
        for part in (refusal.flag, value or "", refusal.why, refusal.remedy):
            assert part in str(error.value)


def test_lists_all_contradictions_at_once():
    argv = "--distributed-backend=nccl --transformer-impl transformer_engine --fp8-format hybrid"
    with pytest.raises(ValueError) as error:
        cpu_flags(argv.split())
    lines = str(error.value).splitlines()
    assert len(lines) == 1 + 3
    assert "choose gloo" in str(error.value) and "choose local" in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        "--attention-backend unfused",
        "--moe-token-dispatcher-type alltoall",
        "--cuda-graph-impl none",
        "--cross-entropy-fusion-impl native",
        "--profile --use-pytorch-profiler",
        "--bf16 --sequence-parallel --use-distributed-optimizer",
    ],
)
def test_accepts_what_works(argv):
    assert cpu_flags(argv.split())


def test_profile_needs_the_profiler_of_torch():
    with pytest.raises(ValueError, match="--use-pytorch-profiler"):
        cpu_flags(["--profile"])


def test_environment_leaves_what_the_user_set():
    assert cpu_environment({}) == {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert "OMP_NUM_THREADS" not in cpu_environment({"OMP_NUM_THREADS": "4"})
    # The CPU was asked for: a GPU in the user's environment is hidden all the same.
    assert cpu_environment({"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""


def test_importing_the_package_imports_neither_torch_nor_megatron():
    code = (
        "import sys, megatron_paci.cpu as cpu; cpu.CpuDevice(); cpu.cpu_flags([])\n"
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
