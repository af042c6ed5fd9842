"""What is refused, with Megatron's own parser."""

from __future__ import annotations

import argparse
import logging

import pytest

from megatron_paci import arguments
from megatron_paci.compatibility import (
    ConfigurationError,
    check,
    check_call,
    check_parsed,
    take_over,
    violations,
    warn_unproved,
    warn_untried_version,
)
from megatron_paci.refused import PACI_RULES
from megatron_paci.rules import SELECTION_RULES

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
        PACI + "--paci-stall-seconds 599",
        PACI + "--paci-extra-in-flight 2 --paci-defer-step",
        PACI + "--paci-extra-in-flight 0",
        PACI + "--paci-accum 8 --bf16",
        PACI.replace("--untie-embeddings-and-output-weights", "--fp16 --calculate-per-token-loss"),
        PACI + "--cuda-graph-impl none",
        PACI.replace("--untie-embeddings-and-output-weights", "--use-distributed-optimizer"),
        PACI.replace("--untie-embeddings-and-output-weights", "--ckpt-format torch"),
        PACI + "--pipeline-model-parallel-layout Et|tttL",
        PACI + "--hybrid-layer-pattern *-|*-/MM",
        PACI + "--pipeline-model-parallel-comm-backend nccl",
        PACI + "--fp16",
        PACI + "--fp16 --num-experts 4 --moe-router-load-balancing-type none",
        PACI + "--cuda-graph-impl none --cuda-graph-scope attn",
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
        ("--paci-stall-seconds 60",
         ["--paci-stall-seconds 60", "add --pipeline-schedule paci, or drop --paci-stall-seconds"]),
        ("--paci-extra-in-flight 1",
         ["- --paci-extra-in-flight 1: ", "or drop --paci-extra-in-flight"]),
        ("--pipeline-schedule 1f1b --paci-extra-in-flight one",
         ["--paci-extra-in-flight one", "under --pipeline-schedule 1f1b"]),
        ("--paci-defer-step", ["- --paci-defer-step: ", "or drop --paci-defer-step"]),
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
        ("--paci-accum 3", ["--paci-accum 3", "8 microbatches", "--paci-accum 1 or 2 or 4 or 8"]),
        ("--paci-accum 16", ["--paci-accum 16", "8 microbatches"]),
        ("--paci-accum 0", ["--paci-accum 0", "at least 1"]),
        ("--paci-accum -1", ["--paci-accum -1", "at least 1"]),
        ("--paci-accum 2.5", ["--paci-accum 2.5", "whole number"]),
        ("--paci-accum four", ["--paci-accum four", "e.g. --paci-accum 4"]),
        ("--paci-extra-in-flight -1", ["--paci-extra-in-flight -1", "at least 0"]),
        ("--paci-extra-in-flight 1.5", ["whole number", "e.g. --paci-extra-in-flight 1"]),
        ("--paci-extra-in-flight more", ["--paci-extra-in-flight more", "at least 0"]),
        ("--paci-stall-seconds -1", ["--paci-stall-seconds -1", "at least 0"]),
        ("--paci-stall-seconds 1m", ["--paci-stall-seconds 1m", "e.g. --paci-stall-seconds 60"]),
        ("--paci-stall-seconds 600", ["--paci-stall-seconds 600", "ends the run before"]),
        ("--num-layers-per-virtual-pipeline-stage 1", ["virtual", "one model chunk"]),
        ("--num-virtual-stages-per-pipeline-rank 2", ["virtual", "drop"]),
        ("--pipeline-model-parallel-layout Et|t|t|tL", ["virtual", "second chunk"]),
        ("--hybrid-layer-pattern *-|*-|*-|*-", ["virtual", "pattern"]),
        ("--cuda-graph-impl local", ["CUDA graphs", "--cuda-graph-impl none"]),
        ("--enable-cuda-graph", ["CUDA graphs"]),
        ("--external-cuda-graph", ["CUDA graphs"]),
        ("--train-sync-interval 10", ["waits for the whole device"]),
        ("--overlap-moe-expert-parallel-comm", ["one microbatch with the backward of another"]),
        ("--delay-wgrad-compute", ["miss the window"]),
        ("--overlap-dispatch-backward-with-experts-wgrad", ["miss the window"]),
        ("--defer-embedding-wgrad-compute", ["miss the window"]),
        ("--fine-grained-activation-offloading", ["e.g. --recompute-granularity full"]),
        ("--cpu-offloading-num-layers 1", ["in the order of"]),
        ("--moe-paged-stash", ["in the order of"]),
        ("--moe-expert-rank-capacity-factor 1.5", ["in flight"]),
        ("--error-injection-rate 5", ["in flight"]),
        ("--transformer-impl inference_optimized", ["take --transformer-impl"]),
        ("--use-megatron-fsdp", ["fully sharded", "drop --use-megatron-fsdp"]),
        ("--use-torch-fsdp2", ["fully sharded", "take --use-distributed-optimizer"]),
        ("--hybrid-context-parallel", ["a schedule of its own"]),
        ("--max-seqlen-per-dp-cp-rank 64", ["a schedule of its own"]),
        ("--tensor-parallel-num-weight-shards 2", ["count as replicas"]),
        ("--num-distributed-optimizer-instances 2", ["two stages", "leave it at 1"]),
        ("--overlap-param-gather-with-optimizer-step", ["take --overlap-param-gather"]),
        ("--pipeline-model-parallel-comm-backend ucc", ["comm-backend nccl"]),
        ("--use-ring-exchange-p2p", ["one-way links"]),
        ("--fake-process-group", ["nothing is communicated"]),
        ("--fp8-format hybrid", ["low-precision copies", "take --bf16"]),
        ("--fp4-format e2m1", ["low-precision copies"]),
        ("--te-precision-config-file f", ["low-precision copies"]),
        ("--moe-router-load-balancing-type quantile_balancing", ["aux_loss"]),
        ("--moe-enable-routing-replay", ["one routing per layer"]),
        ("--sft", ["packed"]),
        ("--dataloader-inter-document-masking", ["packed"]),
        ("--dsa-indexer-loss-coeff 0.1", ["indexer loss"]),
        ("--vision-pretraining", ["hooks"]),
        ("--optimizer dist_muon", ["layer-wise", "take --optimizer muon"]),
        ("--optimizer-cpu-offload", ["optimizer offload"]),
        ("--mtp-detach-heads", ["norm of their own"]),
        ("--use-precision-aware-optimizer", ["gradient to be clipped"]),
        ("--freeze-all-layers", ["no optimizer"]),
        ("--qk-clip", ["over all stages"]),
        ("--log-max-attention-logit", ["over all stages"]),
        ("--check-for-spiky-loss", ["rerun state machine"]),
        ("--check-for-large-grads", ["rerun state machine"]),
        ("--result-rejected-tracker-filename f", ["--iterations-to-skip"]),
        ("--perform-rl-step", ["reinforcement"]),
        ("--logits-load-dir d", ["distillation"]),
        ("--log-params-norm", ["--log-params-norm", "drop it"]),
        ("--log-straggler", ["gather or check over all ranks"]),
        ("--log-energy", ["--log-energy: monitors"]),
        ("--inprocess-restart", ["restart from a checkpoint"]),
        ("--fault-injector-ranks 1", ["broadcast"]),
        ("--exit-signal-handler-for-training", ["take --exit-signal-handler"]),
        ("--save-wgrads-interval 5", ["--save-wgrads-interval 5: dumps"]),
        ("--moe-routing-trace-path p", ["dumps"]),
        ("--distributed-timeout-seconds-after-init 60", ["set --distributed-timeout-minutes"]),
        ("--ckpt-format fsdp_dtensor", ["take --ckpt-format torch_dist"]),
    ],
)
def test_what_paci_cannot_do_is_refused_with_reason_and_remedy(parse, flags, words):
    if flags.split()[0] not in parse.parser._option_string_actions:
        pytest.skip("this version of Megatron does not have the flag")
    # The message begins with the flag as it was typed, value included.
    assert_refused(parse(PACI + flags), [f"- {flags}: ", *words])
    if not flags.startswith("--paci-"):
        check(parse(BASE + flags))  # Megatron's own schedules keep it


