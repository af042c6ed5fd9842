"""Groups that keep the order of their ranks in a PyTorch before 2.12, for this check alone.

megatron_paci asks ``new_group`` for that (megatron_paci/groups.py), and refuses to train where it
cannot be had. Here it is had by letting ``new_group`` find a ``sorted`` that sorts nothing, so that
the check also runs on a machine whose PyTorch is older.
"""

from __future__ import annotations

import inspect

import torch


def keeps_order() -> bool:
    """Whether this PyTorch can keep the order of the ranks of a group."""
    return "sort_ranks" in inspect.signature(torch.distributed.new_group).parameters


def keep_order_of_ranks() -> None:
    """Give ``torch.distributed.new_group`` the argument ``sort_ranks``, for good."""
    module, original = torch.distributed.distributed_c10d, torch.distributed.new_group

    def new_group(*args, sort_ranks=True, **kwargs):
        if sort_ranks:
            return original(*args, **kwargs)
        module.sorted = list
        try:
            return original(*args, **kwargs)
        finally:
            del module.sorted

    torch.distributed.new_group = new_group
