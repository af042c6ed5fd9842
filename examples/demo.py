"""Train the same small GPT with Megatron's 1F1B schedule and with PACI, and compare.

It is ``python -m megatron_paci compare`` with a model and a corpus that are made here.
Two pipeline stages on two CPU cores; same seed, same data, same number of samples. The corpus is
Python's standard library (examples/prepare_corpus.py). Takes about 4 minutes:

    python examples/demo.py                     # out/demo: report.html, loss.png, records, logs
    python examples/demo.py --iterations 1000   # train longer
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from megatron_paci.compare.command import compare, make_folder  # noqa: E402
from megatron_paci.compare.plan import PlanError, make_plan  # noqa: E402
from megatron_paci.compare.table import comparison_table, speedup_text  # noqa: E402

STAGES, MICROBATCHES, ACCUMULATION, SEED = 2, 4, 4, 1234
MICRO_BATCH, SEQUENCE, ITERATIONS = 2, 128, 300
# The output layer over 4096 tokens costs the last stage as much as one to two layers.
LAYERS = (4, 3)
HIDDEN, HEADS = 192, 6
LEARNING_RATE = 1e-3
SAMPLES = MICRO_BATCH * MICROBATCHES
SCHEDULES = ("1f1b", "paci")
LEAST_ITERATIONS = 20
STALL_SECONDS = 300


class DemoError(Exception):
    """What stopped the demo; the message is for the user."""


def training_flags(*, iterations, corpus):
    """Return the flags of examples/pretrain_gpt.py that both runs share."""
    flags = {
        "pipeline-model-parallel-size": STAGES,
        "num-layers": sum(LAYERS),
        "decoder-first-pipeline-num-layers": LAYERS[0],
        "decoder-last-pipeline-num-layers": LAYERS[1],
        "hidden-size": HIDDEN,
        "num-attention-heads": HEADS,
        "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "disable-bias-linear": None,
        "untie-embeddings-and-output-weights": None,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "micro-batch-size": MICRO_BATCH,
        "global-batch-size": SAMPLES,
        "train-iters": iterations,
        "optimizer": "adam",  # AdamW: Megatron decouples the weight decay
        "lr": LEARNING_RATE,
        "min-lr": LEARNING_RATE / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(1, iterations // 20),
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        # Under PACI a stage knows part of the norm from older windows only. Off, both do the same.
        "clip-grad": 0,
        "seed": SEED,
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": corpus / "tokenizer.model",
        "train-data-path": corpus / "train_text_document",
        "valid-data-path": corpus / "validation_text_document",
        "eval-interval": iterations + 1,  # only at the end
        "eval-iters": 20,
        "log-interval": 1,
    }
    return [
        text for flag, value in flags.items()
        for text in ((f"--{flag}",) if value is None else (f"--{flag}", str(value)))
    ]


def inside(path):
    """Return a resolved path relative to the repository, or as it is if it lies elsewhere."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def read_manifest(corpus):
    """Return the manifest of a corpus, None if it is not there or files of it are missing."""
    try:
        manifest = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))
        return manifest if all((corpus / name).is_file() for name in manifest["sha256"]) else None
    except (OSError, ValueError, KeyError):
        return None


def prepare_corpus(corpus, *, fresh):
    """Build the corpus if it is not there; return its manifest."""
    manifest = None if fresh else read_manifest(corpus)
    if manifest is None:
        print(f"corpus: building it in {inside(corpus)}", flush=True)
        command = [sys.executable, "examples/prepare_corpus.py", "--output", str(inside(corpus))]
        status = subprocess.run(command + ["--force"] * fresh, cwd=ROOT).returncode
        manifest = read_manifest(corpus)
        if status or manifest is None:
            raise DemoError(f"the corpus could not be built (exit status {status}, reason above)")
    return manifest


def demo(args):
    """Train under every schedule, report on both, and return the exit status."""
    os.chdir(ROOT)  # so that commands need no paths of this machine
    try:
        corpus = prepare_corpus(args.corpus, fresh=args.fresh)
    except (DemoError, OSError) as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo.py: stopped", file=sys.stderr)
        return 1
    text = "own texts" if corpus["parameters"]["input"] else "Python's standard library"
    plan = make_plan(
        "examples/pretrain_gpt.py",
        training_flags(iterations=args.iterations, corpus=inside(args.corpus)),
        output=inside(args.output), num_ranks=STAGES, device="cpu", schedules=SCHEDULES,
        only_for={"paci": ["--paci-accum", str(ACCUMULATION)]},
    )
    return compare(
        plan, inside(args.output), title="The same small GPT under 1F1B and PACI", again=True,
        notes={"corpus": f"{text}, {corpus['splits']['train']['tokens']:,} tokens"},
        stall_seconds=STALL_SECONDS, show=show,
    )


def show(report, written):
    """Print the figures of the runs that ended well, and where more is."""
    runs = {name: run for name, run in report["runs"].items() if run["state"] == "done"}
    print(f"\n{comparison_table(runs)}\n\n{speedup_text(runs, cores=report['cores'])}\n")
    for label, name in (("report:", "report.html"), ("plot:  ", "loss.png")):
        print(label, next(path for path in written if path.name == name))


def parse_arguments(argv):
    """Return the parsed and checked command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "out/demo", metavar="DIR",
                        help="folder for the results (default: out/demo)")
    parser.add_argument("--corpus", type=Path, default=ROOT / "out/corpus", metavar="DIR",
                        help="a corpus of prepare_corpus.py; built if it is not there "
                             "(default: out/corpus)")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, metavar="N",
                        help=f"training iterations of {SAMPLES} samples (default: {ITERATIONS})")
    parser.add_argument("--fresh", action="store_true",
                        help="build the corpus anew, from Python's standard library")
    args = parser.parse_args(argv)
    if args.iterations < LEAST_ITERATIONS:
        parser.error(f"--iterations {args.iterations}: give at least {LEAST_ITERATIONS}")
    args.output, args.corpus = args.output.resolve(), args.corpus.resolve()
    try:
        make_folder(args.output)
    except PlanError as error:
        parser.error(str(error))
    return args


def main(argv=None):
    """Run the demo; return the exit status."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: take the ranks along
    return demo(args)


if __name__ == "__main__":
    sys.exit(main())
