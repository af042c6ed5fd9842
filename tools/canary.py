"""Run the tests on another Megatron-Core than the locked one, and say what does not fit.

    make canary VERSION=0.18.2                            a release, fetched from the package index
    make canary MEGATRON_LM=../Megatron-LM                a Megatron-LM checkout
    make canary VERSION=0.20.0 ARGS="tests/unit -x"       only some tests

The release is installed without its dependencies into out/canary/<version>, once. An environment
there puts it in front of the packages of the interpreter that runs this script, which stay as they
are. First every hook is tried; the tests run only if all of them fit, since the plugin refuses to
install otherwise. Exit status: 0 all well, 1 a hook or a test failed, 2 wrong usage.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "out" / "canary"
VERSION = re.compile(r"\d+\.\d+(\.\d+)*((a|b|rc)\d+)?(\.(post|dev)\d+)*")
MARK = "canary: "
# Runs on the other Megatron-Core; the last line it prints is the answer.
PROBE = f"""
import json
import megatron.core
answer = {{"version": megatron.core.__version__, "files": [megatron.core.__file__]}}
answer |= {{"tried": [], "hooks": 0}}
try:
    import megatron.training
    from megatron_paci import compatibility, hooks
    answer["files"].append(megatron.training.__file__)
    answer["version"] = hooks.megatron_version()
    answer["tried"] = compatibility.TRIED_MEGATRON_VERSIONS
    answer["hooks"] = len(hooks.PATCHES.patches)
    answer["problems"] = hooks.PATCHES.problems()
except Exception as error:  # whatever it is, the plugin cannot be installed there
    answer["problems"] = [f"- importing them failed: {{error!r}}"]
print({MARK!r} + json.dumps(answer))
"""


class CanaryError(Exception):
    """What the user can put right; the message holds the reason and the remedy."""


def source(version, checkout):
    """Return (name, checkout or None) of the Megatron-Core that was asked for.

    Args:
        version: A release of megatron-core, or empty.
        checkout: Folder of a Megatron-LM checkout, or empty.

    Raises:
        CanaryError: Not exactly one of them is given, or it is none.
    """
    if bool(version) == bool(checkout):
        raise CanaryError("give either VERSION=<release of megatron-core, such as 0.18.2> or "
                          "MEGATRON_LM=<Megatron-LM checkout>"
                          + (", not both" if version else ""))
    if version:
        if not VERSION.fullmatch(version):
            raise CanaryError(f"VERSION={version} is no version; give one such as 0.18.2")
        return version, None
    path = Path(checkout).resolve()
    if not (path / "megatron" / "core" / "package_info.py").is_file():
        raise CanaryError(f"MEGATRON_LM={checkout} is no Megatron-LM checkout: there is no "
                          "megatron/core in it")
    return "checkout", path


def install(version, folder):
    """Install a release into ``folder``, unless it is there; return the folder.

    Raises:
        CanaryError: pip could not; the message says what pip said.
    """
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(folder.name + ".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    print(f"installing megatron-core {version}", flush=True)
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet",
         "--disable-pip-version-check", "--target", unfinished, f"megatron-core=={version}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CanaryError(f"megatron-core {version} could not be installed; pip said:\n"
                          + shorten(pip.stdout))
    unfinished.rename(folder)
    return folder


def shorten(output):
    """Return pip's errors, and of a list of all versions there are the last five."""
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")]
    return re.sub(r"from versions: .*, (([^,]+, ){4}[^,]+\))", r"the newest: \1",
                  "\n".join(lines) or output.strip())


def environment(folder, packages):
    """Make an environment in ``folder`` that finds ``packages`` first; return its interpreter.

    Behind them come the packages of the interpreter at hand. Processes that the tests start get
    the same, whatever they do with PYTHONPATH.
    """
    venv.create(folder, clear=True, symlinks=True)
    settings = sysconfig.get_paths("venv", vars={"base": str(folder), "platbase": str(folder)})
    present = sysconfig.get_path("purelib")
    # Lines of such a file are read in order: a folder to search, then a statement to run.
    Path(settings["purelib"], "canary.pth").write_text(
        f"{packages}\nimport site; site.addsitedir({present!r})\n", encoding="utf-8")
    return Path(settings["scripts"], "python")


def probe(python, packages):
    """Return the answer of ``PROBE`` under ``python``.

    Raises:
        CanaryError: Megatron cannot be imported, or another one than that of ``packages`` was.
    """
    process = subprocess.run([python, "-c", PROBE], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    if process.returncode or not lines:
        raise CanaryError(f"this Megatron-Core does not start:\n{process.stderr.strip()}")
    answer = json.loads(lines[-1].removeprefix(MARK))
    for file in answer["files"]:
        if not Path(file).resolve().is_relative_to(Path(packages).resolve()):
            raise CanaryError(f"{file} was imported instead of one in {packages}; unset "
                              "PYTHONPATH, and see whether that Megatron has megatron.training")
    return answer


def count(report):
    """Return ({"passed": n, "failed": n, "skipped": n}, failed tests) of pytest's XML report."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if outcomes & {"failure", "error"}:
            failed[name] = None  # a test that fails and whose teardown fails is in it twice
        else:
            counts["skipped" if "skipped" in outcomes else "passed"] += 1
    counts["failed"] = len(failed)
    return counts, list(failed)


def summary(answer, counts, failed):
    """Return the lines that tell the outcome.

    Args:
        answer: What ``probe`` has returned.
        counts: What ``count`` has returned, None if no test was run.
        failed: Names of the failed tests.
    """
    tried = answer["tried"]
    lines = [f"Megatron-Core {answer['version']}" + (
        "" if answer["version"] in tried else
        f" (untried: the plugin warns; tried are {', '.join(tried) or 'unknown'})")]
    if answer["problems"]:
        lines += ["hooks: these do not fit", *answer["problems"]]
    else:
        lines += [f"hooks: all {answer['hooks']} fit"]
    if counts is None:
        return [*lines, "tests: not run"]
    lines += ["tests: " + ", ".join(f"{number} {name}" for name, number in counts.items())]
    return lines + [f"- {name}" for name in failed]


def run(version, checkout, arguments):
    """Try the hooks, run the tests, print the summary; return the exit status."""
    name, packages = source(version, checkout)
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    environ = {key: value for key, value in os.environ.items() if key != "MEGATRON_LM"}
    if packages is None:
        packages = install(version, folder / "core")
    else:
        environ["MEGATRON_LM"] = str(packages)  # also run its own launch script
    python = environment(folder / "environment", packages)
    answer = probe(python, packages)
    counts, failed, status = None, [], 1
    if not answer["problems"]:
        report = folder / "tests.xml"
        report.unlink(missing_ok=True)
        status = subprocess.run(
            [python, "-m", "pytest", f"--junitxml={report}", *arguments], cwd=ROOT, env=environ
        ).returncode
        if report.exists():
            counts, failed = count(report)
    print("\n" + "\n".join(summary(answer, counts, failed)))
    return int(status != 0)


def main(arguments=None):
    """Run the command line; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="", help="release of megatron-core")
    parser.add_argument("--megatron-lm", default="", help="Megatron-LM checkout")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind --")
    options = parser.parse_args(arguments)
    try:
        return run(options.version.strip(), options.megatron_lm.strip(), options.pytest)
    except CanaryError as error:
        sys.stderr.write(f"megatron_paci: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
