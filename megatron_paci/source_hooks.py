"""Hooks that stand in the source of a Megatron-LM fork, put there by a diff of ``patches/``.

Above every function that ``megatron_paci.install()`` would wrap at run time the diff puts a
decorator, which does the same by the same record of ``hooks.py``::

    from megatron_paci.source_hooks import paci_hook

    @paci_hook("evaluate")
    def evaluate(forward_step_func, ...):

Light: Megatron's modules import this one while they are being imported themselves, so the records,
which need Megatron, are looked up when a hooked function is called first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron_paci.patching import PatchError, PatchSet

REMEDY = (
    "Revert the diff that was made for another version of Megatron-LM or of megatron_paci and "
    "apply the right one (patches/README.md of megatron_paci)."
)

_hooked: set[str] = set()


def paci_hook(name: str) -> Callable[[Callable], Callable]:
    """Return the decorator of one hooked function.

    Args:
        name: Of the function as its module knows it, ``function`` or ``Class.method``.

    Raises:
        PatchError: When it decorates a function of another name: the diff was applied to a source
            for which it was not made, and its lines are in the wrong places.
    """

    def decorate(function: Callable) -> Callable:
        if function.__qualname__ != name:
            raise PatchError(
                f"@paci_hook({name!r}) stands above {function.__qualname__} in "
                f"{function.__module__}. {REMEDY}"
            )
        target = f"{function.__module__}:{name}"
        _hooked.add(target)

        @functools.wraps(function)
        def hooked(*args, **kwargs):
            return _wrapper(target)(function, *args, **kwargs)

        return hooked

    return decorate


@functools.cache
def _wrapper(target: str) -> Callable:
    """Return the wrapper of the record of ``target``, once all of them are known to fit."""
    from megatron_paci import hooks

    hooks.install()
    return next(patch.wrapper for patch in hooks.PATCHES.patches if patch.target == target)


def in_source(patches: PatchSet) -> bool:
    """Return whether the source has the hooks of ``patches``: all, or none of them.

    Imports every module that is to be hooked.

    Raises:
        PatchError: It has only some of them, or others, or a hooked function has changed; the
            message lists every problem.
    """
    problems = patches.problems()
    if not _hooked:
        return False
    targets = {patch.target for patch in patches.patches}
    problems += [f"- {target}: not hooked" for target in sorted(targets - _hooked)]
    problems += [
        f"- {target}: hooked, but unknown to this version of megatron_paci"
        for target in sorted(_hooked - targets)
    ]
    if problems:
        raise PatchError(
            "the hooks in Megatron's source do not fit:\n" + "\n".join(problems) + f"\n{REMEDY}"
        )
    return True
