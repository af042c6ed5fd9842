"""Set up the project's environment: `.venv` with the locked packages and the project, editable.

    python3 tools/bootstrap.py        (what `make demo` and `make test` call first)

Runs on any Python from 3.6 on, with the standard library alone, and looks for an interpreter new
enough for the project: $PYTHON if set, and nothing else then; otherwise 3.12 (the lock was made for
it), 3.13 and 3.14, from PATH and from pyenv's versions; last python3 and python. Each is started
before it is believed: a file of that name may be a pyenv shim whose version is not active.

Where everything is in place, it returns within a blink. What is out of date is brought up to date,
and an installation that was interrupted is done again from the start.
"""

import fcntl
import glob
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST = (3, 12)
PREFERRED = ("3.12", "3.13", "3.14")
PYENV_ROOTS = ("~/.pyenv", "/opt/pyenv", "/usr/local/pyenv")
INPUTS = ("requirements.lock", "setup.py", os.path.join("megatron_paci", "version.py"))
STAMP = "megatron_paci.json"  # in .venv: whose it is, made from what, and whether it is complete
NEEDED_BYTES = 8 * 10**9
# Runs on any Python, 2.7 included, so that one too old can say so.
PROBE = """
import json, struct, sys, sysconfig
missing = []
for name in ("venv", "ensurepip"):
    try: __import__(name)
    except ImportError: missing.append(name)
print(json.dumps({"version": list(sys.version_info[:3]), "executable": sys.executable,
    "bits": 8 * struct.calcsize("P"), "missing": missing,
    "standard": getattr(getattr(sys, "implementation", None), "name", "") == "cpython"
        and not sysconfig.get_config_var("Py_GIL_DISABLED")}))
"""


class SetupError(Exception):
    """What the user can put right; the message holds the reason and the remedy, on one line."""


