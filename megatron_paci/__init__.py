"""PACI, an asynchronous pipeline schedule without flushes, for Megatron-LM and Megatron-Core.

Importing this package has no effect and needs neither PyTorch nor Megatron; ``install()`` hooks
the schedule into Megatron, ``uninstall()`` takes it out again::

    import megatron_paci
    megatron_paci.install()   # before Megatron parses its arguments

or, without touching the launch script, ``torchrun ... -m megatron_paci run pretrain_gpt.py ...``.
"""

from megatron_paci.version import __version__

__all__ = ["__version__", "install", "uninstall"]


def install() -> None:
    """Hook the PACI schedule and its flags into Megatron; without effect if it is installed.

    Also without effect if the hooks stand in Megatron's source (``patches/``). Has to come before
    Megatron parses its arguments. A run without ``--pipeline-schedule paci`` stays bitwise what it
    was.

    Raises:
        megatron_paci.patching.PatchError: This version of Megatron lacks a function to hook, or
            its signature has changed, or its source has only some of the hooks. Nothing is
            changed then.
    """
    from megatron_paci import hooks

    hooks.install()


def uninstall() -> None:
    """Give every hooked function of Megatron back, by identity.

    Hooks that stand in Megatron's source stay, and a warning says so.
    """
    from megatron_paci import hooks

    hooks.uninstall()
