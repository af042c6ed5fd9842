"""``simulate --advise``: shapes of models, memory by the published formula, and the choice."""

import json
from dataclasses import replace
from functools import cache

import pytest

from megatron_paci.__main__ import main
from megatron_paci.simulate.advice import Job, candidate, choose, warnings
from megatron_paci.simulate.latency import latency_lines, more_in_flight
from megatron_paci.simulate.learning import gain_with_start
from megatron_paci.simulate.models import MODELS, Model, balanced, stage_costs, static_bytes

GPT = MODELS["gpt2-medium"]
# So many layers that the output layer hardly counts.
DEEP = Model(layers=800, hidden=1024, heads=16, sequence=1024, vocabulary=128, ffn=4096,
             query_groups=16)


def job(model=GPT, stages=8, batch=128, **changes):
    layers = changes.pop("layers", [model.layers // stages] * stages)
    return Job(model=model, stages=stages, batch=batch, layers=layers,
               **{"replicas": 1} | changes)


@pytest.mark.parametrize(
    "name, billions",
    [("gpt2", 0.1244), ("gpt2-medium", 0.355), ("gpt2-large", 0.774), ("gpt2-xl", 1.557),
     ("llama2-7b", 6.74), ("llama2-13b", 13.02), ("llama-1b", 1.236), ("llama-8b", 8.03),
     ("llama-70b", 70.55)],
)
def test_known_models_have_their_published_size(name, billions):
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_activations_follow_the_published_formula():
    s, h, a = 1024, 1024, 16
    assert GPT.layer_activations(width=2, keep_scores=False) == 34 * s * h
    assert GPT.layer_activations(width=2, keep_scores=True) == s * h * 34 + 5 * a * s * s
    # Shared keys and values, and a gated MLP of two and a half times the hidden size.
    model = replace(GPT, query_groups=8, gated=True, ffn=2560)
    expected = s * (2 * (7 * h + 3 * 2560) + 2 * h)
    assert model.layer_activations(width=2, keep_scores=False) == expected


def test_weights_are_where_megatron_puts_them():
    vocabulary = 50304 * 1024  # padded to a multiple of 128
    layer = 12 * 1024**2
    assert GPT.layer_parameters == layer
    place = GPT.stage_parameters
    assert place(3, first=True, last=False) == 3 * layer + vocabulary + 1024 * 1024
    assert place(3, first=False, last=False) == 3 * layer
    assert place(3, first=False, last=True) == 3 * layer + vocabulary
    assert place(3, first=True, last=True) == 3 * layer + vocabulary + 1024 * 1024
    untied = replace(GPT, tied=False)
    assert untied.stage_parameters(3, first=True, last=True) == (
        3 * layer + 2 * vocabulary + 1024 * 1024
    )


def test_bytes_per_weight_are_those_of_megatron():
    def total(**changes):
        given = {"width": 2, "replicas": 4, "distributed_optimizer": False} | changes
        return sum(static_bytes(1000, **given).values())

    assert total() == 18_000
    assert total(distributed_optimizer=True) == 6_000 + 12_000 / 4
    assert total(width=4) == 16_000


def test_the_last_stage_takes_longer_for_the_output_layer():
    forward, gradient, weights = stage_costs(GPT, [3] * 8)
    layer, scores = 12 * 1024**2, 1024**2
    assert forward[:7] == gradient[:0] + [1] * 7
    assert forward[7] == pytest.approx(1 + 50304 * 1024 / (3 * (layer + scores)))
    assert gradient[0] == pytest.approx((layer + 2 * scores) / (layer + scores))
    assert weights[0] == pytest.approx(layer / (layer + scores))


def test_balanced_layers_make_the_slowest_stage_as_fast_as_can_be():
    def slowest(layers):
        return max(map(sum, zip(*stage_costs(GPT, layers))))

    best = balanced(GPT, 8)
    assert sum(best) == 24 and min(best) == 1
    assert slowest(best) < slowest([3] * 8)
    for more in range(8):
        for less in range(8):
            moved = [layers + (stage == more) - (stage == less)
                     for stage, layers in enumerate(best)]
            assert min(moved) == 0 or slowest(moved) >= slowest(best) - 1e-9


def test_even_stages_give_the_speed_ups_of_the_formulas():
    found = candidate(job(DEEP, 8, 128), 16)
    assert found.microbatches == 8 and found.drift_bound == 1 and found.mean_drift == 7 / 8
    speed = found.samples_per_time
    assert speed(found.paci) / speed(found.one_f_one_b) == pytest.approx(15 / 8, rel=1e-3)
    assert speed(found.paci) / speed(found.interleaved) == pytest.approx(23 / 16, rel=1e-3)
    assert candidate(job(DEEP, 8, 128), 32).drift_bound == 2  # ceil(7 / 4)
    assert candidate(job(DEEP, 8, 128), 4).least_accumulation == 8
    assert candidate(job(DEEP, 8, 72), 9).interleaved is not None
    assert candidate(job(DEEP, 8, 72), 8).interleaved is None  # 9 microbatches, 8 stages
    assert candidate(job(GPT, 8, 128), 16).interleaved is None  # 3 layers, 2 chunks


def test_memory_is_weights_and_as_many_microbatches_as_are_in_flight():
    found = candidate(job(), 4)
    layer = 4 * 34 * 1024 * 1024
    first = 18 * GPT.stage_parameters(3, first=True, last=False)
    tokens = 4 * 1024 * (8 + 1024)
    assert found.paci.memory[0] == pytest.approx(first + 8 * (3 * layer + tokens))
    middle = 18 * GPT.stage_parameters(3, first=False, last=False)
    assert found.paci.memory[3] == pytest.approx(middle + 5 * 3 * layer)
    logits = 4 * 1024 * (4 * 1024 + 4 * 50304)
    last = 18 * GPT.stage_parameters(3, first=False, last=True)
    assert found.paci.memory[7] == pytest.approx(last + 3 * layer + logits)
    assert found.one_f_one_b.memory == found.paci.memory


def candidates(speeds=(1.0, 1.0, 1.0), batch=128):
    return [replace(timed(size, batch), relative_speed=speed)
            for size, speed in zip((8, 16, 32), speeds)]


@cache
def timed(size, batch):
    return candidate(job(DEEP, 8, batch), size)


def test_the_choice():
    def size(found, **given):
        return choose(found, **{"measured_speeds": False} | given).microbatch_size

    assert size(candidates()) == 16  # 32 would let drift reach 2
    assert size(candidates(batch=256)) == 32
    # Speeds that follow from the hours of the PACI paper's flush, without its bubble.
    speeds = (0.80, 0.956, 1.0)
    assert size(candidates(speeds), measured_speeds=True) == 16
    assert size(candidates(speeds, batch=256), measured_speeds=True) == 16
    assert size(candidates((0.5, 0.6, 1.0), batch=256), measured_speeds=True) == 32
    limit = max(candidates()[0].paci.memory)
    assert size(candidates(), limit=limit) == 8
    assert choose(candidates(), measured_speeds=False, limit=limit / 2) is None


@pytest.mark.parametrize(
    "stages, batch, size, words",
    [
        (8, 128, 32, ["Delta_max is 2", "of 8 microbatches on the first stage"]),
        (8, 128, 16, []),
        (4, 128, 4, ["32 microbatches are 8 per stage"]),
        (1, 64, 8, ["plain gradient accumulation"]),
    ],
)
def test_warnings_of_even_stages(stages, batch, size, words):
    work = job(DEEP, stages, batch)
    found = warnings(work, candidate(work, size))
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found))


