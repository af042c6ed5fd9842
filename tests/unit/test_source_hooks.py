"""Hooks that stand in Megatron's source: each does what its record does, once."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from megatron_paci import hooks, source_hooks
from megatron_paci.patching import Patch, PatchError, PatchSet
from megatron_paci.source_hooks import in_source, paci_hook


def double(original, *args, **kwargs):
    return 2 * original(*args, **kwargs)


def more(original, *args, **kwargs):
    return 1 + original(*args, **kwargs)


AREA = Patch("host_framework:area", double, ("width",), "doubles")
START = Patch("host_framework:Timer.start", more, ("self", "count"), "adds one")


def host_source(hook) -> types.ModuleType:
    """Return a module as a diff has left it, with ``hook(name)`` for its decorators."""
    module = types.ModuleType("host_framework")
    module.hook = hook
    exec(
        "@hook('area')\n"
        "def area(width, height=1):\n    return width * height\n"
        "class Timer:\n"
        "    @hook('Timer.start')\n"
        "    def start(self, count):\n        return count\n",
        vars(module),
    )
    return module


@pytest.fixture
def fresh(monkeypatch):
    """No hook in any source so far, and the records of the module ``host_framework`` alone."""
    monkeypatch.setattr(source_hooks, "_hooked", set())
    monkeypatch.setattr(hooks, "_hooked_in_source", False)
    monkeypatch.setattr(hooks, "PATCHES", PatchSet([AREA, START]))
    source_hooks._wrapper.cache_clear()
    yield lambda module: monkeypatch.setitem(sys.modules, "host_framework", module)
    source_hooks._wrapper.cache_clear()


def test_a_hook_in_the_source_does_what_its_record_says_once(fresh, caplog):
    module = host_source(paci_hook)
    fresh(module)
    hooked = module.area
    assert hooked(3, height=2) == 12 and module.Timer().start(5) == 6
    assert hooked.__name__ == "area" and hooked.__wrapped__(3) == 3
    hooks.install()  # also without effect, by itself or twice
    hooks.install()
    assert module.area is hooked and hooked(3) == 6 and not hooks.PATCHES.installed
    assert "stay" not in caplog.text
    hooks.uninstall()
    assert module.area is hooked and hooked(3) == 6
    assert "the hooks stand in the source of this Megatron and stay" in caplog.text


def test_without_hooks_in_the_source_they_are_installed(fresh):
    module = host_source(lambda name: lambda function: function)
    fresh(module)
    hooks.install()
    assert hooks.PATCHES.installed and module.area(3) == 6 and module.Timer().start(5) == 6
    hooks.uninstall()
    assert module.area(3) == 3


def test_hooks_that_are_not_all_there_are_an_error_at_the_first_call(fresh):
    module = host_source(lambda name: paci_hook(name) if name == "area" else lambda f: f)
    fresh(module)
    for call in (lambda: module.area(1), hooks.install, lambda: module.area(1)):
        with pytest.raises(PatchError, match="(?s)host_framework:Timer.start: not hooked\n.*Reve"):
            call()
    assert module.Timer().start(5) == 5 and not hooks.PATCHES.installed


def test_a_hook_that_the_package_no_longer_has_is_an_error(fresh):
    fresh(host_source(paci_hook))
    with pytest.raises(PatchError, match="Timer.start: hooked, but unknown to this version"):
        in_source(PatchSet([AREA]))


def test_a_hooked_function_that_has_changed_is_an_error(fresh):
    fresh(host_source(paci_hook))
    changed = Patch("host_framework:area", double, ("height",), "")
    with pytest.raises(PatchError, match=r"expected parameters \(height, ...\), found \(width, "):
        in_source(PatchSet([changed, START]))


def test_a_hook_above_another_function_is_an_error_at_once(fresh):
    with pytest.raises(PatchError, match=r"@paci_hook\('evaluate'\) stands above area in host_fra"):
        host_source(lambda name: paci_hook("evaluate"))


def test_what_megatrons_modules_import_is_light():
    code = (
        "import sys, megatron_paci.source_hooks\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'megatron', 'numpy'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
