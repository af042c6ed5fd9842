"""Writes down what a rank does, as events of rules.py, while the real code runs.

Goes around the functions of ``torch.distributed``, what makes a host wait for a device, and nothing
else. On a CPU every tensor counts as one of the device, so more waits of the host are written down
than a GPU would have: that makes the check stricter, never weaker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_paci.bench.communication import COLLECTIVES, MODULE, _by_name, _group, _peer
from megatron_paci.bench.work import ClockedWork
from megatron_paci.cpu.stand_ins import Event as DeviceEvent
from megatron_paci.cpu.stand_ins import Stream
from megatron_paci.patching import Patch, PatchSet
from tests.nccl_order.rules import Collective, Event, HostWait, Mark, Messages, Part, Wait

HOST_READS = (
    "item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__",
)


class Recorder:
    """The log of one rank.

    Attributes:
        log: What has happened so far.
        run: Called as ``run(original, call, *args, **kwargs)`` in place of the functions of
            torch.distributed, ``call`` being the arguments by name.
    """

    def __init__(self):
        """Record nothing yet."""
        self.log: list[Event] = []
        self._operations = self._start = 0
        self._nested = False
        self.run = lambda original, call, *args, **kwargs: original(*args, **kwargs)
        self._group_names: dict[Any, str] = {}

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record while this lasts."""
        wrappers = {name: self._collective for name in COLLECTIVES
                    if hasattr(torch.distributed.distributed_c10d, name)}
        wrappers |= dict.fromkeys(("isend", "send"), self._send)
        wrappers |= dict.fromkeys(("irecv", "recv"), self._receive)
        wrappers |= {"batch_isend_irecv": self._batch, "_coalescing_manager": self._coalescing}
        patches = PatchSet([
            Patch(f"{MODULE}:{name}", _by_name(wrapper), (), "records the order")
            for name, wrapper in wrappers.items()
        ])
        patches.install()
        try:
            with self._host_waits():
                yield self
        finally:
            patches.uninstall()

    def restart(self, log: list[Event]) -> None:
        """Go on with a log of its own that begins with ``log``; all operations are waited for."""
        self.log = list(log)
        self._operations = sum(isinstance(event, Messages | Collective) for event in log)
        self._start += 1

    def mark(self, text: str) -> None:
        """Note an action of this rank."""
        self.log.append(Mark(text))

    def host_waits(self, *, whole_device: bool = False) -> None:
        """Note that the host waits, unless it has just done so."""
        event = HostWait(whole_device)
        if not self._nested and self.log[-1:] != [event]:
            self.log.append(event)

    @contextmanager
    def _host_waits(self) -> Iterator[None]:
        def noting(owner: Any, name: str, whole_device: bool = False):
            original = getattr(owner, name)

            def wrapper(*args, **kwargs):
                self.host_waits(whole_device=whole_device)
                return original(*args, **kwargs)

            return mock.patch.object(owner, name, wrapper)

        swaps = [noting(torch.Tensor, name) for name in HOST_READS]
        swaps += [noting(Stream, "synchronize"), noting(DeviceEvent, "synchronize")]
        swaps += [noting(torch.cuda, name, True) for name in ("synchronize", "empty_cache")]
        for swap in swaps:
            swap.start()
        try:
            yield
        finally:
            for swap in reversed(swaps):
                swap.stop()

    # Every wrapper is called as wrapper(original, arguments by name, *args, **kwargs).

    def _send(self, original, call, *args, **kwargs):
        part = None if self._nested else self._part(True, call)
        return self._message(original, call, part, *args, **kwargs)

    def _receive(self, original, call, *args, **kwargs):
        part = None if self._nested else self._part(False, call)
        return self._message(original, call, part, *args, **kwargs)

    def _message(self, original, call, part, *args, **kwargs):
        if part is None:
            return original(*args, **kwargs)
        waited = self._post(Messages(self._name(_group(call)), (part,)))
        work = self._original(original, call, *args, **kwargs)
        if original.__name__ in ("isend", "irecv"):
            return ClockedWork(work, [waited])
        waited()
        return work

    def _batch(self, original, call, *args, **kwargs):
        parts: dict[Any, list[Part]] = {}
        for op in call["p2p_op_list"]:
            peer = {"tensor": op.tensor, "src": op.peer, "dst": op.peer}
            part = self._part(op.op.__name__ == "isend", peer)
            parts.setdefault(_group({"group": op.group}), []).append(part)
        waits = [self._post(Messages(self._name(group), tuple(some), batched=True))
                 for group, some in parts.items()]
        return [ClockedWork(work, list(waits))
                for work in self._original(original, call, *args, **kwargs)]

    def _part(self, sends: bool, call: dict[str, Any]) -> Part:
        name = "dst" if sends else "src"
        tensor = call["tensor"]
        peer = _peer(_group(call), call, name, f"group_{name}")
        return Part(sends, peer, tensor.numel() * tensor.element_size())

    def _collective(self, original, call, *args, **kwargs):
        outside = call.get("group") is torch.distributed.GroupMember.NON_GROUP_MEMBER
        if self._nested or outside:
            return original(*args, **kwargs)
        group = _group(call)
        if torch.distributed.get_world_size(group) == 1:
            return self._original(original, call, *args, **kwargs)
        name = original.__name__
        tensors = [each for each in call.values() if torch.is_tensor(each)]
        num_bytes = tensors[0].numel() * tensors[0].element_size() if tensors else 0
        members = tuple(torch.distributed.get_process_group_ranks(group))
        waited = self._post(Collective(self._name(group), name, members, num_bytes))
        work = self._original(original, call, *args, **kwargs)
        if call.get("async_op"):
            return ClockedWork(work, [waited])
        if work is None or name == "barrier":  # within a coalescing manager it is waited for later
            waited()
        if name.endswith(("_object", "_object_list", "barrier")):
            self.host_waits()
        return work

    @contextmanager
    def _coalescing(self, original, call, *args, **kwargs):
        first = self._operations
        with original(*args, **kwargs) as manager:
            yield manager
        waits = [lambda number=number: self.log.append(Wait(number))
                 for number in range(first, self._operations)]
        if call.get("async_ops"):
            manager.append(ClockedWork(None, waits))
        else:
            for wait in waits:
                wait()

    def _post(self, event: Messages | Collective) -> Callable[[], None]:
        """Note an operation; returns what notes a wait for it."""
        number, self._operations = self._operations, self._operations + 1
        self.log.append(event)
        start = self._start

        def waited() -> None:
            assert self._start == start, f"{event} is waited for after a restart"
            self.log.append(Wait(number))

        return waited

    def _original(self, original, call, *args, **kwargs):
        self._nested = True
        try:
            return self.run(original, call, *args, **kwargs)
        finally:
            self._nested = False

    def _name(self, group: Any) -> str:
        if group not in self._group_names:
            self._group_names[group] = f"{group.group_desc} ({group.group_name})"
        return self._group_names[group]