def test_uneven_stages_are_pointed_out_with_a_better_split():
    [found] = warnings(job(), candidate(job(), 16))
    split = ",".join(map(str, balanced(GPT, 8)))
    assert "uneven" in found and f"--layers-per-stage {split}" in found


def test_more_in_flight_is_offered_where_latency_costs_and_as_long_as_it_gains():
    """Even stages with passes of 3: one more per link hides messages of up to half of that."""
    def offers(latency, **given):
        work = job(DEEP, 4, 64, latency=latency)
        return more_in_flight(work, timed_with(work), **given), work

    assert offers(0.0)[0] == [] and latency_lines(offers(0.0)[1], None, []) == []
    small, work = offers(0.01)  # 4 x 3 units in 4 x 3 + 6 x 0.01
    assert small == [] and "leave" in latency_lines(work, timed_with(work), small)[0]
    [one], work = offers(1.0)
    assert one.speed_up == pytest.approx(18 / 12, rel=1e-3)
    assert (one.extra_in_flight, one.in_flight, one.drift_bound) == (1, 7, 2)
    without = timed_with(work).paci
    microbatch = (without.memory[0] - sum(work.static()[0].values())) / 4
    assert one.memory == pytest.approx(without.memory[0] + 3 * microbatch)
    lines = latency_lines(work, timed_with(work), [one])
    assert "Delta_max 1):" in lines[0] and "1.500 times as fast, 7 microb" in lines[1]
    assert "more than there is" not in lines[1]
    first, second = offers(2.0, limit=one.memory)[0]
    # Seven microbatches in the time of four and six messages; ten do not need to wait.
    assert first.speed_up == pytest.approx(7 / 4, rel=1e-3) and first.fits
    assert second.speed_up == pytest.approx(2, rel=1e-3) and not second.fits
    assert "more than there is" in str(second)


