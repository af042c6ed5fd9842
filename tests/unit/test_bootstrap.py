"""tools/bootstrap.py: which interpreter it takes, and when it installs again.

The interpreters are small shell scripts: they answer the probe, "create" an environment by copying
themselves into it, and note what pip was called with. No network, no real Python.
"""

import importlib.util
import io
import json
import os
import re
import threading
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "bootstrap.py"
spec = importlib.util.spec_from_file_location("paci_bootstrap", SOURCE)
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)

PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) /bin/mkdir -p "$3/bin"; /bin/cp "$0" "$3/bin/python"; exit 0 ;;
*"-m pip"*) echo "$*" >>"{calls}"; echo "Collecting torch==1 (from a lock)"; {pip}; exit $? ;;
*) echo '{answer}' ;;
esac
"""


def fake_python(path, *, version=(3, 12, 1), bits=64, missing=(), standard=True, pip="true",
                calls=os.devnull):
    """Write a script that answers as such a Python would; return its path."""
    answer = json.dumps({"version": list(version), "executable": str(path), "bits": bits,
                         "missing": list(missing), "standard": standard})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(answer=answer, calls=calls, pip=pip))
    path.chmod(0o755)
    return path


def failing_shim(path):
    """Write what pyenv leaves on PATH for a version that is not switched on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\necho "pyenv: $0: command not found" >&2\nexit 127\n')
    path.chmod(0o755)
    return path


def find(*folders, **environ):
    """Return the path found with PATH = folders."""
    environ["PATH"] = os.pathsep.join(map(str, folders))
    return bootstrap.find_python(environ, pyenv_roots=())["executable"]


class TestFindPython:
    def test_prefers_the_locked_version(self, tmp_path):
        for minor in (14, 13, 12):
            fake_python(tmp_path / f"python3.{minor}", version=(3, minor, 0))
        assert find(tmp_path) == str(tmp_path / "python3.12")

    def test_goes_past_a_shim_that_fails_to_a_real_one_further_on(self, tmp_path):
        failing_shim(tmp_path / "shims" / "python3.12")
        real = fake_python(tmp_path / "bin" / "python3.12")
        assert find(tmp_path / "shims", tmp_path / "bin") == str(real)

    def test_looks_into_pyenv_when_the_shims_fail(self, tmp_path):
        failing_shim(tmp_path / "shims" / "python3.12")
        versions = tmp_path / "pyenv" / "versions"
        fake_python(versions / "3.11.7" / "bin" / "python", version=(3, 11, 7))
        fake_python(versions / "3.12.9" / "bin" / "python", version=(3, 12, 9))
        newest = fake_python(versions / "3.12.10" / "bin" / "python", version=(3, 12, 10))
        fake_python(versions / "3.12.11t" / "bin" / "python", version=(3, 12, 11))
        assert find(tmp_path / "shims", PYENV_ROOT=str(tmp_path / "pyenv")) == str(newest)

    @pytest.mark.parametrize("unfit", [
        {"version": (3, 11, 7)}, {"missing": ("ensurepip",)}, {"bits": 32}, {"standard": False}])
    def test_takes_the_next_when_one_will_not_do(self, tmp_path, unfit):
        fake_python(tmp_path / "python3.12", **unfit)
        good = fake_python(tmp_path / "python3.13", version=(3, 13, 0))
        assert find(tmp_path) == str(good)

    def test_python3_is_good_enough_if_new_enough(self, tmp_path):
        assert find(fake_python(tmp_path / "python3").parent) == str(tmp_path / "python3")

    def test_none_is_one_line_with_what_was_tried_and_what_to_install(self, tmp_path):
        failing_shim(tmp_path / "python3.12")
        fake_python(tmp_path / "python3", version=(3, 11, 7))
        with pytest.raises(bootstrap.SetupError) as error:
            find(tmp_path)
        message = str(error.value)
        assert "\n" not in message
        assert "python3.12 does not start (exit status 127)" in message
        assert "python3 is Python 3.11.7, older than 3.12" in message
        assert "Install Python 3.12" in message

    def test_nothing_at_all(self, tmp_path):
        with pytest.raises(bootstrap.SetupError, match="none found"):
            find(tmp_path)

    def test_explicit_python_is_taken_before_all_others(self, tmp_path):
        fake_python(tmp_path / "python3.12")
        mine = fake_python(tmp_path / "mine" / "python", version=(3, 14, 0))
        assert find(tmp_path, PYTHON=str(mine)) == str(mine)

    @pytest.mark.parametrize("make, reason", [
        (lambda path: fake_python(path, version=(3, 10, 2)), "is Python 3.10.2, older than 3.12"),
        (lambda path: fake_python(path, missing=["ensurepip"]), "has no ensurepip"),
        (failing_shim, r"does not start \(exit status 127\)"),
        (lambda path: path, "does not start"),
    ])
    def test_explicit_python_that_will_not_do_is_an_error(self, tmp_path, make, reason):
        fake_python(tmp_path / "python3.12")
        mine = tmp_path / "mine"
        make(mine)
        with pytest.raises(bootstrap.SetupError, match=f"PYTHON={mine} {reason}"):
            find(tmp_path, PYTHON=str(mine))


