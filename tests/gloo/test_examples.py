"""The examples, as a user starts them: the very same scripts, small and on the CPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading

import pytest
import torch

from tests.example_scripts import EXAMPLES, environment, run_script, stand_in_slurm, started_with
from tests.gloo.example_corpus import write_corpus
from tests.gloo.launch import launch
from tests.gloo.torchrun import torchrun

FACTOR = float(os.environ.get("TEST_TIME_FACTOR", "1"))
CHECKOUT = os.environ.get("MEGATRON_LM", "")
TINY = {
    "NPROC": 2, "NUM_LAYERS": 2, "HIDDEN": 32, "HEADS": 2, "SEQ_LENGTH": 32, "MICRO_BATCH": 1,
    "GLOBAL_BATCH": 8, "TRAIN_ITERS": 4, "EVAL_ITERS": 1, "LOG_INTERVAL": 1, "SPLIT": "80,20,0",
}
LLAMA = TINY | {
    "DEVICE": "cpu", "FFN_HIDDEN": 64, "QUERY_GROUPS": 2, "TP": 1, "PP": 2, "WARMUP_ITERS": 1,
    "CHECKPOINT_FORMAT": "torch",
}
NODE = EXAMPLES / "llama_slurm_node.sh"
ENDLESS = 100_000
OPEN_END = {"TRAIN_ITERS": ENDLESS, "EVAL_INTERVAL": ENDLESS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return {"DATA": folder / "text_document", "TOKENIZER_MODEL": folder / "tokenizer"}


@pytest.fixture(scope="module")
def job(folder, data):
    """A job on two nodes that gets Slurm's signal after three iterations.

    Its status, its output, and the iteration that it has saved.
    """
    commands = folder / "slurm"
    variables = LLAMA | data | OPEN_END | stand_in_slurm(commands, nodes=2) | {
        "NPROC": 1, "CHECKPOINTS": folder / "llama", "SAVE_INTERVAL": ENDLESS,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": 20,
    }
    process = subprocess.Popen(
        ["bash", str(EXAMPLES / "llama_slurm.sbatch")], env=environment(commands, variables),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    # torchrun takes its ranks along, which are in sessions of their own.
    limit = threading.Timer(120 * FACTOR, os.killpg, (process.pid, signal.SIGTERM))
    limit.start()
    output = ""
    try:
        for line in process.stdout:
            output += line
            if re.search(r"iteration +3/", line):
                process.send_signal(signal.SIGTERM)  # to the batch script alone, like "B:"
        status = process.wait()
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    tracker = folder / "llama/latest_checkpointed_iteration.txt"
    return status, output, int(tracker.read_text()) if tracker.exists() else 0


@pytest.fixture(scope="module")
def runs(folder, data, job):
    """Trainings of the arguments that the scripts give to torchrun, by name."""
    commands = folder / "commands"
    shutil.copy(EXAMPLES / "migrate/pretrain_1f1b.sh", folder / "pretrain_1f1b.sh")
    subprocess.run(["git", "apply", "-p0", str(EXAMPLES / "migrate/paci.diff")], cwd=folder,
                   check=True)
    script = EXAMPLES / "pretrain_gpt.py"
    # An evaluation after every iteration drains PACI: it has to do what 1F1B does.
    gpt2 = TINY | data | {
        "DEVICE": "cpu", "EVAL_INTERVAL": 1, "SAVE_INTERVAL": ENDLESS, "CHECKPOINT_FORMAT": "torch",
    }
    own = TINY | data | {"SCRIPT": script}
    started = {
        f"gpt2 {schedule}": started_with(
            EXAMPLES / "gpt2_medium.sh", commands=commands, SCHEDULE=schedule,
            CHECKPOINTS=folder / schedule, **gpt2)
        for schedule in ("1f1b", "paci")
    } | {
        f"own {schedule}": started_with(
            path, "--lr", "1e-2", "--ckpt-format", "torch", commands=commands,
            SAVE=folder / f"own {schedule}", **own)
        for schedule, path in (("1f1b", EXAMPLES / "migrate/pretrain_1f1b.sh"),
                               ("paci", folder / "pretrain_1f1b.sh"))
    } | {
        # As the job put back into the queue, and as one that saves there and is not stopped.
        f"llama {name}": started_with(
            NODE, "--exit-interval", str(job[2] + 2), commands=commands, SLURM_NNODES=2,
            SAVE_INTERVAL=job[2], CHECKPOINTS=saved, **LLAMA | data | OPEN_END | {"NPROC": 1})
        for name, saved in (("resumed", folder / "llama"), ("not stopped", folder / "not stopped"))
    } | {
        "llama tensor": started_with(NODE, commands=commands, **LLAMA | data | {
            "SLURM_NNODES": 1, "TP": 2, "PP": 1, "CHECKPOINTS": folder / "tensor"}),
    }
    scenarios = {
        name: {
            "arguments": arguments[arguments.index(str(script)) + 1:], "script": str(script),
            "plugin": "megatron_paci" in arguments,
        }
        for name, arguments in started.items()
    }
    return launch(2, scenarios, folder, seconds=240)


def losses_in(output: str) -> dict[int, str]:
    """Return the losses in Megatron's log by iteration, without the second one.

    That is the mean of the first two: Megatron does not start a new sum after its first line.
    """
    losses = re.findall(r"iteration +(\d+)/.* lm loss: (\S+)", output)
    return {int(number): loss for number, loss in losses if number != "2"}


def test_a_loop_of_ones_own_on_megatron_core_alone():
    output = torchrun(2, str(EXAMPLES / "train_mcore_loop.py"), "--cpu")
    losses = [float(loss) for loss in re.findall(r"iteration \d+: loss (\S+)", output)]
    assert len(losses) == 3 and losses[-1] < 0.1 < losses[0]


def test_gpt2_medium_trains_and_evaluates(folder, data, runs):
    ended = run_script(
        EXAMPLES / "gpt2_medium.sh", commands=folder / "none", seconds=120 * FACTOR, DEVICE="cpu",
        CHECKPOINTS=folder / "started", CHECKPOINT_FORMAT="torch", **TINY | data)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    losses = losses_in(ended.stdout)
    stock = [f"{entry['lm loss']:.6E}" for entry in runs["gpt2 1f1b"][1]["losses"]]
    assert len(stock) == 4 and list(losses) == [1, 3, 4]
    assert losses[1] == stock[0]  # nothing is old yet
    assert (losses[3], losses[4]) != (stock[2], stock[3])
    assert "validation loss at iteration 4" in ended.stdout
    assert (folder / "started/latest_checkpointed_iteration.txt").read_text() == "4"


def test_gpt2_medium_under_1f1b_is_the_same_training(runs):
    for paci, stock in zip(runs["gpt2 paci"], runs["gpt2 1f1b"], strict=True):
        assert (paci["losses"], paci["evaluations"]) == (stock["losses"], stock["evaluations"])
        assert (paci["weights"], paci["optimizer"]) == (stock["weights"], stock["optimizer"])
        assert len(paci["evaluations"]) >= 4
    assert "STEP" in runs["gpt2 paci"][0]["actions"]


def test_two_lines_turn_a_script_of_ones_own_to_paci(runs):
    before, after = runs["own 1f1b"][1], runs["own paci"][1]
    assert before["actions"] == []
    assert after["losses"][0] == before["losses"][0]  # nothing is old yet
    assert after["losses"][1:] != before["losses"][1:]
    first = runs["own paci"][0]["statistics"]
    assert (first["updates"], first["drift_max"]) == (4, 1)


def test_slurms_signal_saves_and_puts_the_job_back_into_the_queue(folder, job):
    status, output, saved = job
    assert status == 0, output[-4000:]
    iterations = [int(number) for number in re.findall(r"iteration +(\d+)/", output)]
    assert iterations == list(range(1, saved + 1)) and 3 <= saved < ENDLESS
    assert (folder / "slurm/requeued").read_text() == "4711\n"
    assert "the step ended with status 0" in output


def weights_and_moments(checkpoints):
    """Return what a folder's newest checkpoint in format torch has of each rank, as lists."""
    iteration = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    found = []
    for rank in sorted((checkpoints / f"iter_{iteration:07d}").iterdir()):
        model = torch.load(rank / "model_optim_rng.pt", weights_only=False)["model"]
        found.append({name: tensor.tolist() for name, tensor in model.items() if tensor is not None}
                     | {"optimizer": (rank / "distrib_optim.pt").read_bytes()})
    return found


