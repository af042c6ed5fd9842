"""``python -m megatron_paci simulate --advise``: its flags, and the advice as text and data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_paci.simulate.advice import Candidate, Job, candidate, choose, warnings
from megatron_paci.simulate.figures import MOST_PASSES
from megatron_paci.simulate.latency import MoreInFlight, latency_lines, more_in_flight
from megatron_paci.simulate.learning import learning_lines
from megatron_paci.simulate.models import MODELS, Model
from megatron_paci.simulate.reading import Reader
from megatron_paci.simulate.text import number, table

SHAPE = ("layers", "hidden", "heads", "sequence", "vocabulary")
# Flags, whether they take a value (its name) and their help.
ADVICE_FLAGS = {
    "model": ("NAME", f"shape of a known model: {', '.join(MODELS)}"),
    "layers": ("L", "layers; with --model any of these replaces what the model has"),
    "hidden": ("H", "hidden size"),
    "heads": ("A", "attention heads"),
    "sequence": ("S", "tokens per sample"),
    "vocabulary": ("V", "vocabulary size"),
    "ffn": ("F", "hidden size of the MLP (default: 4 H)"),
    "query-groups": ("G", "key and value heads (default: A)"),
    "gated": (None, "the MLP is gated, as SwiGLU"),
    "untied": (None, "the output layer has weights of its own"),
    "global-batch": ("B", "samples per update (required)"),
    "microbatch-size": ("B[,B...]", "sizes to compare (default: powers of 2 up to 32 that fit)"),
    "relative-speed": (
        "X[,X...]",
        "measured samples per second of a stage with each of these sizes, in any unit (default: "
        "all alike)",
    ),
    "data-parallel": ("D", "copies of the pipeline (default: 1)"),
    "distributed-optimizer": (None, "the optimizer state is shared among them"),
    "layers-per-stage": ("L[,L...]", "layers on each stage (default: equal shares)"),
    "dtype-bytes": ("{2,4}", "bytes of a weight or an activation (default: 2)"),
    "keep-attention-scores": (None, "attention keeps its scores; flash attention does not"),
    "device-memory": ("GB", "memory of a device, 10^9 bytes; larger choices are left out"),
}
GB = 1e9

ASSUMPTIONS = """\
Assumptions:
- Time is proportional to matrix multiplications; the input embedding, norms, the optimizer step and
  collectives take none. A backward takes its input's and its weights' gradient one after another.
- Interleaved: each chunk takes the same part of its stage's time.
- {speeds}
- Memory: {width}-byte weights, fp32 gradients, Adam{shared};
  activations by the formula of arXiv 2205.05198, which Megatron uses for its own report, too;
  {scores}; no recomputation, no tensor parallelism, no fragmentation.
- Whether a delayed update costs quality is not in here: compare before you rely on it."""


def add_advice_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--advise`` and what belongs to it."""
    group = parser.add_argument_group(
        "advice for a model",
        "needs --stages, --global-batch and a shape: --model, or "
        + ", ".join(f"--{name}" for name in SHAPE) + ". --latency is in forwards of a stage.",
    )
    group.add_argument("--advise", action="store_true",
                       help="say which microbatch size and which a to take")
    for name, (metavar, text) in ADVICE_FLAGS.items():
        if metavar is None:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", metavar=metavar, help=text)


def run_advice(options: argparse.Namespace, read: Reader) -> tuple[str, dict, Any] | None:
    """Return the text, the record and a function that draws nothing; None if there are problems."""
    job, sizes, speeds, limit = _read(options, read)
    if read.problems:
        return None
    candidates = [
        candidate(job, size, relative_speed=float(speed / max(speeds)))
        for size, speed in zip(sizes, speeds)
    ]
    measured = options.relative_speed is not None
    in_bytes = limit and limit * GB
    chosen = choose(candidates, measured_speeds=measured, limit=in_bytes)
    notes = warnings(job, chosen) if chosen else []
    offers = more_in_flight(job, chosen, limit=in_bytes) if chosen else []
    best = max(entry.samples_per_time(entry.one_f_one_b) for entry in candidates)
    result = {
        "job": asdict(job),
        "candidates": [asdict(entry) | _ratios(entry, best) for entry in candidates],
        "microbatch_size": chosen and chosen.microbatch_size,
        "accumulation": chosen and chosen.microbatches,
        "more_in_flight": [asdict(offer) for offer in offers],
        "warnings": notes,
    }
    text = _text(job, candidates, chosen, offers, notes, best, limit, measured=measured)
    return text, result, lambda: None