class Project:
    """A folder with what the fingerprint reads, and one interpreter."""

    def __init__(self, root):
        self.root, self.calls, self.out = root / "project", root / "calls", io.StringIO()
        (self.root / "megatron_paci").mkdir(parents=True)
        for name in bootstrap.INPUTS:
            (self.root / name).write_text("torch==1\n")
        self.python = root / "bin" / "python3.12"
        self.interpreter()

    def interpreter(self, **kwargs):
        fake_python(self.python, calls=self.calls, **kwargs)

    def setup(self, **environ):
        """Run main(); return its exit status and how often pip was called in it."""
        before = self.pip_calls()
        environ["PATH"] = str(self.python.parent)
        status = bootstrap.main(str(self.root), environ, pyenv_roots=(), stream=self.out)
        return status, len(self.pip_calls()) - len(before)

    def pip_calls(self):
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


class TestSetup:
    def test_installs_lock_then_project_and_then_nothing(self, project, monkeypatch):
        assert project.setup() == (0, 2)
        lock, editable = project.pip_calls()
        assert lock.endswith(f"-r {project.root}/requirements.lock")
        assert editable.endswith(f"--no-deps --no-build-isolation -e {project.root}")
        assert "ready" in project.out.getvalue()
        monkeypatch.delattr(bootstrap.subprocess, "Popen")  # nothing may be started now
        assert project.setup() == (0, 0)

    def test_failure_of_pip_is_reported_and_tried_again(self, project, capsys):
        project.interpreter(pip="echo No space left on device; false")
        assert project.setup() == (1, 1)
        error = capsys.readouterr().err
        assert "No space left on device" in error and "install.log" in error
        project.interpreter()
        assert project.setup() == (0, 2)

    def test_interrupted_installation_starts_from_nothing(self, project):
        assert project.setup() == (0, 2)
        venv = project.root / ".venv"
        stamp = bootstrap.read_stamp(str(venv))
        bootstrap.write_stamp(str(venv), dict(stamp, complete=False))
        (venv / "half-written").touch()
        assert project.setup() == (0, 2)
        assert not (venv / "half-written").exists()

    def test_stamp_that_was_cut_short_counts_as_interrupted(self, project):
        project.setup()
        (project.root / ".venv" / bootstrap.STAMP).write_text('{"comp')
        assert project.setup() == (0, 2)

    def test_stamp_says_incomplete_while_pip_runs(self, project):
        stamp = project.root / ".venv" / bootstrap.STAMP
        project.interpreter(pip=f'/bin/cp "{stamp}" "{project.root}/seen"')
        project.setup()
        assert json.loads((project.root / "seen").read_text())["complete"] is False

    @pytest.mark.parametrize("name", bootstrap.INPUTS)
    def test_changed_input_updates_what_is_there(self, project, name):
        project.setup()
        kept = project.root / ".venv" / "kept"
        kept.touch()
        (project.root / name).write_text("torch==2\n")
        assert project.setup() == (0, 2)
        assert kept.exists()
        assert project.setup() == (0, 0)

    def test_interpreter_that_went_away_starts_from_nothing(self, project):
        project.setup()
        python = project.root / ".venv" / "bin" / "python"
        python.unlink()
        python.symlink_to(project.root / "gone")
        assert project.setup() == (0, 2)

    def test_moved_folder_starts_from_nothing(self, project):
        project.setup()
        project.root = project.root.rename(project.root.with_name("elsewhere"))
        assert project.setup() == (0, 2)

    def test_other_explicit_python_starts_from_nothing(self, project, tmp_path):
        project.setup()
        other = fake_python(tmp_path / "other", version=(3, 13, 0), calls=project.calls)
        assert project.setup(PYTHON=str(other)) == (0, 2)
        assert project.setup(PYTHON=str(other)) == (0, 0)
        assert project.setup() == (0, 0)  # without a wish, what is there will do

    def test_somebody_elses_environment_is_left_alone(self, project, capsys):
        (project.root / ".venv" / "bin").mkdir(parents=True)
        assert project.setup() == (1, 0)
        assert "did not make it" in capsys.readouterr().err
        assert (project.root / ".venv" / "bin").exists()

    def test_no_python_is_one_line_and_status_1(self, project, capsys):
        project.python.unlink()
        assert project.setup() == (1, 0)
        assert capsys.readouterr().err.count("\n") == 1

    def test_two_at_once_install_once(self, project):
        project.interpreter(pip="/bin/sleep 0.1")
        results = []
        threads = [threading.Thread(target=lambda: results.append(project.setup()[0]))
                   for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [0, 0]
        assert len(project.pip_calls()) == 2


def test_progress_off_a_terminal_is_a_line_every_few_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(bootstrap.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    progress = bootstrap.Progress(out, interval=5.0)
    for _ in range(21):
        progress.show("packages")
        now[0] += 1.0
    assert out.getvalue().splitlines() == [f"packages ({s} s)" for s in (5, 10, 15, 20)]


def test_lock_holds_exact_versions_only_and_what_an_offline_build_needs():
    lines = (SOURCE.parents[1] / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    exact = re.compile(r'[a-z0-9-]+==[0-9a-z.]+( ; platform_system == "Linux")?')
    assert [pin for pin in pins if not exact.fullmatch(pin)] == []
    names = [pin.partition("==")[0] for pin in pins]
    assert names == sorted(set(names))
    assert {"setuptools", "torch", "megatron-core", "pytest", "hypothesis"} <= set(names)
    assert "apex" not in names  # the PyPI project of that name is not NVIDIA's
