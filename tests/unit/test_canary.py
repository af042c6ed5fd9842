"""tools/canary.py: what is asked for, which Megatron is found, and what is said in the end."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "canary.py"
spec = importlib.util.spec_from_file_location("paci_canary", SOURCE)
canary = importlib.util.module_from_spec(spec)
spec.loader.exec_module(canary)

ANSWER = {"version": "0.18.2", "tried": ["0.18.2", "0.19.2"], "hooks": 16, "problems": []}
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.unit.test_a" name="test_good"/>
<testcase classname="tests.unit.test_a" name="test_left_out"><skipped message="no"/></testcase>
<testcase classname="tests.unit.test_a" name="test_bad[1.5]"><failure message="x"/></testcase>
<testcase classname="tests.unit.test_a" name="test_bad[1.5]"><error message="teardown"/></testcase>
<testcase classname="tests.gloo.test_b" name="test_not_set_up"><error message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a Megatron-LM checkout, with a Megatron-Core of no use."""
    core = tmp_path / "Megatron-LM" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").touch()
    (core / "__init__.py").write_text("__version__ = '9.9.0'\n")
    return tmp_path / "Megatron-LM"


@pytest.mark.parametrize("version", ["0.18.2", "0.20.0", "0.20.0rc1", "0.16.0rc0.dev100085", "1.0"])
def test_a_version_need_not_be_known(version):
    assert canary.source(version, "") == (version, None)


def test_a_checkout_is_taken_by_its_full_path(checkout, monkeypatch):
    monkeypatch.chdir(checkout.parent)
    assert canary.source("", "Megatron-LM") == ("checkout", checkout.resolve())


@pytest.mark.parametrize(
    "version, folder, words",
    [
        ("", "", "give either VERSION"),
        ("0.18.2", "here", "not both"),
        ("latest", "", "VERSION=latest is no version"),
        ("0.18.2; rm", "", "is no version"),
        ("../0.18", "", "is no version"),
        ("", "nowhere", "MEGATRON_LM=nowhere is no Megatron-LM checkout"),
    ],
)
def test_wrong_usage_is_one_clear_message(version, folder, words, capsys):
    assert canary.main(["--version", version, "--megatron-lm", folder, "--", "-k", "x"]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_of_pips_output_the_errors_are_shown():
    output = (
        "WARNING: something\n"
        "ERROR: Could not find a version that satisfies the requirement megatron-core==0.99.0 "
        "(from versions: 0.1.0, 0.2.0, 0.17.1, 0.18.0, 0.18.2, 0.19.0, 0.19.2)\n"
    )
    assert canary.shorten(output) == (
        "ERROR: Could not find a version that satisfies the requirement megatron-core==0.99.0 "
        "(the newest: 0.17.1, 0.18.0, 0.18.2, 0.19.0, 0.19.2)"
    )
    assert canary.shorten("no space left\n") == "no space left"


def test_a_failed_installation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(canary.sys, "executable", "/bin/false")
    with pytest.raises(canary.CanaryError, match="megatron-core 0.99.0 could not be installed"):
        canary.install("0.99.0", tmp_path / "core")
    assert list(tmp_path.iterdir()) == []


def test_an_installation_is_done_once(tmp_path, monkeypatch):
    monkeypatch.setattr(canary.sys, "executable", "/bin/false")
    assert canary.install("0.18.2", tmp_path) == tmp_path


def test_the_environment_finds_that_megatron_first_and_all_else_behind(tmp_path, checkout):
    python = canary.environment(tmp_path / "environment", checkout)
    code = "import megatron.core, pytest; print(megatron.core.__version__, pytest.__version__)"
    output = subprocess.run([python, "-c", code], text=True, stdout=subprocess.PIPE, check=True)
    assert output.stdout.split() == ["9.9.0", pytest.__version__]


def test_a_megatron_that_does_not_fit_is_said_and_not_tested(
    tmp_path, checkout, monkeypatch, capsys
):
    monkeypatch.setattr(canary, "FOLDER", tmp_path / "canary")
    assert canary.main(["--megatron-lm", str(checkout), "--", "--no-such-option"]) == 1
    output = capsys.readouterr().out
    assert "Megatron-Core 9.9.0 (untried: the plugin warns" in output
    assert "hooks: these do not fit\n- importing them failed" in output
    assert output.endswith("tests: not run\n")


def test_tests_are_counted_from_pytests_report(tmp_path):
    report = tmp_path / "tests.xml"
    report.write_text(REPORT)
    counts, failed = canary.count(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failed == [
        "tests/unit/test_a.py::test_bad[1.5]", "tests/gloo/test_b.py::test_not_set_up"
    ]


def test_the_summary_of_a_tried_version():
    counts = {"passed": 5, "failed": 1, "skipped": 2}
    assert canary.summary(ANSWER, counts, ["tests/a.py::test_b"]) == [
        "Megatron-Core 0.18.2",
        "hooks: all 16 fit",
        "tests: 5 passed, 1 failed, 2 skipped",
        "- tests/a.py::test_b",
    ]


def test_the_summary_of_a_new_version():
    problems = ["- megatron.core.timers:Timer.start: there is no such function"]
    answer = ANSWER | {"version": "0.20.0", "problems": problems}
    assert canary.summary(answer, None, []) == [
        "Megatron-Core 0.20.0 (untried: the plugin warns; tried are 0.18.2, 0.19.2)",
        "hooks: these do not fit",
        *problems,
        "tests: not run",
    ]


def test_examples_of_a_checkout_do_not_hide_ours(checkout):
    (checkout / "examples").mkdir()
    (checkout / "examples" / "__init__.py").touch()
    root = SOURCE.parents[1]
    found = subprocess.run(
        [sys.executable, "-c", "import examples; print(*examples.__path__)"],
        env={"PYTHONPATH": f"{root}{os.pathsep}{checkout}"}, cwd=checkout.parent,
        stdout=subprocess.PIPE, text=True, check=True,
    )
    assert found.stdout.strip() == str(root / "examples")
