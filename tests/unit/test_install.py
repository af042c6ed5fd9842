"""Installing into the real Megatron, and taking everything out again."""

from __future__ import annotations

import subprocess
import sys

import pytest


def bindings(functions) -> dict[tuple[str, str], int]:
    """Return every global of every loaded module that holds one of ``functions``."""
    wanted = {id(function) for function in functions}
    return {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        for key, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in wanted
    }


def test_uninstall_gives_every_target_back_by_identity():
    import importlib

    from megatron_paci import hooks, install, uninstall

    functions, methods = [], {}
    for patch in hooks.PATCHES.patches:
        module, path = patch.target.split(":")
        owner = importlib.import_module(module)
        *classes, name = path.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name)
        if classes:
            methods[owner, name] = vars(owner)[name]
        else:
            functions.append(getattr(owner, name))
    before = bindings(functions)
    # The schedule getter is known under three names.
    assert len([key for key in before if key[1] == "get_forward_backward_func"]) >= 3
    install()
    try:
        assert not bindings(functions)
        assert all(vars(owner)[name] is not method for (owner, name), method in methods.items())
        assert all(patch.why for patch in hooks.PATCHES.patches)
        install()  # without effect
    finally:
        uninstall()
    assert bindings(functions) == before
    assert all(vars(owner)[name] is method for (owner, name), method in methods.items())
    uninstall()  # without effect


def test_the_getter_hands_out_paci_only_when_asked(monkeypatch):
    import argparse

    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import global_vars

    import megatron_paci
    from megatron_paci.forward_backward import forward_backward_pipelining_paci

    megatron_paci.install()
    try:
        plain = schedules.forward_backward_pipelining_without_interleaving
        interleaved = schedules.forward_backward_pipelining_with_interleaving
        get = pipeline_parallel.get_forward_backward_func
        assert get(pp_size=2) is plain  # no arguments were parsed
        for schedule, expected in (
            ("auto", plain), ("1f1b", plain), ("paci", forward_backward_pipelining_paci),
        ):
            args = argparse.Namespace(pipeline_schedule=schedule)
            monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
            assert get(pp_size=2) is expected
        monkeypatch.setattr(
            global_vars, "_GLOBAL_ARGS", argparse.Namespace(pipeline_schedule="interleaved")
        )
        assert get(pp_size=2, vp_size=2) is interleaved
    finally:
        megatron_paci.uninstall()


def test_the_schedule_function_has_megatrons_signature():
    import inspect

    from megatron.core.pipeline_parallel import schedules

    from megatron_paci.forward_backward import forward_backward_pipelining_paci

    ours = inspect.signature(forward_backward_pipelining_paci).parameters
    theirs = inspect.signature(
        schedules.forward_backward_pipelining_without_interleaving
    ).parameters
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].kind is theirs[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default == theirs[name].default


def test_the_train_step_has_megatrons_signature():
    import inspect

    from megatron.training import training

    from megatron_paci.train_step import paci_train_step

    # Newer versions have only added parameters at the end, all with a default.
    ours = list(inspect.signature(paci_train_step).parameters.values())
    theirs = list(inspect.signature(training.train_step).parameters.values())
    assert [parameter.name for parameter in ours[: len(theirs)]] == [p.name for p in theirs]
    assert all(parameter.default is None for parameter in ours[len(theirs):])


def test_every_hook_fits_and_trying_them_changes_nothing():
    from megatron.training import training

    from megatron_paci import hooks

    before = training.train_step
    assert hooks.PATCHES.problems() == []
    assert training.train_step is before and not hooks.PATCHES.installed


@pytest.mark.parametrize(
    "version, warns", [("0.18.2+478318e", False), ("0.19.2", False), ("0.20.0+478318e", True)]
)
def test_only_the_release_decides_whether_a_version_is_tried(version, warns, monkeypatch, caplog):
    """Megatron adds the commit of the git checkout that its files lie in, be it a stranger's."""
    import megatron.core

    import megatron_paci

    monkeypatch.setattr(megatron.core, "__version__", version)
    megatron_paci.install()
    megatron_paci.uninstall()
    assert ("this is 0.20.0;" in caplog.text) is warns
    assert ("was tried with" in caplog.text) is warns


def test_the_schedule_without_a_stage_says_what_to_do():
    from megatron_paci.forward_backward import forward_backward_pipelining_paci

    with pytest.raises(RuntimeError, match="install_stage"):
        forward_backward_pipelining_paci(
            forward_step_func=None, data_iterator=None, model=None, num_microbatches=4,
            seq_length=8, micro_batch_size=1,
        )


def test_importing_the_package_is_light_and_without_effect():
    code = (
        "import sys, megatron_paci, megatron_paci.__main__, megatron_paci.schedule, "
        "megatron_paci.cpu\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'megatron', 'numpy', 'transformer_engine', 'apex'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
