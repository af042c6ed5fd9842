"""``python -m megatron_paci simulate``: what it prints and writes, and what it refuses."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_paci.__main__ import main
from megatron_paci.simulate.schedules import NAMES

ROOT = Path(__file__).resolve().parents[2]


def simulate(capsys, line):
    """Run a command line; return the exit status, the output and the lines of errors."""
    status = main(["simulate", *line.split()])
    shown = capsys.readouterr()
    return status, shown.out, shown.err.splitlines()


def test_the_table_and_the_record_agree_with_the_formulas(capsys, tmp_path):
    path = tmp_path / "result.json"
    status, output, errors = simulate(
        capsys, f"--stages 4 --microbatches 8 --accum 2 --extra-in-flight 1 --json {path}"
    )
    assert (status, errors) == (0, [])
    record = json.loads(path.read_text())
    found = record["schedules"]
    assert list(found) == [*NAMES, "paci+1"]
    assert found["1f1b"]["utilization"] == [8 / 11] * 4
    assert found["interleaved"]["utilization"] == [16 / 19] * 4
    assert found["zb-h1"]["iteration_time"] == 27
    assert found["paci"]["overall"] == 1 and found["paci"]["bubble"] == 0
    assert found["paci"]["throughput_over_1f1b"] == 11 / 8
    assert found["paci"]["drift"] == 2 and found["paci+1"]["drift"] == 3
    assert found["paci+1"]["activations"] == [7, 5, 3, 1]
    assert record["parameters"]["accum"] == 2
    assert record["parameters"]["memory"]["retained"] == [0.5] * 4
    assert record["command"][3:8] == ["simulate", "--stages", "4", "--microbatches", "8"]
    row = next(line for line in output.splitlines() if line.startswith("1F1B"))
    assert row.split() == ["1F1B", "0.7273", "0.2727", "33", "1.000", "4", "4", "0"]
    row = next(line for line in output.splitlines() if line.startswith("PACI "))
    assert row.split() == ["PACI", "1.0000", "0.0000", "24", "1.375", "4", "4", "2"]


def test_times_and_memory_per_stage_are_taken(capsys, tmp_path):
    path = tmp_path / "result.json"
    status, _, errors = simulate(
        capsys,
        "--stages 2 --microbatches 2 --schedules paci,zb-2p --forward 1,2 --backward-input 1/2,1 "
        "--backward-weight 0.5,1 --step 0,1 --latency 0 --activation-memory 4,2 "
        f"--retained-memory 1 --static-memory 10,20 --json {path}",
    )
    assert (status, errors) == (0, [])
    found = json.loads(path.read_text())["schedules"]
    assert list(found) == ["paci", "zb-h2"]
    assert found["paci"]["iteration_time"] == 2 * 4 + 1
    assert found["paci"]["utilization"] == [4 / 9, 1]
    assert found["paci"]["memory"] == [10 + 8, 20 + 2]


def test_interleaved_is_left_out_only_where_nobody_asked_for_it(capsys):
    status, output, _ = simulate(capsys, "--stages 4 --microbatches 6")
    assert status == 0
    assert "Left out: interleaved works in groups" in output


@pytest.mark.filterwarnings("error")
def test_the_picture_is_1280_pixels_wide_and_always_the_same(capsys, tmp_path):
    png, svg, again = (tmp_path / name for name in ("a.png", "a.svg", "b.svg"))
    line = "--stages 2 --microbatches 2 --schedules zbv,paci --step 1/2 --picture"
    assert simulate(capsys, f"{line} {png} --picture {svg}")[0] == 0
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", data[16:20]) == (1280,)
    assert b"<svg" in svg.read_bytes()
    assert simulate(capsys, f"{line} {again}")[0] == 0
    assert again.read_bytes() == svg.read_bytes()


FEW = "--stages 4 --microbatches 8"
ADVISE = "--advise --model gpt2-medium --stages 8 --global-batch 128"


@pytest.mark.parametrize(
    "line, messages",
    [
        ("", ["--stages is missing; give", "--microbatches is missing; give"]),
        ("--stages 0 --microbatches x", ["--stages 0: too small; give 1 or more",
                                         "--microbatches x: not a whole number; give 1 or more"]),
        (f"{FEW} --forward=-1", ["--forward -1: -1 is negative; give 0 or more"]),
        (f"{FEW} --step 1,2,3", ["--step 1,2,3: 3 numbers for 4 stages; give one, or one each"]),
        (f"{FEW} --latency nan", ["--latency nan: 'nan' is not a number; give e.g. 1, 0.5 or"]),
        (f"{FEW} --forward 0 --backward-input 0 --backward-weight 0", ["all are 0; give at least"]),
        (f"{FEW} --schedules 1f1b,zb-3", [f"--schedules zb-3: unknown; take some of "
                                          f"{', '.join(NAMES)}"]),
        ("--stages 4 --microbatches 6 --schedules interleaved", [
            "--schedules interleaved: works in groups of as many microbatches as there are stages; "
            "give --microbatches as a multiple of 4"]),
        ("--stages 1 --microbatches 6 --schedules interleaved", ["give e.g. --stages 2"]),
        (f"{FEW} --accum 3", ["--accum 3: does not divide --microbatches 8; take e.g. --accum 8"]),
        (f"{FEW} --chunks 1", ["--chunks 1: too small; give 2 or more"]),
        (f"{FEW} --extra-in-flight -1", ["--extra-in-flight -1: too small; give 0 or more"]),
        (f"{FEW} --retained-memory 2", ["--retained-memory 2: more than --activation-memory"]),
        (f"{FEW} --microbatches 99999999999", ["too many passes to time; give smaller ones"]),
        (f"{FEW} --json /no/such/file", ["--json /no/such/file: there is no folder /no/such; "
                                         "create it, or choose another"]),
        (f"{FEW} --json /", ["--json /: is a folder; give the name of a file"]),
        (f"{FEW} --picture a.gif", ["--picture a.gif: the name has to end in .png or .svg"]),
        ("--stages 65 --microbatches 1 --picture a.png", ["room for 64 stages at most; drop it"]),
        (f"{FEW} --model gpt2", ["--model: has no meaning here; add --advise"]),
        (f"{ADVISE} --step 1", ["--step: has no meaning here; drop it, or drop --advise"]),
        ("--advise --stages 8 --global-batch 8 --hidden 64", [
            "--layers, --heads, --sequence, --vocabulary: missing; give them, or --model with"]),
        ("--advise --model gpt5", ["--model gpt5: unknown; take one of gpt2, gpt2-medium, ",
                                   "--stages is missing", "--global-batch is missing"]),
        (f"{ADVISE} --stages 7", ["--stages 7: 24 layers do not divide into them; give e.g. "
                                  "--layers-per-stage 4,4,4,3,3,3,3"]),
        (f"{ADVISE} --stages 32", ["24 layers do not divide into them; give at most 24"]),
        (f"{ADVISE} --layers-per-stage 4,4", ["give 8 numbers that add up to 24"]),
        (f"{ADVISE} --data-parallel 3", ["--global-batch 128: not a multiple of --data-parallel 3; "
                                         "take e.g. 129"]),
        (f"{ADVISE} --microbatch-size 3,4", ["--microbatch-size 3: does not divide the 128 "]),
        (f"{ADVISE} --microbatch-size 0", ["--microbatch-size 0: give whole numbers of 1 or more"]),
        (f"{ADVISE} --relative-speed 1,2", ["give a number above 0 for each of the 6"]),
        (f"{ADVISE} --dtype-bytes 3", ["--dtype-bytes 3: give 2 (bf16, fp16) or 4 (fp32)"]),
        (f"{ADVISE} --device-memory 0", ["--device-memory 0: give more than 0"]),
        (f"{ADVISE} --heads 7", ["--heads 7: does not divide the hidden size 1024; give"]),
    ],
)
def test_bad_input_is_one_line_with_its_remedy(capsys, line, messages):
    status, output, errors = simulate(capsys, line)
    assert (status, output) == (2, "")
    assert len(errors) == len(messages)
    for error, message in zip(errors, messages):
        assert error.startswith("megatron_paci: error: ") and message in error


def test_a_file_that_turns_out_not_to_be_writable_is_refused_too(capsys):
    status, output, errors = simulate(capsys, f"{FEW} --schedules paci --json /proc/no_such_file")
    assert status == 2 and "PACI" in output
    assert re.match("megatron_paci: error: cannot write: .*; choose another place", errors[-1])


def test_it_needs_neither_torch_nor_matplotlib():
    code = (
        "import sys; from megatron_paci.__main__ import main; "
        "assert main(['simulate', '--stages', '2', '--microbatches', '2']) == 0; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
