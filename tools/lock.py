"""Write requirements.lock: what a fresh resolve of setup.py's requirements gives today, pinned.

    make lock        (or: python3.12 tools/lock.py)

Resolves the project with the extras `test` and `tensorboard` in an empty environment of Python
3.12, without installing anything. The lock names versions only, no index and no URL: where packages
come from is up to the configuration of pip where it is installed.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import bootstrap

ROOT = Path(bootstrap.ROOT)
EXTRAS = "test,tensorboard"
# What PyTorch asks for on Linux alone; a marker lets the lock be read elsewhere, too.
LINUX_ONLY = re.compile(r"nvidia-|cuda-|triton$")
# Not pip, which every environment has.
LEFT_OUT = {"megatron-paci", "pip"}


def resolve(python):
    """Return {name: version} of all packages that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        venv, report = Path(folder) / "venv", Path(folder) / "report.json"
        subprocess.run([python, "-m", "venv", venv], check=True)
        subprocess.run(
            [venv / "bin" / "python", "-m", "pip", "install", "--dry-run", "-qq", "--no-input",
             "--disable-pip-version-check", "--report", report, f"{ROOT}[{EXTRAS}]"], check=True)
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {}
    for package in packages:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        # A local part ("2.14.1+cpu") names one index's build, which others do not have.
        found[name] = package["metadata"]["version"].partition("+")[0]
    return found


def main():
    """Write the lock and return the exit status."""
    try:
        python = bootstrap.find_python(os.environ)
    except bootstrap.SetupError as error:
        print(f"lock.py: {error}", file=sys.stderr)
        return 1
    print("resolving: this can take some minutes ...", flush=True)
    try:
        found = resolve(python["executable"])
    except subprocess.CalledProcessError as error:
        print(f"lock.py: pip could not resolve setup.py's requirements (exit status "
              f"{error.returncode}); its reason is above.", file=sys.stderr)
        return 1
    lines = [
        "# Every package of the environment, pinned. Made by `make lock`: a fresh resolve of",
        f"# megatron-paci[{EXTRAS}] for Python {python['version']} on {platform.system()} "
        f"{platform.machine()}. Do not edit; change",
        "# setup.py and run `make lock`. Install: pip install -r requirements.lock",
    ]
    for name, version in sorted(found.items()):
        if name not in LEFT_OUT:
            marker = ' ; platform_system == "Linux"' if LINUX_ONLY.match(name) else ""
            lines.append(f"{name}=={version}{marker}")
    (ROOT / "requirements.lock").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"requirements.lock: {len(found) - len(LEFT_OUT & set(found))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
