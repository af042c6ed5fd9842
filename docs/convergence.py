"""Runs the experiments of docs/convergence.md and makes its tables and figures.

    python docs/convergence.py --list                    # names, runs, what is done
    python docs/convergence.py accumulation --jobs 2     # one experiment, two runs at a time
    python docs/convergence.py accumulation --again      # train it anew, compare with what is kept
    python docs/convergence.py --report                  # renew tables and figures

Each run trains all stages of a pipeline in one process on one core. A run that is done is not
repeated, one that was stopped goes on from its last validation. Results, a few kB each, are kept in
docs/convergence/; the text, logs and states in out/convergence/, and all of --again in
out/convergence/again/.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples import prepare_corpus  # noqa: E402
from megatron_paci.convergence.command import Folders, missing, run  # noqa: E402
from megatron_paci.convergence.experiments import EXPERIMENTS  # noqa: E402
from megatron_paci.convergence.report import (  # noqa: E402
    TIMES,
    renewed,
    repeated,
    table,
    time_table,
)
from megatron_paci.convergence.results import Results  # noqa: E402

FOLDERS = Folders(results=Results(ROOT / "docs/convergence"), work=ROOT / "out/convergence")
AGAIN = ROOT / "out/convergence/again"
PAGE = ROOT / "docs/convergence.md"


def prepare_text(folder: Path) -> None:
    """Write the standard library's text, cut into training and validation, if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}.txt" for split in prepare_corpus.SPLITS}
    if all(path.exists() for path in paths.values()):
        return
    documents, _ = prepare_corpus.read_documents([], max_bytes=0, output=folder)
    splits = prepare_corpus.split_documents(documents, fraction=0.04)
    for split, path in paths.items():
        # By hash, so that neighbours are not from one package.
        text = "".join(text for _, _, text in sorted(splits[split]))
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(text.encode())
        unfinished.rename(path)


def list_experiments() -> None:
    """Print what there is."""
    for experiment in EXPERIMENTS.values():
        left = len(missing([experiment], FOLDERS))
        count = len(experiment.seeded())
        print(f"{experiment.name:14} {count - left:3} of {count:3} runs done  "
              f"{experiment.question}")


def report() -> None:
    """Renew the page and its figures."""
    from megatron_paci.convergence.figures import draw

    for path in draw(FOLDERS.results, ROOT / "docs/images"):
        print(path.relative_to(ROOT))
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), FOLDERS.results), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


def compare_with_kept(names: list[str], again: Results) -> None:
    """Print the tables of what was run again and how far it is from what is kept; draw it."""
    from megatron_paci.convergence.figures import draw

    for name in names:
        print(f"\n{name}\n\n{table(EXPERIMENTS[name], again)}")
        if name in TIMES:
            print(time_table(EXPERIMENTS[name], again))
        print(repeated(EXPERIMENTS[name], again, FOLDERS.results))
    for path in draw(again, AGAIN, names):
        print(path)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(prog="convergence.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("experiments", nargs="*", metavar="NAME",
                        help="experiments to run: " + ", ".join(EXPERIMENTS))
    parser.add_argument("--jobs", type=int, default=1, metavar="J",
                        help="runs at a time, one core each (default: 1)")
    parser.add_argument("--again", action="store_true",
                        help="train anew what is done already, in a folder by itself, and say how "
                             "far it is from the results that are kept")
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument("--report", action="store_true",
                        help="renew the tables and figures of docs/convergence.md")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.experiments if name not in EXPERIMENTS]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: give at least 1")
    if not args.experiments and (args.again or not (args.list or args.report)):
        parser.error("name an experiment, or give --list or --report")
    if args.again and args.report:
        parser.error("--again leaves the page as it is; give --report by itself")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for; return the exit status."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: take the runs along
    failed = []
    folders = Folders(results=Results(AGAIN / "results"), work=AGAIN) if args.again else FOLDERS
    if args.experiments:
        prepare_text(folders.work)
        runs = missing([EXPERIMENTS[name] for name in args.experiments], folders)
        try:
            failed = run(runs, folders, jobs=args.jobs)
        except KeyboardInterrupt:
            print("convergence.py: stopped; the same command goes on", file=sys.stderr)
            return 1
    if args.again:
        compare_with_kept(args.experiments, folders.results)
    if args.list:
        list_experiments()
    if args.report:
        report()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