def probe(python):
    """Start `python` and return (what it says of itself, None), or (None, why it will not do)."""
    try:
        process = subprocess.Popen([python, "-E", "-c", PROBE], universal_newlines=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            output, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None, "does not answer"
    except OSError as error:
        return None, "does not start (%s)" % error.strerror
    if process.returncode:
        return None, "does not start (exit status %d)" % process.returncode
    try:
        info = json.loads(output)
        version = ".".join(map(str, info["version"]))
        if tuple(info["version"]) < OLDEST:
            return None, "is Python %s, older than %d.%d" % ((version,) + OLDEST)
        if info["missing"]:
            return None, "has no %s (on Debian and Ubuntu: apt install python%d.%d-venv)" % (
                " and no ".join(info["missing"]), info["version"][0], info["version"][1])
        if info["bits"] != 64 or not info["standard"]:
            return None, "is not a 64-bit CPython (with the global lock), as the packages need"
        return {"executable": info["executable"], "version": version}, None
    except (ValueError, KeyError, TypeError):
        return None, "does not answer as a Python does"


def candidates(environ, pyenv_roots=PYENV_ROOTS):
    """Yield paths of interpreters that may do, the best first."""
    path = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    roots = [environ["PYENV_ROOT"]] if environ.get("PYENV_ROOT") else []
    roots += [os.path.expanduser(root) for root in pyenv_roots]
    for version in PREFERRED:
        for folder in path:
            yield os.path.join(folder, "python" + version)
        for root in roots:
            # Release versions only: a name such as 3.13.0t is another build.
            found = [(int(match.group(1)), match.group(0)) for match in (
                re.match(r".*/%s\.(\d+)/bin/python$" % re.escape(version), name)
                for name in glob.glob(os.path.join(root, "versions", version + ".*/bin/python")))
                if match]
            for _, name in sorted(found, reverse=True):
                yield name
    for name in ("python3", "python"):
        for folder in path:
            yield os.path.join(folder, name)


def find_python(environ, pyenv_roots=PYENV_ROOTS):
    """Return {"executable", "version"} of the best interpreter that really runs.

    Raises:
        SetupError: $PYTHON will not do, or there is none.
    """
    explicit = environ.get("PYTHON")
    if explicit:
        info, problem = probe(explicit)
        if problem:
            raise SetupError("PYTHON=%s %s. Set PYTHON to a Python %d.%d or newer, or unset it to "
                             "have one looked for." % ((explicit, problem) + OLDEST))
        return info
    failed, tried = [], set()
    for path in candidates(environ, pyenv_roots):
        if path in tried or not os.access(path, os.X_OK) or os.path.isdir(path):
            continue
        tried.add(path)
        info, problem = probe(path)
        if not problem:
            return info
        failed.append("%s %s" % (path, problem))
    raise SetupError(
        "no Python %d.%d or newer that works (%s). Install Python 3.12 with its venv module (pyenv "
        "install 3.12, or apt install python3.12-venv), or set PYTHON to the path of one."
        % (OLDEST + ("; ".join(failed) or "none found",)))


def fingerprint(root):
    """Return the hash of what the environment is made from."""
    digest = hashlib.sha256()
    for name in INPUTS:
        with open(os.path.join(root, name), "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def read_stamp(venv):
    """Return the stamp of an environment; None if there is none, {} if it cannot be read."""
    try:
        with open(os.path.join(venv, STAMP)) as file:
            stamp = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        stamp = {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv, stamp):
    """Write the stamp so that it is there as a whole or not at all."""
    path = os.path.join(venv, STAMP)
    with open(path + ".new", "w") as file:
        json.dump(stamp, file)
    os.replace(path + ".new", path)


class Progress:
    """One updating line on a terminal; elsewhere a line whenever some seconds have passed."""

    def __init__(self, stream, interval=5.0):
        self.stream, self.interval = stream, interval
        self.terminal = stream.isatty()
        self.start = self.shown = time.monotonic()
        self.width = 0

    def show(self, text, force=False):
        """Show `text` and the time since the start."""
        now = time.monotonic()
        text = "%s (%d s)" % (text, now - self.start)
        if self.terminal:
            text = text[:shutil.get_terminal_size().columns - 1]
            self.stream.write("\r" + text.ljust(self.width))
            self.width = len(text)
        elif force or now - self.shown >= self.interval:
            self.stream.write(text + "\n")
            self.shown = now
        self.stream.flush()

    def close(self, text):
        """Show the last line."""
        self.show(text, force=True)
        if self.terminal:
            self.stream.write("\n")


def run(command, log, progress, label, total, environ):
    """Run one step (pip, as a rule), its output to `log`, a summary of it to `progress`.

    Raises:
        SetupError: it failed.
    """
    # It inherits the lock: should this script be killed, the next one waits until pip has ended.
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, universal_newlines=True, errors="replace", close_fds=False)
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    text, count, tail = label, 0, []
    progress.show(text, force=True)
    try:
        while True:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                progress.show(text)  # pip may be silent for a minute: show that time goes on
                continue
            if line is None:
                break
            log.write(line)
            tail = (tail + [line.rstrip()])[-15:]
            words = line.split()
            if words[:1] == ["Collecting"]:
                count += 1
                text = "%s: %d of %d, %s" % (label, min(count, total), total, words[1])
            elif words[:1] == ["Downloading"] and len(words) >= 4:
                text = "%s: %d of %d, %s %s" % (
                    label, min(count, total), total, words[1].split("/")[-1].split("-")[0],
                    " ".join(words[2:4]))
            elif line.startswith("Installing collected"):
                text = "%s: unpacking%s" % (label, ", this takes a minute" * (total > 1))
                progress.show(text, force=True)
            progress.show(text)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
    if process.returncode:
        progress.close(label + ": failed")
        sys.stderr.write("\n".join(tail) + "\n")
        raise SetupError(
            "%s: failed with exit status %d; all the output is in %s. If the package index could "
            "not be reached or the disk is full, put that right, and run this again."
            % (label, process.returncode, log.name))


def install(root, python, fresh, stream):
    """Make `.venv` (from nothing if `fresh`), install the lock and the project, and stamp it."""
    venv = os.path.join(root, ".venv")
    if fresh:
        shutil.rmtree(venv, ignore_errors=True)
    os.makedirs(venv, exist_ok=True)
    stamp = dict(python, root=os.path.realpath(root), fingerprint=fingerprint(root), complete=False)
    write_stamp(venv, stamp)
    # Settings for other installations must not lead this one elsewhere.
    environ = {key: value for key, value in os.environ.items() if key not in (
        "PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")}
    progress = Progress(stream)
    if shutil.disk_usage(root).free < NEEDED_BYTES and fresh:
        stream.write("warning: less than 8 GB free; PyTorch and the CUDA libraries need about 6\n")
    stream.write("setting up .venv with Python %s, once: %s\n" % (
        python["version"], python["executable"]))
    lock = os.path.join(root, "requirements.lock")
    with open(lock) as file:
        total = sum(bool(re.match(r"[A-Za-z]", line)) for line in file)
    pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "install", "--no-input",
           "--disable-pip-version-check", "--progress-bar", "off"]
    steps = [("packages", total, pip + ["-r", lock]),
             # The lock holds setuptools, so that building needs nothing from the network.
             ("project", 1, pip + ["--no-deps", "--no-build-isolation", "-e", root])]
    if fresh:
        steps.insert(0, ("environment", 1, [python["executable"], "-m", "venv", venv]))
    with open(os.path.join(venv, "install.log"), "w") as log:
        for label, total, command in steps:
            run(command, log, progress, label, total, environ)
    stamp["complete"] = True
    write_stamp(venv, stamp)
    progress.close("ready: .venv")


