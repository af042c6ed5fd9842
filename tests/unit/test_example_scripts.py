"""The scripts of examples/ without training: what they would start, and what they refuse."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import subprocess
from itertools import dropwhile

import pytest

from megatron_paci.compatibility import check
from tests.example_scripts import (
    EXAMPLES,
    environment,
    run_script,
    stand_in,
    stand_in_slurm,
    started_with,
)

SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")])
GPT2, COMPARE, PREPARE = (
    EXAMPLES / name for name in
    ("gpt2_medium.sh", "compare_schedules.sh", "prepare_openwebtext.sh")
)
JOB, NODE = EXAMPLES / "llama_slurm.sbatch", EXAMPLES / "llama_slurm_node.sh"
MIGRATE = EXAMPLES / "migrate"

# Ranks of which one saves and ends when it gets SIGTERM; torchrun itself fails when it gets one.
TORCHRUN = """
bash -c 'trap "sleep 0.2; echo saved; exit 0" TERM; echo training; while :; do sleep 0.02; done' &
trap 'kill -KILL $!; exit 1' TERM
wait $!
"""


@pytest.fixture
def commands(tmp_path):
    """A folder of commands: 8 GPUs, and a torchrun that must not be started."""
    stand_in(tmp_path / "bin", "nvidia-smi", "for i in {0..7}; do echo GPU $i: one; done\n")
    stand_in(tmp_path / "bin", "torchrun", f"touch {tmp_path / 'started'}\n")
    return tmp_path / "bin"


@pytest.fixture
def data(tmp_path):
    for suffix in ("bin", "idx"):
        (tmp_path / f"text_document.{suffix}").touch()
    return tmp_path / "text_document"


@pytest.fixture(scope="module")
def parser():
    from megatron.training.arguments import add_megatron_arguments

    from megatron_paci.arguments import add_paci_arguments

    return add_paci_arguments(add_megatron_arguments(argparse.ArgumentParser()))


def parse(parser, command: list[str], *, ranks: int) -> argparse.Namespace:
    """Return Megatron's arguments of a command, which nothing refuses."""
    script = next(n for n, text in enumerate(command) if text.endswith("pretrain_gpt.py"))
    args = parser.parse_args(command[script + 1:])
    args.rank, args.world_size = 0, ranks
    check(args)
    return args


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_reads_it(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    sourced = script.name in ("common.sh", "gpt2_medium_flags.sh")
    assert sourced or "\nset -euo pipefail\n" in script.read_text()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    ended = subprocess.run(["shellcheck", "-S", "warning", "-x", "-P", "SCRIPTDIR",
                            *map(str, SCRIPTS)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_the_table_names_every_example_and_no_other():
    text = (EXAMPLES / "README.md").read_text()
    linked = {EXAMPLES / name for name in re.findall(r"\]\(([^)#:]+)\)", text)}
    assert all(path.exists() for path in linked), linked
    examples = {*SCRIPTS, *EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.diff")}
    examples.discard(EXAMPLES / "__init__.py")  # makes the folder a package, and is no example
    assert examples <= linked, examples - linked


# The paper's settings


@pytest.mark.parametrize("batch, accumulation, lr, iterations",
                         [(128, 8, "0.000212132", 379943), (256, 16, "0.0003", 189971)])
def test_gpt2_medium_has_the_papers_settings(
        parser, commands, data, batch, accumulation, lr, iterations):
    command = started_with(GPT2, commands=commands, DATA=data, GLOBAL_BATCH=batch)
    assert command[:7] == ["--standalone", "--nproc-per-node", "8", "-m", "megatron_paci", "run",
                           "--device"]
    args = parse(parser, command, ranks=8)
    assert args.pipeline_model_parallel_size == 8
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (24, 1024, 16)
    assert args.seq_length == args.max_position_embeddings == 1024
    assert (args.global_batch_size, args.global_batch_size // args.micro_batch_size) == (
        batch, accumulation)
    assert (args.pipeline_schedule, args.paci_accum) == ("paci", accumulation)
    assert args.train_iters == iterations == 49_800_000_000 // (batch * 1024)
    assert args.lr == float(lr) and args.min_lr == pytest.approx(args.lr / 10, rel=1e-5)
    assert args.lr == pytest.approx(3e-4 * (batch / 256) ** 0.5, rel=1e-6)
    assert (args.lr_decay_style, args.lr_warmup_fraction) == ("cosine", 0.01)
    assert (args.adam_beta1, args.adam_beta2, args.adam_eps) == (0.9, 0.95, 1e-8)
    assert (args.weight_decay, args.clip_grad) == (0.1, 0)
    assert (args.attention_dropout, args.hidden_dropout) == (0.1, 0.1)
    assert args.bf16 and args.recompute_granularity is None
    assert args.transformer_impl == "transformer_engine" and args.attention_backend.name == "flash"
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", "gpt2")


def test_llama_fills_four_nodes(parser, commands, data):
    command = started_with(NODE, commands=commands, DATA=data)
    args = parse(parser, command, ranks=32)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 8)
    assert args.sequence_parallel and args.swiglu and args.normalization == "RMSNorm"
    assert (args.num_layers, args.num_query_groups, args.paci_accum) == (32, 8, 64)
    assert args.exit_signal_handler and args.save == args.load


def test_the_1f1b_run_differs_in_the_schedule_alone(commands, data):
    paci, other = (started_with(GPT2, commands=commands, DATA=data, SCHEDULE=schedule,
                                CHECKPOINTS="saved") for schedule in ("paci", "1f1b"))
    at = paci.index("--pipeline-schedule")
    assert paci[at:at + 4] == ["--pipeline-schedule", "paci", "--paci-accum", "8"]
    assert other == [*paci[:at], "--pipeline-schedule", "1f1b", *paci[at + 4:]]


# What is started


@pytest.mark.parametrize("script", [GPT2, NODE], ids=lambda path: path.name)
def test_a_dry_run_prints_what_is_started(commands, data, script):
    more = ["--wandb-exp-name", "two words"]
    started = started_with(script, *more, commands=commands, DATA=data)
    printed = run_script(script, *more, commands=commands, DATA=data, DRY_RUN=1)
    assert shlex.split(printed.stdout) == ["torchrun", *started]
    assert started[-2:] == more


def test_on_a_cpu_no_flag_asks_for_a_gpu(commands, data):
    from megatron_paci.cpu import cpu_flags

    for script, variables in ((GPT2, {"NPROC": 2}), (NODE, {})):
        started = started_with(script, commands=commands, DATA=data, DEVICE="cpu", **variables)
        assert started[started.index("--device") + 1] == "cpu"
        cpu_flags(started)  # refuses what needs a GPU


def test_a_checkout_is_used_where_one_is_named(commands, data, tmp_path):
    (tmp_path / "pretrain_gpt.py").touch()
    own = started_with(GPT2, commands=commands, DATA=data)
    theirs = started_with(GPT2, commands=commands, DATA=data, MEGATRON_LM=tmp_path)
    assert str(EXAMPLES / "pretrain_gpt.py") in own
    assert str(tmp_path / "pretrain_gpt.py") in theirs


def test_the_comparison(parser, commands, data):
    ended = run_script(COMPARE, commands=commands, DATA=data, DRY_RUN=1, NPROC=2, DEVICE="cpu",
                       SCHEDULES="1f1b,interleaved,paci", ACCUMS="2,4", OUTPUT="out/compare",
                       PYTHON="python3")
    command = shlex.split(ended.stdout)
    assert command[:17] == [
        "python3", "-m", "megatron_paci", "compare", "--nproc", "2", "--schedules",
        "1f1b,interleaved,paci", "--accum", "2,4", "--chunks", "12", "--output", "out/compare",
        "--device", "cpu", str(EXAMPLES / "pretrain_gpt.py")]
    args = parse(parser, command, ranks=2)  # without a schedule: that is what compare adds
    assert (args.train_iters, args.eval_interval, args.paci_accum) == (300, 300, None)


def test_the_diff_is_two_lines(commands, tmp_path):
    lines = (MIGRATE / "paci.diff").read_text().splitlines()[2:]
    assert [line for line in lines if line[0] in "+-"] == [
        '-    "$SCRIPT" \\',
        '+    -m megatron_paci run "$SCRIPT" \\',
        "+    --pipeline-schedule paci --paci-accum 8 \\",
    ]
    shutil.copy(MIGRATE / "pretrain_1f1b.sh", tmp_path)
    subprocess.run(["git", "apply", "-p0", str(MIGRATE / "paci.diff")], cwd=tmp_path, check=True)
    before = started_with(MIGRATE / "pretrain_1f1b.sh", commands=commands)
    after = started_with(tmp_path / "pretrain_1f1b.sh", commands=commands)
    assert after == [*before[:2], "-m", "megatron_paci", "run", before[2],
                     "--pipeline-schedule", "paci", "--paci-accum", "8", *before[3:]]


# Slurm


def test_a_job_asks_for_what_it_needs():
    options = re.findall(r"^#SBATCH (--\S+)", JOB.read_text(), flags=re.M)
    for option in ("--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue",
                   "--signal=B:TERM@300", "--open-mode=append"):
        assert option in options


def test_all_nodes_of_a_job_meet(commands, data):
    variables = stand_in_slurm(commands, nodes=2) | {"DATA": data, "PP": 2, "NPROC": 2}
    stand_in(commands, "torchrun", 'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $*"\n')
    ended = run_script(JOB, "--seed", "7", commands=commands, SLURM_RESTART_COUNT=3, **variables)
    assert ended.returncode == 0, ended.stderr
    one, other = ended.stdout.splitlines()
    assert one == other
    assert one.startswith(
        "1 --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "
        "localhost:24711 --rdzv-id 4711-3 --local-addr localhost -m megatron_paci run ")
    assert one.endswith(" --seed 7")


@pytest.mark.parametrize("status", [0, 7])
def test_a_job_that_ends_by_itself_ends_with_its_status(commands, data, status):
    variables = stand_in_slurm(commands, nodes=4) | {"DATA": data}
    stand_in(commands, "torchrun", f"exit {status}\n")
    ended = run_script(JOB, commands=commands, **variables)
    assert ended.returncode == status
    assert not (commands / "requeued").exists()


def test_a_signal_to_a_job_reaches_the_ranks_and_the_job_is_queued_again(commands, data):
    variables = stand_in_slurm(commands, nodes=4) | {"DATA": data}
    stand_in(commands, "torchrun", TORCHRUN)
    process = subprocess.Popen(
        ["bash", str(JOB)], env=environment(commands, variables), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        for _ in range(4):
            assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.splitlines() == [
        "llama_slurm: the time is up, all ranks save", *4 * ["saved"],
        "llama_slurm: the step ended with status 0, back into the queue",
    ]
    assert (commands / "requeued").read_text() == "4711\n"


# What is refused

REFUSED = {
    # name: (script, variables, words of the message)
    "no data": (GPT2, {"DATA": "missing"}, ["missing.bin is not there", "DATA=PREFIX"]),
    "uneven stages": (GPT2, {"NPROC": 5}, ["NUM_LAYERS=24 does not divide by 5", "NPROC"]),
    "uneven heads": (GPT2, {"HEADS": 7}, ["HIDDEN=1024 does not divide by 7", "HEADS"]),
    "uneven batch": (GPT2, {"GLOBAL_BATCH": 100}, ["GLOBAL_BATCH=100", "MICRO_BATCH"]),
    "uneven window": (GPT2, {"ACCUM": 3}, ["MICRO_BATCH=8 does not divide by 3", "ACCUM"]),
    "no number": (GPT2, {"NPROC": "eight"}, ["NPROC=eight", "whole number"]),
    "zero": (GPT2, {"ACCUM": 0}, ["ACCUM=0", "at least 1"]),
    "device": (GPT2, {"DEVICE": "tpu"}, ["DEVICE=tpu", "gpu or cpu"]),
    "few GPUs": (GPT2, {"NPROC": 12}, ["12 GPUs are needed", "shows 8", "DEVICE=cpu"]),
    "no checkout": (GPT2, {"MEGATRON_LM": "nowhere"}, ["nowhere/pretrain_gpt.py is not there"]),
    "job, no data": (NODE, {"DATA": "missing"}, ["missing.bin is not there"]),
    "job, nodes": (NODE, {"SLURM_NNODES": 3}, ["SLURM_NNODES * NPROC=24", "16", "TP * PP"]),
    "job, stages": (NODE, {"NUM_LAYERS": 31}, ["NUM_LAYERS=31 does not divide by 8", "PP"]),
    "job, groups": (NODE, {"QUERY_GROUPS": 3}, ["QUERY_GROUPS=3 does not divide by 2", "TP"]),
    "job, batch": (NODE, {"GLOBAL_BATCH": 6}, ["GLOBAL_BATCH=6 does not divide by 4", "2 repl"]),
    "job, window": (NODE, {"ACCUM": 5}, ["iteration=64 does not divide by 5", "ACCUM"]),
    "job, GPUs": (NODE, {"NPROC": 16}, ["16 GPUs are needed", "shows 8"]),
    "compare": (COMPARE, {"ACCUMS": "4,3"}, ["does not divide by 3", "ACCUMS"]),
    "compare, chunks": (COMPARE, {"CHUNKS": 2}, ["NUM_LAYERS=24 does not divide by 16", "CHUNKS"]),
    "prepare": (PREPARE, {}, ["MEGATRON_LM= has no tools/preprocess_data.py", "Megatron-LM"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_ends_before_anything_starts(commands, data, tmp_path, name):
    script, variables, words = REFUSED[name]
    ended = run_script(script, commands=commands, **{"DATA": data} | variables)
    assert ended.returncode == 2 and ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"{script.name}: error: ")
    for word in words:
        assert word in line
    assert not (tmp_path / "started").exists()


def test_a_machine_without_a_gpu_is_told_so(commands, data, tmp_path):
    stand_in(commands, "nvidia-smi", "exit 9\n")
    ended = run_script(GPT2, commands=commands, DATA=data)
    assert ended.returncode == 2 and "8 GPUs are needed and nvidia-smi shows 0" in ended.stderr
    assert not (tmp_path / "started").exists()
    printed = run_script(GPT2, commands=commands, DATA=data, DRY_RUN=1)
    assert printed.returncode == 0 and printed.stdout.startswith("torchrun ")


def test_texts_of_ones_own_have_to_be_there(commands, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/preprocess_data.py").touch()
    given = {"MEGATRON_LM": tmp_path, "OUTPUT": tmp_path / "out", "PYTHON": "python3"}
    ended = run_script(PREPARE, commands=commands, JSONL="missing", **given)
    assert ended.returncode == 2 and "JSONL=missing is not there" in ended.stderr
    command = shlex.split(run_script(PREPARE, commands=commands, DRY_RUN=1, **given).stdout)
    assert command[:2] == ["python3", str(tmp_path / "tools/preprocess_data.py")]
    tokenizer = list(dropwhile(lambda text: text != "--tokenizer-type", command))
    assert tokenizer == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2",
                         "--append-eod"]


def test_tokens_that_are_there_are_kept(commands, tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/preprocess_data.py").write_text("raise SystemExit('started')")
    (tmp_path / "openwebtext.jsonl").touch()
    (tmp_path / "openwebtext_text_document.idx").touch()
    ended = run_script(PREPARE, commands=commands, MEGATRON_LM=tmp_path, OUTPUT=tmp_path,
                       PYTHON="python3")
    assert ended.returncode == 0 and "there already, kept" in ended.stdout
