"""Train the same small GPT with Megatron's 1F1B schedule and with PACI, and compare.

Two pipeline stages on two CPU cores; same seed, same data, same number of samples. The corpus is
Python's standard library (examples/prepare_corpus.py). Takes about 4 minutes:

    python examples/demo.py                     # out/demo: report.json, loss.png, records, logs
    python examples/demo.py --iterations 1000   # train longer
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

from megatron_paci import __version__, plots, report_runs  # noqa: E402

STAGES, MICROBATCHES, ACCUMULATION, SEED = 2, 4, 4, 1234
MICRO_BATCH, SEQUENCE, ITERATIONS = 2, 128, 300
# The output layer over 4096 tokens costs the last stage as much as one to two layers.
LAYERS = (4, 3)
HIDDEN, HEADS = 192, 6
LEARNING_RATE = 1e-3
SAMPLES = MICRO_BATCH * MICROBATCHES
SCHEDULES = {"1f1b": [], "paci": ["--paci-accum", str(ACCUMULATION)]}
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


def launch_command(schedule, *, flags, record):
    """Return the command line of one run."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(STAGES), "-m", "megatron_paci", "run", "--device", "cpu", "examples/pretrain_gpt.py",
        *flags, "--pipeline-schedule", schedule, *SCHEDULES[schedule], "--paci-record", str(record),
    ]


def public_command(command):
    """Return a command line as text, without this machine's paths outside the repository."""
    shown = ["python" if text == sys.executable else Path(text).name if os.path.isabs(text)
             else text for text in command]
    return shlex.join(shown)


def inside(path):
    """Return a resolved path relative to the repository, or as it is if it lies elsewhere."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def train(schedule, *, command, log, iterations):
    """Run one training with a progress bar.

    Raises:
        DemoError: It failed or wrote nothing for STALL_SECONDS.
    """
    label = report_runs.LABELS[schedule]
    print(f"{label}: {iterations} iterations, log in {inside(log)}", flush=True)
    with (
        open(log, "wb") as out,
        open(log, encoding="utf-8", errors="replace") as lines,
        tqdm(desc=label, total=iterations, unit="it", disable=None, dynamic_ncols=True) as bar,
    ):
        bar.set_postfix_str("starting")
        process = subprocess.Popen(
            command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            heard, rest = time.monotonic(), ""
            while True:
                ended = process.poll() is not None  # before reading, so that nothing is missed
                text = lines.read()
                if text:
                    heard = time.monotonic()
                *whole, rest = (rest + text).split("\n")
                for found in filter(None, map(report_runs.progress, whole)):
                    if not bar.n:
                        bar.reset()  # the time left follows from iterations, not from start-up
                    bar.set_postfix_str(f"loss {found[1]:.2f}", refresh=False)
                    bar.update(found[0] - bar.n)
                if ended:
                    break
                if time.monotonic() - heard > STALL_SECONDS:
                    raise DemoError(f"{label} wrote nothing for {STALL_SECONDS} s and was stopped; "
                                    f"see {inside(log)}")
                time.sleep(0.2)
        finally:
            stop(process)
    if process.returncode:
        text = Path(log).read_text(encoding="utf-8", errors="replace")
        raise DemoError(f"{label} failed with exit status {process.returncode}. The end of "
                        f"{inside(log)}:\n\n{report_runs.failure(text)}")


def stop(process):
    """End a run that still goes on, ranks included."""
    if process.poll() is None:
        # The ranks are in sessions of their own. The launcher takes them along, by force after
        # 30 s, if it is left to: no second Ctrl-C may cut this short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        process.terminate()
        try:
            process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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


def build_report(runs, *, iterations, corpus):
    """Return the contents of report.json; ``corpus`` is the manifest of the corpus."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions, "megatron_paci": __version__},
        "cores": len(os.sched_getaffinity(0)),
        "seed": SEED,
        "iterations": iterations,
        "samples_per_iteration": SAMPLES,
        "tokens_per_iteration": SAMPLES * SEQUENCE,
        "num_stages": STAGES,
        "num_microbatches": MICROBATCHES,
        "accumulation": ACCUMULATION,
        "speedup": report_runs.speedup(runs, stages=STAGES, microbatches=MICROBATCHES),
        "corpus": {
            "text": "own texts" if corpus["parameters"]["input"] else "Python's standard library",
            "vocabulary": corpus["parameters"]["vocab_size"],
            "splits": corpus["splits"],
        },
        "runs": runs,
    }


def write_results(report, output):
    """Write report.json and loss.png."""
    (output / "report.json").write_text(report_runs.to_json(report), encoding="utf-8")
    parameters = sum(stage["parameters"] for stage in next(iter(report["runs"].values()))["bytes"])
    names = " and ".join(report_runs.LABELS[name] for name in report["runs"])
    plots.plot_losses(
        report["runs"], output / "loss.png",
        title=f"The same small GPT under {names}",
        subtitle=f"{parameters / 4e6:.1f}M parameters, {sum(LAYERS)} layers, sequence {SEQUENCE}, "
                 f"on {report['corpus']['text']}; {STAGES} pipeline stages on CPU cores, "
                 f"m = {MICROBATCHES} microbatches, a = {ACCUMULATION}",
    )


def demo(args):
    """Train under every schedule, report after each, and return the exit status."""
    for name in ["report.json", "loss.png", *SCHEDULES]:  # no older result is taken for this one
        for stale in [args.output / name, *args.output.glob(f"{name}/rank*.json")]:
            if stale.is_file():
                stale.unlink()
    runs, error, report = {}, None, None
    try:
        corpus = prepare_corpus(args.corpus, fresh=args.fresh)
        flags = training_flags(iterations=args.iterations, corpus=inside(args.corpus))
        for schedule in SCHEDULES:
            record = args.output / schedule
            command = launch_command(schedule, flags=flags, record=inside(record))
            train(schedule, command=command, log=args.output / f"{schedule}.log",
                  iterations=args.iterations)
            runs[schedule] = report_runs.run_figures(
                report_runs.read_records(record), samples_per_iteration=SAMPLES,
                sequence_length=SEQUENCE)
            runs[schedule]["command"] = public_command(command)
            report = build_report(runs, iterations=args.iterations, corpus=corpus)
            write_results(report, args.output)
    except (DemoError, report_runs.RecordError, OSError) as caught:
        error = f"demo.py: error: {caught}"
    except KeyboardInterrupt:
        error = "demo.py: stopped"
    if report:
        print(f"\n{report_runs.comparison_table(runs)}\n\n{report_runs.speedup_text(report)}")
        print(f"\nreport: {inside(args.output / 'report.json')}\n"
              f"plot:   {inside(args.output / 'loss.png')}")
    if error:
        print(error, file=sys.stderr)
    return 1 if error else 0


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
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / ".writable").touch()
        (args.output / ".writable").unlink()
    except OSError as error:
        parser.error(f"--output {args.output}: cannot write there ({error.strerror}); choose "
                     "another folder")
    return args


def main(argv=None):
    """Run the demo; return the exit status."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: take the ranks along
    return demo(args)


if __name__ == "__main__":
    sys.exit(main())