def timed_with(work):
    return candidate(work, 16)


def test_the_command_says_what_to_take_and_what_it_assumes(capsys, tmp_path):
    path = tmp_path / "advice.json"
    line = ("simulate --advise --model llama-8b --stages 8 --data-parallel 4 --global-batch 256 "
            f"--microbatch-size 1,2,4 --distributed-optimizer --device-memory 120 --json {path}")
    assert main(line.split()) == 0
    output = capsys.readouterr().out
    assert "Take --micro-batch-size 2 --paci-accum 32." in output
    assert "Assumptions:" in output and "arXiv 2205.05198" in output
    record = json.loads(path.read_text())
    assert record["microbatch_size"] == 2 and record["accumulation"] == 32
    assert [entry["microbatches"] for entry in record["candidates"]] == [64, 32, 16]
    draw = output.split("Draw it: python -m megatron_paci ")[1].splitlines()[0]
    assert draw.endswith("--picture advice.png")
    assert main(draw.split()[:-2]) == 0
    assert "--paci-extra-in-flight" not in output and record["more_in_flight"] == []
    assert main([*line.split(), "--latency", "3"]) == 0
    assert "--paci-extra-in-flight 1: " in capsys.readouterr().out
    assert json.loads(path.read_text())["more_in_flight"][0]["extra_in_flight"] == 1
    line = "simulate --advise --model llama-8b --stages 8 --global-batch 8 --device-memory 1"
    assert main(line.split()) == 0
    assert "No size fits into 1 GB" in capsys.readouterr().out


def test_a_shape_can_be_given_or_changed(capsys):
    given = "--layers 24 --hidden 1024 --heads 16 --sequence 1024 --vocabulary 50257"
    line = "simulate --advise --stages 8 --global-batch 128 --microbatch-size 16"
    assert main([*line.split(), *given.split()]) == 0
    shown = capsys.readouterr().out
    assert "0.354 billion weights" in shown  # learned positions are GPT-2's
    assert main([*line.split(), "--model", "gpt2-medium", "--sequence", "2048"]) == 0
    assert "2048 tokens per sample" in capsys.readouterr().out


def test_the_advice_says_what_a_synchronous_start_costs(capsys):
    line = "simulate --advise --model gpt2-medium --global-batch 128 --microbatch-size 16 --stages"
    assert main([*line.split(), "8"]) == 0
    output = capsys.readouterr().out
    assert "sync:0,8:SAMPLES" in output and "mean drift counts, not its bound alone" in output
    # Even stages: a tenth of the samples at the speed of 1F1B, the rest at 1.875 times that.
    assert gain_with_start(1.875) == pytest.approx(1 / (0.1 + 0.9 / 1.875))
    assert gain_with_start(1.875, part=1.0) == 1.0
    assert main([*line.split(), "1"]) == 0
    assert "synchronous start" not in capsys.readouterr().out
