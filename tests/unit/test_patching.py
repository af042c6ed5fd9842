"""Patches: all or nothing in, exactly out."""

import sys
import types

import pytest

from megatron_paci.patching import Patch, PatchError, PatchSet


@pytest.fixture
def host(monkeypatch):
    module = types.ModuleType("host_framework")

    def area(width, height=1):
        return width * height

    def greet(name):
        return f"hello {name}"

    module.area, module.greet = area, greet
    other = types.ModuleType("host_framework_user")
    other.surface = area  # as "from host_framework import area as surface" leaves it
    monkeypatch.setitem(sys.modules, "host_framework", module)
    monkeypatch.setitem(sys.modules, "host_framework_user", other)
    return module, other


def double(original, *args, **kwargs):
    return 2 * original(*args, **kwargs)


DOUBLE = Patch("host_framework:area", double, ("width",), "doubles")


def test_a_patch_reaches_every_name_and_leaves_by_identity(host):
    module, other = host
    area = module.area
    patches = PatchSet([DOUBLE])
    patches.install()
    assert patches.installed
    assert module.area(3, height=2) == other.surface(3, 2) == 12
    assert module.area.__name__ == "area" and module.area.__wrapped__ is area
    late = types.ModuleType("host_framework_late")
    late.area = module.area  # picked the wrapper up after installation
    sys.modules["host_framework_late"] = late
    try:
        patches.uninstall()
    finally:
        del sys.modules["host_framework_late"]
    assert module.area is area and other.surface is area and late.area is area
    assert not patches.installed
    patches.uninstall()  # without effect
    patches.install()
    patches.uninstall()
    assert module.area is area


@pytest.mark.parametrize(
    "bad, message",
    [
        (Patch("host_framework:greet", double, ("title",), ""), r"expected parameters \(title, "),
        (Patch("host_framework:gone", double, (), ""), "no such function"),
        (Patch("host_framework_gone:area", double, (), ""), "No module named"),
    ],
)
def test_one_bad_target_keeps_all_of_them_out(host, bad, message):
    module, _ = host
    area = module.area
    with pytest.raises(PatchError, match=message):
        PatchSet([DOUBLE, bad]).install()
    assert module.area is area


def test_all_problems_are_listed_at_once(host):
    wrong = PatchSet([DOUBLE, Patch("host_framework:gone", double, (), "")])
    assert wrong.problems() == ["- host_framework:gone: there is no such function"]
    assert PatchSet([DOUBLE]).problems() == []
    with pytest.raises(PatchError) as caught:
        PatchSet(
            [
                Patch("host_framework:gone", double, (), ""),
                Patch("host_framework:greet", double, ("title",), ""),
            ]
        ).install()
    assert "host_framework:gone" in str(caught.value)
    assert "host_framework:greet" in str(caught.value)


def test_a_second_installation_is_refused(host):
    patches = PatchSet([DOUBLE])
    patches.install()
    with pytest.raises(PatchError, match="already"):
        patches.install()
    patches.uninstall()


def test_a_patch_on_top_has_to_go_first(host):
    module, _ = host
    patches, on_top = PatchSet([DOUBLE]), PatchSet([DOUBLE])
    patches.install()
    on_top.install()
    assert module.area(1) == 4
    with pytest.raises(PatchError, match="replaced again"):
        patches.uninstall()
    on_top.uninstall()
    assert module.area(1) == 2
    patches.uninstall()
    assert module.area(1) == 1


def test_a_method_is_replaced_in_its_class_and_given_back(host):
    module, _ = host

    class Timer:
        def start(self, barrier=False):
            return barrier

    module.Timer = Timer
    original = Timer.__dict__["start"]
    patches = PatchSet(
        [Patch("host_framework:Timer.start", lambda original, self, barrier=False:
               original(self, barrier=not barrier), ("self", "barrier"), "")]
    )
    patches.install()
    assert Timer().start() is True
    patches.uninstall()
    assert Timer.__dict__["start"] is original
    with pytest.raises(PatchError, match="no such function"):
        PatchSet([Patch("host_framework:Timer.stop", double, (), "")]).install()