def up_to_date(root, environ):
    """Return whether `.venv` is whole, made from the present files, and of $PYTHON, if set."""
    stamp = read_stamp(os.path.join(root, ".venv")) or {}
    if not (whole(root, stamp) and stamp.get("fingerprint") == fingerprint(root)):
        return False
    wanted = find_python(environ) if environ.get("PYTHON") else stamp
    return wanted["executable"] == stamp["executable"]


def whole(root, stamp):
    """Return whether the installation came to its end, here, and its interpreter still exists."""
    return (stamp.get("complete") and stamp.get("root") == os.path.realpath(root)
            and os.path.exists(os.path.join(root, ".venv", "bin", "python")))


def main(root=ROOT, environ=os.environ, pyenv_roots=PYENV_ROOTS, stream=sys.stdout):
    """Bring `.venv` up to date and return the exit status."""
    venv = os.path.join(root, ".venv")
    try:
        if up_to_date(root, environ):
            return 0
        python = find_python(environ, pyenv_roots)
        # The folder itself is the lock: two of these at once must not write one environment.
        folder = os.open(root, os.O_RDONLY)
        os.set_inheritable(folder, True)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.write("waiting for another set-up of this folder\n")
                fcntl.flock(folder, fcntl.LOCK_EX)
                if up_to_date(root, environ):
                    return 0
            stamp = read_stamp(venv)
            if stamp is None and os.path.isdir(venv) and os.listdir(venv):
                raise SetupError("%s exists, and this script did not make it. Move it away or "
                                 "remove it, then run this again." % venv)
            # Where only the lock changed, pip changes what differs. All else starts from nothing.
            stamp = stamp or {}
            reusable = whole(root, stamp) and all(stamp.get(key) == python[key] for key in python)
            install(root, python, not reusable, stream)
        finally:
            os.close(folder)
    except SetupError as error:
        sys.stderr.write("megatron_paci: %s\n" % error)
        return 1
    except OSError as error:
        sys.stderr.write("megatron_paci: cannot set up %s: %s. Make the folder writable and free "
                         "some space.\n" % (venv, error))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nmegatron_paci: interrupted; the next call starts the set-up again.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
