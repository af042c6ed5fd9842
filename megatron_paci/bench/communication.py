"""Puts clocks on ``torch.distributed``: what the wrappers of its functions do.

The functions themselves run as always; a wrapper adds the exchange of clocks. Transfers count as
buffered, like the eager sends of real networks: a send never costs its sender virtual time, however
late it is waited for. A receive and an asynchronous collective move the clock when they are waited
for, to what the others' clocks showed when they posted their part.

What bypasses these functions is not seen: methods of ``ProcessGroup``, functional collectives,
the creation of groups.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from megatron_paci.bench.call_sites import Collective, call_site
from megatron_paci.bench.clock import Stamp, VirtualClock
from megatron_paci.bench.exchange import Exchange
from megatron_paci.bench.work import ClockedWork
from megatron_paci.patching import Patch

MODULE = "torch.distributed.distributed_c10d"

# Those that a version of torch lacks are left out.
COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_single", "all_gather_coalesced",
    "all_gather_into_tensor", "_all_gather_base", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_single",
    "gather_into_tensor", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base", "scatter",
    "scatter_object_list",
)

POINT_TO_POINT = ("isend", "irecv", "send", "recv", "batch_isend_irecv", "_coalescing_manager")


class _ThreadState(threading.local):
    """Backward hooks may run in a thread of autograd's."""

    nested = False
    """Whether a wrapped function is running: those it calls are part of it."""

    coalescing: list[Callable[[], None]] | None = None
    """Inside a coalescing manager: what is to happen when it has ended."""


