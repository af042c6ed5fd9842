"""What is refused, with Megatron's own parser."""

from __future__ import annotations

import argparse
import logging

import pytest

from megatron_paci.compatibility import (
    ConfigurationError,
    check,
    take_over,
    violations,
    warn_untried_version,
)
from megatron_paci.rules import PACI_RULES, SELECTION_RULES

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 "
    "--global-batch-size 16 --pipeline-model-parallel-size 2 "
    "--untie-embeddings-and-output-weights "
)
PACI = BASE + "--pipeline-schedule paci "


@pytest.fixture(scope="module")
def parse():
    from megatron.training.arguments import add_megatron_arguments

    from megatron_paci.arguments import add_paci_arguments

    parser = add_paci_arguments(add_megatron_arguments(argparse.ArgumentParser()))

    def parse_flags(text: str, world_size: int = 2) -> argparse.Namespace:
        args = parser.parse_args(text.split())
        args.rank, args.world_size = 0, world_size
        return args

    parse_flags.parser = parser
    return parse_flags


@pytest.mark.parametrize(
    "text",
    [
        BASE,
        BASE + "--pipeline-schedule 1f1b",
        BASE + "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        BASE + "--num-experts 4 --log-params-norm",  # only PACI objects to these
        PACI,
        PACI + "--paci-accum 1",
        PACI + "--paci-accum 8 --bf16",
        PACI.replace("--untie-embeddings-and-output-weights", "--fp16 --calculate-per-token-loss"),
        PACI + "--cuda-graph-impl none",
        PACI.replace("--untie-embeddings-and-output-weights", "--use-distributed-optimizer"),
        PACI.replace("--untie-embeddings-and-output-weights", "--ckpt-format torch"),
        PACI + "--pipeline-model-parallel-layout Et|tttL",
    ],
)
def test_what_runs_is_let_through(parse, text):
    check(parse(text))


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--pipeline-schedule zigzag", ["zigzag", "auto, 1f1b, interleaved, paci"]),
        ("--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2", ["interleaved"]),
        ("--pipeline-schedule interleaved",
         ["several model chunks", "--num-virtual-stages-per-pipeline-rank 2"]),
        ("--paci-accum 4", ["--paci-accum 4", "add --pipeline-schedule paci"]),
    ],
)
def test_a_contradicting_choice_of_schedule_is_refused(parse, flags, words):
    assert_refused(parse(BASE + flags), words)


def test_interleaved_needs_a_pipeline(parse):
    flags = BASE.replace("size 2 --untie", "size 1 --untie") + (
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"
    )
    assert_refused(parse(flags, world_size=1), ["only one pipeline stage"])


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--paci-accum 3", ["3", "8 microbatches", "--paci-accum 1 or 2 or 4 or 8"]),
        ("--paci-accum 16", ["16", "8 microbatches"]),
        ("--paci-accum 0", ["--paci-accum 0", "at least 1"]),
        ("--paci-accum -1", ["--paci-accum -1", "at least 1"]),
        ("--paci-accum 2.5", ["--paci-accum 2.5", "whole number"]),
        ("--paci-accum four", ["--paci-accum four", "e.g. --paci-accum 4"]),
        ("--num-layers-per-virtual-pipeline-stage 1", ["virtual", "one model chunk"]),
        ("--num-virtual-stages-per-pipeline-rank 2", ["virtual", "drop"]),
        ("--pipeline-model-parallel-layout Et|t|t|tL", ["virtual", "second chunk"]),
        ("--cuda-graph-impl local", ["CUDA graphs", "drop --cuda-graph-impl"]),
        ("--enable-cuda-graph", ["CUDA graphs"]),
        ("--external-cuda-graph", ["CUDA graphs"]),
        ("--use-megatron-fsdp", ["fully sharded", "drop --use-megatron-fsdp"]),
        ("--use-torch-fsdp2", ["fully sharded"]),
        ("--fp8-format hybrid", ["fp8", "take --bf16"]),
        ("--log-params-norm", ["--log-params-norm", "drop it"]),
        ("--log-straggler", ["gather or check over all ranks"]),
        ("--log-energy", ["--log-energy"]),
        ("--num-distributed-optimizer-instances 2", ["--num-distributed-optimizer-instances"]),
        ("--sft", ["packed"]),
        ("--optimizer dist_muon", ["layer-wise", "take muon instead"]),
        ("--optimizer muon --use-distributed-optimizer", ["all ranks", "drop --use-dist"]),
        ("--optimizer-cpu-offload", ["--optimizer-cpu-offload"]),
        ("--perform-rl-step", ["reinforcement"]),
        ("--error-injection-rate 5", ["--error-injection-rate"]),
        ("--save-wgrads-interval 5", ["dumps"]),
        ("--qk-clip", ["--qk-clip"]),
        ("--defer-embedding-wgrad-compute", ["--defer-embedding-wgrad-compute"]),
        ("--fine-grained-activation-offloading", ["--fine-grained-activation-offloading"]),
        ("--distributed-timeout-seconds-after-init 60", ["set --distributed-timeout-minutes"]),
        ("--check-for-spiky-loss", ["rerun state machine"]),
    ],
)
def test_what_paci_cannot_do_is_refused_with_reason_and_remedy(parse, flags, words):
    assert_refused(parse(PACI + flags), words)
    schedules = ["--pipeline-schedule", "--paci-accum"]
    if not any(flags.startswith(name) for name in schedules):
        check(parse(BASE + flags))  # Megatron's own schedules keep it