def test_one_hardware_queue_orders_four_windows_of_tied_weights(parse, monkeypatch):
    tied = PACI.replace("--untie-embeddings-and-output-weights", "").replace("size 2", "size 8")
    tied = tied.replace("--num-layers 4", "--num-layers 8")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    words = ["--paci-accum 1: with CUDA_DEVICE_MAX_CONNECTIONS=1", "a quarter of the stages"]
    assert_refused(parse(tied + "--paci-accum 1", 8), words)
    on_cpu = "--paci-accum 1 --distributed-backend gloo"
    untied = "--paci-accum 1 --untie-embeddings-and-output-weights"
    for flags in (on_cpu, "--paci-accum 2", "", untied):
        check(parse(tied + flags, 8))
    assert_refused(parse(tied + "--untie-embeddings-and-output-weights --mtp-num-layers 1 "
                         "--paci-accum 1", 8), words)
    assert_refused(parse(tied + "--paci-accum 2 --paci-defer-step", 8), ["one stage more counts"])
    check(parse(tied + "--micro-batch-size 2 --paci-accum 4 --paci-defer-step", 8))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    for flags in ("--paci-accum 1", "--paci-accum 2 --paci-defer-step"):
        check(parse(tied + flags, 8))


def test_one_hardware_queue_orders_one_message_of_a_link(parse, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    more = PACI + "--paci-extra-in-flight 1"
    assert_refused(parse(more), ["- --paci-extra-in-flight 1: with CUDA_DEVICE_MAX_CONNECTIONS=1",
                                 "drop --paci-extra-in-flight, or unset"])
    check(parse(more + " --distributed-backend gloo"))
    check(parse(PACI + "--paci-defer-step"))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    check(parse(more))


def test_context_parallelism_counts_among_the_ranks_of_a_replica(parse):
    flags = PACI + "--context-parallel-size 2 --paci-accum "
    check(parse(flags + "8", 4))  # one replica: 16 samples are 8 microbatches of 2
    assert_refused(parse(flags + "8", 8), ["4 microbatches"])


def test_whole_layers_of_an_optimizer_stay_on_every_replica(parse):
    check(parse(PACI + "--optimizer muon"))
    assert_refused(
        parse(PACI + "--optimizer muon --use-distributed-optimizer"),
        ["over all ranks", "without --use-distributed-optimizer"],
    )


def test_a_layout_that_is_none_is_left_to_megatron(parse):
    args = parse(PACI + "--pipeline-model-parallel-layout Exyz|L --log-params-norm")
    assert_refused(args, ["--log-params-norm"])


def test_multi_token_prediction_belongs_to_the_last_stage(parse):
    layout = PACI + "--mtp-num-layers 1 --pipeline-model-parallel-layout "
    check(parse(layout + "Et|tttmL"))
    assert_refused(
        parse(layout + "Etm|tttL"),
        ["--pipeline-model-parallel-layout Etm|tttL", "put every m", "into the last stage"],
    )


@pytest.mark.parametrize(
    "losses",
    ["--num-experts 4 --moe-router-load-balancing-type aux_loss",
     "--num-experts 4 --moe-router-load-balancing-type none --moe-z-loss-coeff 1e-3",
     "--mtp-num-layers 1"],
)
def test_auxiliary_losses_need_one_loss_scale(parse, losses):
    words = ["- --fp16: ", "--loss-scale", "--bf16"]
    assert_refused(parse(PACI + f"--fp16 {losses}"), words)
    for scale in ("--bf16", "--fp16 --loss-scale 128"):
        broken = violations(parse(PACI + f"{scale} {losses}"))
        assert not any(line.startswith("- --fp16") for line in broken)


def test_a_yaml_file_would_drop_the_schedule(parse):
    without = argparse.Namespace(num_layers=4)  # what Megatron makes of a YAML file
    check_parsed(without, ["--yaml-cfg", "f"])
    check_parsed(parse(PACI), PACI.split())
    for command in (["--yaml-cfg", "f", "--pipeline-schedule", "paci"],
                    ["--pipeline-schedule=paci"]):
        with pytest.raises(ConfigurationError, match="--yaml-cfg: .*Remedy: give the settings"):
            check_parsed(without, command)


@pytest.mark.parametrize("name", ["p2p_communicator", "pg_collection"])
def test_a_multi_module_pipeline_is_refused(name):
    check_call({"p2p_communicator": None, "model": [object()]})
    with pytest.raises(ConfigurationError, match=f"{name}=.*multi-module.*Remedy:"):
        check_call({name: object()})


@pytest.fixture
def newer_megatron(parse, monkeypatch):
    """Arguments that Megatron's parser has and the table does not know."""
    known = arguments.megatron_arguments()
    newer = {
        "overlap_everything": arguments.Argument("--overlap-everything", False),
        "seq_chunks": arguments.Argument("--sequence-chunks", 1),
    }
    monkeypatch.setattr(
        "megatron_paci.compatibility.megatron_arguments", lambda: {**known, **newer}
    )

    def parse_with(text, **values):
        args = parse(text)
        vars(args).update({name: each.default for name, each in newer.items()} | values)
        return args

    return parse_with


def test_a_flag_of_a_newer_megatron_is_refused_unless_accepted(newer_megatron, caplog):
    check(newer_megatron(PACI))  # at its default it changes nothing
    check(newer_megatron(BASE, overlap_everything=True))
    check(newer_megatron(PACI, of_the_launch_script=3))
    args = newer_megatron(PACI, overlap_everything=True, seq_chunks=2)
    assert_refused(args, ["- --overlap-everything: ", "- --sequence-chunks: ",
                          "add --paci-accept-unknown-flags"])
    args.paci_accept_unknown_flags = True
    check(args)
    with caplog.at_level(logging.WARNING):
        warn_unproved(args)
    assert "--overlap-everything, --sequence-chunks" in caplog.text


def test_what_no_test_has_proved_is_named_once(parse, caplog):
    off = ("--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion "
           "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
           "--no-bias-dropout-fusion --no-rope-fusion ")
    with caplog.at_level(logging.WARNING):
        warn_unproved(parse(PACI + off))
        assert not caplog.records
        warn_unproved(parse(PACI + off + "--tp-comm-overlap"))
        assert "together with: overlapped or symmetric tensor" in caplog.text
        caplog.clear()
        warn_unproved(parse(PACI))
    assert len(caplog.records) == 1
    assert "NCCL, Transformer Engine, gradient accumulation fusion, fused kernels;" in caplog.text


def test_what_a_launch_script_sets_by_default_counts(parse):
    from megatron_paci.hooks import _validate_args

    def validate(args, defaults):
        return "validated"

    assert _validate_args(validate, parse(PACI), {"tokenizer_type": "x"}) == "validated"
    with pytest.raises(ConfigurationError, match="te-precision-config-file f"):
        _validate_args(validate, parse(PACI), {"te_precision_config_file": "f"})


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
    args.step_batch_size_schedule = "0:8,256:16,768:24"  # Megatron takes commas too
    assert_refused(args, ["4 or 8 or 12 microbatches"])


@pytest.mark.parametrize("flag", ["--paci-record", "--paci-trace"])
@pytest.mark.parametrize("schedule", ["auto", "paci"])
def test_a_folder_that_cannot_be_written_to_is_refused(parse, tmp_path, flag, schedule):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for folder in ("new/and/deeper", "."):
        check(parse(f"{PACI} --pipeline-schedule {schedule} {flag} {tmp_path / folder}"))
    assert not (tmp_path / "new").exists()
    for folder in ("file", "file/below", "link/below"):
        args = parse(f"{PACI} --pipeline-schedule {schedule} {flag} {tmp_path / folder}")
        assert_refused(args, [f"{flag} {tmp_path / folder}", "another folder"])


def test_a_folder_without_permission_is_refused(parse, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert_refused(parse(f"{PACI} --paci-trace {tmp_path}"), ["--paci-trace", "another folder"])


def test_every_rule_names_a_feature_and_formats(parse):
    args = parse(PACI)
    facts = dict.fromkeys(("counts", "divisors", "flags", "phases_fault", "indivisible"), "x")
    for rule in SELECTION_RULES + PACI_RULES:
        assert rule.feature and rule.arguments and rule.reason.format(args=args, **facts)
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
        "--pipeline-schedule", "--paci-accum", "--paci-accum-schedule", "--paci-extra-in-flight",
        "--paci-defer-step", "--paci-clip", "--paci-nonfinite", "--paci-record",
        "--paci-telemetry", "--paci-trace", "--paci-stall-seconds", "--paci-accept-unknown-flags",
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