def test_the_job_goes_on_where_it_was(folder, job, runs):
    assert weights_and_moments(folder / "llama") == weights_and_moments(folder / "not stopped")
    for rank, other in zip(runs["llama resumed"], runs["llama not stopped"], strict=True):
        assert rank["losses"] == other["losses"][job[2]:] and len(rank["losses"]) == 2
    logged, other = losses_in(job[1]), runs["llama not stopped"][1]["losses"][:job[2]]
    assert logged == {number: f"{other[number - 1]['lm loss']:.6E}" for number in logged}
    assert len(logged) == job[2] - 1


def test_llama_with_tensor_parallel_ranks(runs):
    for rank in runs["llama tensor"]:
        assert len(rank["losses"]) == 4 and rank["finite"]


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no Megatron-LM checkout")
def test_preprocessing_makes_the_tokens_of_the_corpus(folder):
    ended = run_script(
        EXAMPLES / "prepare_openwebtext.sh", commands=folder / "none", seconds=120 * FACTOR,
        MEGATRON_LM=CHECKOUT, OUTPUT=folder / "openwebtext", JSONL=folder / "texts.jsonl",
        TOKENIZER_MODEL=folder / "tokenizer", WORKERS=1)
    assert ended.returncode == 0, ended.stderr[-4000:]
    for suffix in ("bin", "idx"):
        made = folder / f"openwebtext/openwebtext_text_document.{suffix}"
        assert made.read_bytes() == (folder / f"text_document.{suffix}").read_bytes()