class Communication:
    """The wrappers of one rank; ``patches`` names what they go around."""

    def __init__(self, clock: VirtualClock, exchange: Exchange, *, stages: list[int]):
        """Keep references; nothing is patched.

        Args:
            stages: Pipeline stage of every global rank.
        """
        self._clock = clock
        self._exchange = exchange
        self._stages = stages
        self._state = _ThreadState()
        self._kinds: dict[int, str] = {}
        self._closed = False

    def produced(self, tensors: Any, kind: str) -> None:
        """Note what a pass has made, so that messages are known by their contents.

        Neither the peer nor the order tells: between two stages with several chunks each, outputs
        and gradients go both ways.
        """
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if torch.is_tensor(tensor):
                self._kinds[tensor.data_ptr()] = kind

    def end_iteration(self) -> None:
        """Forget what was made but never sent."""
        self._kinds.clear()

    def close(self) -> None:
        """Let what is still outstanding move no clock and ask for no stamp."""
        self._closed = True

    def patches(self) -> list[Patch]:
        """Return one record per function of ``torch.distributed``."""
        special = {name: getattr(self, f"_{name.lstrip('_')}") for name in POINT_TO_POINT}
        collectives = {name: self._collective for name in COLLECTIVES if hasattr(c10d, name)}
        return [
            Patch(f"{MODULE}:{name}", _by_name(wrapper), (), "carries the clock")
            for name, wrapper in (special | collectives).items()
        ]

    # Every wrapper is called as wrapper(original, bound arguments, *args, **kwargs).

    def _isend(self, original, call, *args, **kwargs):
        if self._passes(call):
            return original(*args, **kwargs)
        self._post(call)
        return self._run(original, *args, **kwargs)

    def _send(self, original, call, *args, **kwargs):
        return self._isend(original, call, *args, **kwargs)

    def _irecv(self, original, call, *args, **kwargs):
        if self._passes(call):
            return original(*args, **kwargs)
        work = None
        effect = self._expect(call, lambda: work)
        work = self._run(original, *args, **kwargs)
        return self._later(work, [effect])

    def _recv(self, original, call, *args, **kwargs):
        if self._passes(call):
            return original(*args, **kwargs)
        expected = None if _any_source(call) else self._expect(call, None)
        sender = self._run(original, *args, **kwargs)
        if expected is None:
            self._expect({**call, "src": sender}, None)()
        else:
            expected()
        return sender

    def _batch_isend_irecv(self, original, call, *args, **kwargs):
        if self._state.nested:
            return original(*args, **kwargs)
        effects: list[list[Callable[[], None]]] = []
        for op in call["p2p_op_list"]:
            peer = {"tensor": op.tensor, "group": op.group, "tag": op.tag}
            if op.op.__name__ == "isend":  # the wrapper, or the original if made before
                self._post({**peer, "dst": op.peer})
                effects.append([])
            else:
                effects.append([self._expect({**peer, "src": op.peer}, None)])
        works = self._run(original, *args, **kwargs)
        if len(works) != len(effects):  # NCCL: one work for the whole batch
            effects = [[effect for some in effects for effect in some]] + [[]] * len(works)
        return [ClockedWork(work, some) if some else work for work, some in zip(works, effects)]

    @contextmanager
    def _coalescing_manager(self, original, call, *args, **kwargs) -> Iterator[Any]:
        if self._state.nested:
            with original(*args, **kwargs) as manager:
                yield manager
            return
        effects: list[Callable[[], None]] = []
        outer, self._state.coalescing = self._state.coalescing, effects
        try:
            with original(*args, **kwargs) as manager:
                yield manager
        finally:
            self._state.coalescing = outer
        last = ClockedWork(None, effects)
        if call.get("async_ops"):
            manager.append(last)
        else:
            last.wait()

    def _collective(self, original, call, *args, **kwargs):
        if self._passes(call) or torch.distributed.get_world_size(call.get("group")) == 1:
            return original(*args, **kwargs)
        group = _group(call)
        ranks = torch.distributed.get_process_group_ranks(group)
        stages = tuple(sorted({self._stages[rank] for rank in ranks}))
        cause = Collective(original.__name__, stages, *call_site())
        self._clock.collectives[cause] += 1
        key = self._exchange.enter(group.group_name, self._clock.stamp())
        result = self._run(original, *args, **kwargs)

        def effect() -> None:
            if not self._closed:
                stamps = map(Stamp.parse, self._exchange.members(key, ranks))
                self._clock.collective(list(stamps), cause)

        if call.get("async_op") or self._state.coalescing is not None:
            return self._later(result, [effect])
        effect()
        return result

    def _later(self, work: Any, effects: list[Callable[[], None]]) -> Any:
        """Return ``work`` with ``effects`` at its wait, or leave them to the coalescing manager."""
        if self._state.coalescing is not None:
            self._state.coalescing.extend(effects)
            return work
        return None if work is None else ClockedWork(work, effects)

    def _passes(self, call: dict[str, Any]) -> bool:
        """Whether a call is not to be clocked: part of another, or by a rank outside the group."""
        outside = call.get("group") is torch.distributed.GroupMember.NON_GROUP_MEMBER
        return self._state.nested or outside

    def _run(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self._state.nested = True
        try:
            return original(*args, **kwargs)
        finally:
            self._state.nested = False

    def _post(self, call: dict[str, Any]) -> None:
        group = _group(call)
        receiver = _peer(group, call, "dst", "group_dst")
        kind = self._kinds.pop(call["tensor"].data_ptr(), "other")
        stamp = self._clock.stamp(kind)
        self._exchange.post_message(group.group_name, receiver, call.get("tag") or 0, stamp)

    def _expect(
        self, call: dict[str, Any], work: Callable[[], Any] | None
    ) -> Callable[[], None]:
        """Return what is to happen when a receive is waited for.

        Args:
            work: Returns the work, which knows the sender of a receive from anybody afterwards.
        """
        group, tag = _group(call), call.get("tag") or 0

        def key(sender: int) -> str:
            return self._exchange.message_key(group.group_name, sender, tag)

        # The number of a message is that of its receive in the order of posting.
        known = None if _any_source(call) else key(_peer(group, call, "src", "group_src"))

        def effect() -> None:
            if not self._closed:
                found = known or key(c10d.get_global_rank(group, work()._source_rank()))
                self._clock.receive(self._exchange.take_message(found))

        return effect


def _by_name(wrapper: Callable) -> Callable:
    """Give a wrapper the arguments by name, besides as they came."""
    signatures: dict[Callable, inspect.Signature] = {}

    def wrapped(original, *args, **kwargs):
        if original not in signatures:
            signatures[original] = inspect.signature(original)
        call = signatures[original].bind(*args, **kwargs).arguments
        return wrapper(original, call, *args, **kwargs)

    return wrapped


def _any_source(call: dict[str, Any]) -> bool:
    return call.get("src") is None and call.get("group_src") is None


def _group(call: dict[str, Any]) -> Any:
    group = call.get("group")
    return torch.distributed.group.WORLD if group is None else group


def _peer(group: Any, call: dict[str, Any], name: str, name_in_group: str) -> int:
    """Return the global rank of the other side."""
    if call.get(name) is not None:
        return call[name]
    return c10d.get_global_rank(group, call[name_in_group])
