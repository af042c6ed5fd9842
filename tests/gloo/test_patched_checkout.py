"""The source diffs of patches/ on a copy of the Megatron-LM checkout that MEGATRON_LM names.

    MEGATRON_LM=<checkout> make test ARGS=tests/gloo/test_patched_checkout.py

``torchrun pretrain_gpt.py`` is what runs, on CPUs: a ``sitecustomize.py`` installs the CPU device,
and nothing else, before the script starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_paci.cpu import cpu_flags
from tests.gloo.launch import flags
from tests.gloo.probes import digest
from tests.gloo.torchrun import ROOT, torchrun

CHECKOUT = os.environ.get("MEGATRON_LM", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no Megatron-LM checkout")

CPU_DEVICE = """\
import os

if "RANK" in os.environ:
    from megatron_paci.cpu import CpuDevice, cpu_environment

    os.environ.update(cpu_environment(os.environ))
    CpuDevice().install()
"""
SHORT = "--train-iters 3 --global-batch-size 8 --ckpt-format torch --save-interval 1000"
PACI = "--pipeline-schedule paci --paci-accum 2"
HELPER = Path("megatron/core/datasets/helpers_cpp" + sysconfig.get_config_var("EXT_SUFFIX"))


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what a run needs of the checkout, with the built data-index helper of the wheel."""
    copy = tmp_path / "Megatron-LM"
    shutil.copytree(Path(CHECKOUT, "megatron"), copy / "megatron",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for path in Path(CHECKOUT).glob("*.py"):
        shutil.copy(path, copy)
    if not (copy / HELPER).exists():
        shutil.copy(Path(sysconfig.get_path("purelib"), HELPER), copy / HELPER)
    if patch(copy, "--check").returncode:
        pytest.skip("there is no diff for this version of Megatron-LM")
    return copy


def patch(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "patches/apply.py", checkout, *arguments],
                          capture_output=True, text=True)


def contents(checkout: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}


class Runs:
    """Training runs of ``pretrain_gpt.py``; each returns what it logged, recorded and saved."""

    def __init__(self, checkout: Path, folder: Path):
        self.script = str(checkout / "pretrain_gpt.py")
        self.folder = folder
        (folder / "sitecustomize.py").write_text(CPU_DEVICE)

    def __call__(self, name: str, extra: str = "", launcher: str = "") -> tuple:
        own = self.folder / name
        arguments = flags(2, f"{SHORT} --save {own / 'saved'} {extra}")
        if extra:
            arguments += ["--paci-record", str(own / "record")]
        output = torchrun(
            2, *launcher.split(), self.script, *arguments, *cpu_flags(arguments),
            python_path=(self.folder,),
            PYTHONPYCACHEPREFIX=str(self.folder / "bytecode"),
            MAKEFLAGS="-n",  # Megatron without hooks would build the helper that is there
        )
        logged = re.findall(r"iteration +\d+/.* lm loss: (\S+) .*grad norm: (\S+)", output)
        assert len(logged) == 3, output[-4000:]
        recorded = [json.loads((own / f"record/rank{rank}.json").read_text())
                    for rank in range(2)] if extra else []
        return logged, [each["losses"] for each in recorded], saved(own / "saved"), [
            each["paci"] and each["paci"]["drift_max"] for each in recorded]


def saved(folder: Path) -> list[str]:
    """Return the hash of the weights and the optimizer state of every stage's checkpoint."""
    import torch

    files = sorted(folder.glob("iter_0000003/*/model_optim_rng.pt"))
    assert len(files) == 2
    states = [torch.load(file, weights_only=False) for file in files]
    return [digest(tensors([state["model"], state["optimizer"]])) for state in states]


def tensors(value):
    """Yield the tensors and numbers in nested lists and dictionaries, as tensors."""
    import torch

    if isinstance(value, dict):
        value = [each for _, each in sorted(value.items(), key=lambda item: str(item[0]))]
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, (torch.Tensor, float, int)):
        yield torch.as_tensor(value)


def test_a_patched_checkout_trains_as_one_hooked_at_run_time(checkout, tmp_path):
    before = contents(checkout)
    run = Runs(checkout, tmp_path)
    stock = run("stock")

    assert patch(checkout).returncode == 0
    assert run("auto", "--pipeline-schedule auto")[::2] == stock[::2]
    plain = run("plain", PACI)
    assert plain[3] == [1, 0] and plain[2] != stock[2]  # it did run PACI
    assert run("both", PACI, "-m megatron_paci run") == plain

    assert patch(checkout, "--revert").returncode == 0
    assert contents(checkout) == before
    assert run("run_time", PACI, "-m megatron_paci run") == plain