def test_context_parallelism_counts_among_the_ranks_of_a_replica(parse):
    flags = PACI + "--context-parallel-size 2 --paci-accum "
    check(parse(flags + "8", 4))  # one replica: 16 samples are 8 microbatches of 2
    assert_refused(parse(flags + "8", 8), ["4 microbatches"])


def test_all_that_is_wrong_is_said_at_once(parse):
    args = parse(PACI + "--paci-accum 3 --sft --cuda-graph-impl local "
                        "--num-virtual-stages-per-pipeline-rank 2 --log-params-norm")
    assert len(violations(args)) == 5
    assert_refused(args, ["3", "packed", "CUDA graphs", "virtual", "--log-params-norm"])


def test_a_batch_size_schedule_has_to_fit_at_every_step(parse):
    args = parse(PACI + "--paci-accum 4")
    args.step_batch_size_schedule, args.global_batch_size = "0:8 256:16 768:24", None
    check(args)
    args.paci_accum = 8
    assert_refused(args, ["4 or 8 or 12 microbatches", "--paci-accum 1 or 2 or 4"])


def test_every_rule_names_a_feature_and_formats(parse):
    args = parse(PACI)
    facts = dict.fromkeys(("counts", "divisors"), "x")
    for rule in SELECTION_RULES + PACI_RULES:
        assert rule.feature and rule.reason.format(args=args, **facts)
        assert rule.remedy.format(args=args, **facts)


def test_what_paci_replaces_is_turned_off_with_one_warning(parse, caplog):
    args = parse(PACI + "--timing-log-level 2")
    with caplog.at_level(logging.WARNING):
        take_over(args)
    assert args.rerun_mode == "disabled" and args.barrier_with_L1_time is False
    assert args.check_for_nan_in_loss_and_grad is False and "--paci-nonfinite skip" in caplog.text
    assert len(caplog.records) == 1
    assert "--rerun-mode validate_results -> disabled" in caplog.text and "barrier" in caplog.text
    caplog.clear()
    take_over(args)
    assert not caplog.records


def test_an_untried_version_is_a_warning(caplog):
    warn_untried_version("0.19.2")
    assert not caplog.records
    warn_untried_version("0.23.0")
    assert "0.23.0" in caplog.text and "1f1b" in caplog.text


def test_the_flags_and_their_help(parse):
    """Freezes the list of flags; a change here is a change of the command line."""
    group = next(g for g in parse.parser._action_groups if g.title == "paci")
    assert [action.option_strings[0] for action in group._group_actions] == [
        "--pipeline-schedule", "--paci-accum", "--paci-clip", "--paci-nonfinite", "--paci-record",
    ]
    assert all(action.help for action in group._group_actions)
    text = parse.parser.format_help()  # raises in Megatron 0.19.2 without the plugin
    assert "--pipeline-schedule {auto,1f1b,interleaved,paci}" in text
    assert "--paci-accum A" in text and "ceil((N-1)/A)" in text


def assert_refused(args, words):
    with pytest.raises(ConfigurationError) as caught:
        check(args)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "Remedy:" in message
