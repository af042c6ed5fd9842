"""Measures the table of docs/recomputation.md. Run: python docs/recomputation.py

Trains a small GPT on four CPU processes with full recomputation, one layer per block, and compares
what each layer returned in the forward pass with what it returns when it is recomputed for the
backward pass, with newer weights.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STAGES = 4
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1000 --train-iters 60 --clip-grad 1 "
    "--lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --eval-iters 0 "
    "--eval-interval 1000 --seed 1 "
    f"--pipeline-model-parallel-size {STAGES} --rerun-mode disabled"
)
RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
RATES = ("3e-4", "3e-3")
ACCUMULATIONS = (1, 2, 8)
WARM_UP = 80  # microbatches left out
LAST = 10  # iterations whose losses are averaged


class Comparison:
    """Differences between a layer's output and its recomputed output."""

    def __init__(self):
        self.differences: list[float] = []
        self._outputs: dict[object, deque] = {}

    def hook(self, layer, _, output) -> None:
        """Forward hook: a checkpointed forward runs without gradients, a recomputed one with."""
        import torch

        output = output[0].detach()
        outputs = self._outputs.setdefault(layer, deque())
        if not torch.is_grad_enabled():
            outputs.append(output.clone())
            return
        first = outputs.popleft()
        self.differences.append(float((output - first).norm() / first.norm()))


def rank(folder: Path) -> None:
    """Train every run on this rank; write its losses and differences."""
    from megatron_paci.bench.rank import end_with_parent, tear_down
    from megatron_paci.cpu import CpuDevice, cpu_environment, cpu_flags

    end_with_parent()
    os.environ.update(cpu_environment(os.environ))
    CpuDevice().install()
    import megatron_paci
    from megatron_paci.patching import Patch, PatchSet

    for number, run in enumerate(json.loads((folder / "runs.json").read_text())):
        from megatron.core.transformer.transformer_layer import TransformerLayer

        comparison, losses = Comparison(), []

        def watch(original, *args, run=run, comparison=comparison, **kwargs):
            for module in args[1][0].modules():
                if run["recomputes"] and isinstance(module, TransformerLayer):
                    module.register_forward_hook(comparison.hook)
            return original(*args, **kwargs)

        def note(original, *args, losses=losses, **kwargs):
            result = original(*args, **kwargs)
            losses.extend(float(value) for value in result[0].values())
            return result

        training = "megatron.training.training"
        probes = PatchSet(
            (
                Patch(f"{training}:train", watch, (), ""),
                Patch(f"{training}:train_step", note, (), ""),
            )
        )
        os.environ["MASTER_PORT"] = str(run["port"])
        script = str(ROOT / "examples" / "pretrain_gpt.py")
        sys.argv = [script, *run["flags"], *cpu_flags(run["flags"])]
        megatron_paci.install()
        probes.install()
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            probes.uninstall()
            megatron_paci.uninstall()
        tear_down()
        layers = 8 // STAGES
        kept = comparison.differences[WARM_UP * layers :]
        result = {"losses": losses, "difference": sum(kept) / len(kept) if kept else None}
        (folder / f"{number}.rank{os.environ['RANK']}.json").write_text(json.dumps(result))


def main() -> None:
    """Run all settings and print the table as Markdown."""
    from megatron_paci.bench.ranks import run_ranks

    runs = []
    for rate in RATES:
        base = f"{FLAGS} --lr {rate} --min-lr {float(rate) / 10:g}"
        runs.append((rate, None, False, base))
        for accumulation in ACCUMULATIONS:
            paci = f"{base} --pipeline-schedule paci --paci-accum {accumulation}"
            runs += [
                (rate, accumulation, False, paci),
                (rate, accumulation, True, f"{paci} {RECOMPUTE}"),
            ]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(
            STAGES,
            [{"flags": flags.split(), "recomputes": recomputes} for *_, recomputes, flags in runs],
            Path(folder),
            seconds=3600,
            program=[__file__],
        )
    by_run = dict(zip([run[:3] for run in runs], found))

    def loss(*run) -> str:
        losses = by_run[run][-1]["losses"][-LAST:]
        return f"{sum(losses) / len(losses):.4f}"

    print("| lr | a | " + " | ".join(f"stage {stage}" for stage in range(STAGES))
          + " | loss, 1F1B | loss, PACI | loss, PACI with recomputation |")
    print("| --- " * (STAGES + 5) + "|")
    for rate in RATES:
        for a in ACCUMULATIONS:
            differences = [f"{each['difference']:.1e}" for each in by_run[rate, a, True]]
            print(f"| {rate} | {a} | " + " | ".join(differences) + f" | {loss(rate, None, False)} "
                  f"| {loss(rate, a, False)} | {loss(rate, a, True)} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(Path(sys.argv[1]))
    else:
        main()