def _read(
    options: argparse.Namespace, read: Reader
) -> tuple[Job, list[int], list[float], float | None]:
    model = _read_model(options, read)
    for flag, text in (("stages", options.stages), ("global-batch", options.global_batch)):
        if text is None:
            read.problems.append(f"--{flag} is missing; give a whole number of 1 or more")
    n = read.whole("stages", options.stages, 1)
    replicas = read.whole("data-parallel", options.data_parallel, 1)
    batch = read.whole("global-batch", options.global_batch, replicas)
    if batch % replicas:
        read.refuse("global-batch", batch, f"not a multiple of --data-parallel {replicas}; take "
                                           f"e.g. {(batch // replicas + 1) * replicas}")
    share = max(1, batch // replicas)
    fitting = [
        size for size in (2**k for k in range(6))
        if share % size == 0 and n * (share // size) <= MOST_PASSES
    ]
    sizes = read.wholes("microbatch-size", options.microbatch_size, fitting)
    for size in sizes:
        if share % size:
            read.refuse("microbatch-size", size, f"does not divide the {share} samples of each "
                        "replica per update; take some of its divisors")
        elif n * (share // size) > MOST_PASSES:
            read.refuse("microbatch-size", size, f"makes {share // size} microbatches per update, "
                        "too many to time; take larger ones")
    if not sizes:
        read.problems.append("--microbatch-size: no power of 2 up to 32 makes few enough "
                             "microbatches per update to time; give larger ones")
    speeds = [1.0] * len(sizes)
    if options.relative_speed is not None:
        if len(options.relative_speed.split(",")) == len(sizes):
            speeds = read.stages("relative-speed", options.relative_speed, len(sizes), 1)
        if len(options.relative_speed.split(",")) != len(sizes) or not all(speeds):
            read.refuse("relative-speed", options.relative_speed,
                        f"give a number above 0 for each of the {len(sizes)} microbatch sizes")
    width = read.whole("dtype-bytes", options.dtype_bytes, 2)
    if width not in (2, 4):
        read.refuse("dtype-bytes", width, "give 2 (bf16, fp16) or 4 (fp32)")
    limit = None
    if options.device_memory is not None:
        limit = float(read.number("device-memory", options.device_memory, 1))
        if not limit:
            read.refuse("device-memory", options.device_memory, "give more than 0")
    job = Job(
        model=model, stages=n, replicas=replicas, batch=batch, width=width,
        layers=_read_layers(options, read, model, n),
        distributed_optimizer=options.distributed_optimizer,
        keep_scores=options.keep_attention_scores,
        chunks=read.whole("chunks", options.chunks, 2, least=2),
        latency=float(read.number("latency", options.latency, 0)),
    )
    return job, sizes, speeds, limit


def _read_model(options: argparse.Namespace, read: Reader) -> Model:
    given = {
        flag: read.whole(flag, getattr(options, flag.replace("-", "_")), 1)
        for flag in (*SHAPE, "ffn", "query-groups")
        if getattr(options, flag.replace("-", "_")) is not None
    }
    some = MODELS["gpt2"]
    if options.model is not None:
        if options.model not in MODELS:
            read.refuse("model", options.model, "unknown; take one of " + ", ".join(MODELS)
                        + ", or give " + ", ".join(f"--{name}" for name in SHAPE))
        base = MODELS.get(options.model, some)
    elif missing := [f"--{name}" for name in SHAPE if name not in given]:
        read.problems.append(f"{', '.join(missing)}: missing; give them, or --model with one of "
                             + ", ".join(MODELS))
        return some
    else:
        hidden, heads = given["hidden"], given["heads"]
        base = Model(**{name: given[name] for name in SHAPE}, ffn=4 * hidden, query_groups=heads)
    changes = {name.replace("-", "_"): value for name, value in given.items()}
    if options.model is not None:
        # What follows from the hidden size and the heads goes along with them.
        if "hidden" in given and "ffn" not in given:
            changes["ffn"] = round(base.ffn * given["hidden"] / base.hidden)
        if "heads" in given and "query-groups" not in given:
            changes["query_groups"] = max(1, base.query_groups * given["heads"] // base.heads)
    model = replace(
        base, **changes, gated=base.gated or options.gated, tied=base.tied and not options.untied
    )
    if model.hidden % model.heads:
        read.refuse("heads", model.heads, f"does not divide the hidden size {model.hidden}; "
                    "give a divisor of it")
    if model.heads % model.query_groups:
        read.refuse("query-groups", model.query_groups,
                    f"does not divide {model.heads} heads; give a divisor of that")
    return model


def _read_layers(
    options: argparse.Namespace, read: Reader, model: Model, n: int
) -> list[int]:
    if options.layers_per_stage is not None:
        layers = read.wholes("layers-per-stage", options.layers_per_stage, [1] * n)
        if len(layers) != n or sum(layers) != model.layers:
            read.refuse("layers-per-stage", options.layers_per_stage,
                        f"give {n} numbers that add up to {model.layers}")
        return layers
    if model.layers % n and not read.problems:
        parts = [model.layers // n + (stage < model.layers % n) for stage in range(n)]
        remedy = (
            f"give e.g. --layers-per-stage {','.join(map(str, parts))}" if all(parts)
            else f"give at most {model.layers}"
        )
        read.refuse("stages", n, f"{model.layers} layers do not divide into them; {remedy}")
    return [max(1, model.layers // n)] * n


def _ratios(entry: Candidate, best: float) -> dict[str, float | None]:
    """Return how much faster PACI is than others."""
    paci = entry.samples_per_time(entry.paci)
    return {
        "over_1f1b": paci / entry.samples_per_time(entry.one_f_one_b),
        "over_interleaved":
            entry.interleaved and paci / entry.samples_per_time(entry.interleaved),
        "over_best_1f1b": paci / best,
    }


def _text(
    job: Job, candidates: Sequence[Candidate], chosen: Candidate | None,
    offers: list[MoreInFlight], notes: Sequence[str], best: float, limit: float | None, *,
    measured: bool,
) -> str:
    model = job.model
    rows = [("microbatch size", "m = a", "Delta_max", "mean drift", "/ 1F1B", "/ interleaved",
             "/ best 1F1B", "GB PACI", "GB 1F1B", "GB interleaved")]
    for entry in candidates:
        ratios = _ratios(entry, best)
        shown = [f"{value:.3f}" if value else "-" for value in ratios.values()]
        memory = [
            f"{float(max(figures.memory)) / GB:.1f}" if figures else "-"
            for figures in (entry.paci, entry.one_f_one_b, entry.interleaved)
        ]
        rows.append((str(entry.microbatch_size), str(entry.microbatches), str(entry.drift_bound),
                     f"{entry.mean_drift:.2f}", *shown, *memory))
    lines = [
        f"{model.layers} layers of hidden size {model.hidden}, {model.parameters / 1e9:.3g} "
        f"billion weights, {model.sequence} tokens per sample",
        f"{job.stages} stages with {','.join(map(str, job.layers))} layers, {job.replicas} "
        f"replica{'s' * (job.replicas > 1)}, {job.batch} samples per update", "",
        "Throughput of PACI over other schedules, and memory of the fullest stage",
        table(rows),
        *(["interleaved cannot run where there is a dash: it needs microbatches in a multiple of "
           f"the stages and the layers of every stage in a multiple of --chunks {job.chunks}"]
          if not all(entry.interleaved for entry in candidates) else []),
        "",
    ]
    if chosen is None:
        lines.append(f"No size fits into {number(limit)} GB. Take smaller microbatches, more "
                     "stages, recomputation, tensor parallelism or --distributed-optimizer.")
    else:
        lines += _recommendation(job, chosen) + learning_lines(job, chosen)
        lines += latency_lines(job, chosen, offers)
    lines += [f"Warning: {note}" for note in notes]
    lines.append(ASSUMPTIONS.format(
        speeds="The given relative speeds hold for forwards and backwards alike." if measured else
        "All microbatch sizes take equally long per sample (--relative-speed changes that).",
        width=job.width,
        shared=", its state shared among replicas" if job.distributed_optimizer else "",
        scores="attention keeps its scores" if job.keep_scores else "attention keeps no scores",
    ))
    return "\n".join(lines) + "\n"


def _recommendation(job: Job, chosen: Candidate) -> list[str]:
    rows = [("stage", "layers", "time", "busy", "weights", "gradients", "optimizer", "activations",
             "GB in all")]
    costs = job.costs
    for stage, parts in enumerate(job.static()):
        held = [value / GB for value in parts.values()]
        total = float(chosen.paci.memory[stage]) / GB
        time = costs.forward[stage] + costs.backward_input[stage] + costs.backward_weight[stage]
        rows.append((
            str(stage), str(job.layers[stage]), f"{time:.2f}",
            f"{float(chosen.paci.utilization[stage]):.3f}",
            *(f"{value:.2f}" for value in (*held, total - sum(held), total)),
        ))
    least = chosen.least_accumulation
    more = (
        f"Any a from {least} on that divides {chosen.microbatches} keeps Delta_max at "
        f"{-(-(job.stages - 1) // least)}, but a smaller one makes more updates from fewer samples "
        "each." if least < chosen.microbatches else
        "One update per global batch, as under 1F1B."
    )
    draw = " ".join([
        "python -m megatron_paci simulate", f"--stages {job.stages}",
        f"--microbatches {chosen.microbatches}", "--schedules 1f1b,paci",
        *(f"--{flag} {','.join(f'{value:.4g}' for value in values)}" for flag, values in (
            ("forward", costs.forward), ("backward-input", costs.backward_input),
            ("backward-weight", costs.backward_weight))),
        *([f"--latency {job.latency:g}"] if job.latency else []), "--picture advice.png",
    ])
    return [
        f"Take --micro-batch-size {chosen.microbatch_size} --paci-accum {chosen.microbatches}. "
        + more,
        "", "Each stage under PACI (time of a microbatch in forwards of an average stage, GB)",
        table(rows), "", f"Draw it: {draw}", "",
    ]
