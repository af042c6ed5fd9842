"""What went wrong elsewhere, as far as it needs no training; docs/scenarios.md lists all of it."""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import importlib.metadata
import logging
import re
from pathlib import Path

import pytest

from megatron_paci.schedule import StageSchedule

ROOT = Path(__file__).resolve().parents[2]
PACI = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--global-batch-size 16 --pipeline-schedule paci --pipeline-model-parallel-size "
)


@pytest.fixture(scope="module")
def parse():
    from megatron.training.arguments import add_megatron_arguments

    from megatron_paci.arguments import add_paci_arguments

    parser = add_paci_arguments(add_megatron_arguments(argparse.ArgumentParser()))

    def parse_flags(text: str, world_size: int) -> argparse.Namespace:
        args = parser.parse_args(text.split())
        args.rank, args.world_size = 0, world_size
        return args

    return parse_flags


# 1: updates between a microbatch's passes


@pytest.mark.parametrize(
    "accumulation, updates", [(1, [3, 2, 1, 0]), (2, [2, 1, 1, 0]), (4, [1, 1, 1, 0])]
)
def test_most_updates_that_a_microbatch_crosses_on_each_of_four_stages(accumulation, updates):
    schedules = [StageSchedule(stage, 4, accumulation) for stage in range(4)]
    assert [max(map(each.drift, range(64))) for each in schedules] == updates


# 2: windows that do not fit an iteration


def test_an_accumulation_above_the_number_of_microbatches_is_refused_by_name(parse):
    from megatron_paci.compatibility import violations

    args = parse(f"{PACI} 2 --global-batch-size 6 --paci-accum 4", 2)
    [message] = violations(args)
    assert "--paci-accum 4: does not divide the 3 microbatches" in message
    assert "take --paci-accum 1 or 3" in message


@pytest.mark.parametrize("schedule", ["0:8 256:16 768:24", "0:8,256:16,768:24"])
def test_a_batch_size_schedule_is_read_as_megatron_reads_it(parse, schedule):
    from megatron.core.num_microbatches_calculator import (
        StepBatchsizeNumMicroBatchesCalculator as Calculator,
    )

    from megatron_paci.windows import microbatch_counts

    args = parse(f"{PACI} 2", 2)
    args.step_batch_size_schedule, args.global_batch_size = schedule, None
    for args.seq_length in (None, 64):  # thresholds in samples, or in tokens
        read = Calculator._parse_schedule(schedule, args.seq_length)
        assert microbatch_counts(args) == {first: size // 2 for first, size in read}
        assert list(microbatch_counts(args).values()) == [4, 8, 12]


# 11: what the delay may cost


@pytest.mark.parametrize(
    "flags, stages, updates, needed",
    [
        ("--paci-accum 1", 4, 3, 3),
        ("--paci-accum 2", 8, 4, 7),
        ("--paci-accum 1", 2, None, None),
        ("--paci-accum 4", 4, None, None),
        ("", 8, None, None),
        ("--global-batch-size 4", 8, 4, 7),  # two of them, the default window
    ],
)
def test_a_delay_of_more_than_one_update_is_said_once(
    parse, caplog, monkeypatch, flags, stages, updates, needed
):
    from megatron_paci.compatibility import warn_of_delay

    args = parse(f"{PACI} {stages} {flags}", stages)
    monkeypatch.setenv("RANK", "1")
    warn_of_delay(args)
    assert not caplog.records
    monkeypatch.setenv("RANK", "0")
    with caplog.at_level(logging.WARNING):
        warn_of_delay(args)
    assert len(caplog.records) == (updates is not None)
    if updates:
        assert f"up to {updates} optimizer steps old" in caplog.text
        assert f"accumulate {needed} backwards or more" in caplog.text


# 33: Megatron's files


def test_no_file_of_megatron_was_touched():
    """Every file of the installed wheel has the hash that the wheel came with."""
    import megatron.core

    distribution = importlib.metadata.distribution("megatron-core")
    if not Path(megatron.core.__file__).is_relative_to(distribution.locate_file("")):
        pytest.skip("Megatron comes from a checkout, not from the wheel")
    checked = 0
    for file in distribution.files:
        if file.hash is not None and file.suffix == ".py":
            content = Path(distribution.locate_file(file)).read_bytes()
            found = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, content).digest())
            assert found.rstrip(b"=").decode() == file.hash.value, file
            checked += 1
    assert checked > 300


# The list itself


def test_the_list_of_scenarios_is_complete_and_every_test_it_names_exists():
    text = (ROOT / "docs/scenarios.md").read_text()
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(n) for n in range(1, 34)]
    named = re.findall(r"`(tests/\S+?\.py)::(\w+)`", text)
    assert len(named) > 40
    for path, name in named:
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{path} has no {name}"
