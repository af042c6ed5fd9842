"""What two papers print and their authors' code lists, for docs/paper.py.

arXiv 2606.07881 is the paper of PACI, 2401.10241 that of zero bubble.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_paci.simulate.models import Model

STAGES = 8
# Of the PACI paper: batch, microbatches per step, hours of flush and of PACI, printed speed-up.
TRAINING = (
    (128, 4, 227.6, 111.5, 2.04),
    (128, 8, 162.3, 88.0, 1.84),
    (256, 8, 169.4, 111.9, 1.51),
    (256, 16, 124.3, 87.9, 1.41),
)
SCHEDULES = ("paci", "zb-h2", "zb-h1", "1f1b", "interleaved")
PRINTED_NAMES = {"paci": "PACI", "zb-h2": "ZB-2p", "zb-h1": "ZB-1p", "1f1b": "1F1B",
                 "interleaved": "interleaved"}


@dataclass(frozen=True)
class Setting:
    """A model of the zero-bubble paper on its machines."""

    name: str
    stages: int
    layers: int
    hidden: int
    heads: int
    microbatch_size: int
    memory: dict[str, int]
    """Printed GB by schedule."""
    runs: tuple[Run, ...]

    @property
    def chunk_layers(self) -> int:
        """Layers of a stage in the middle; the first and the last stage have one less."""
        return (self.layers + 2) // self.stages

    @property
    def model(self) -> Model:
        """Its shape; GPT-2's vocabulary is assumed."""
        return Model(layers=self.layers, hidden=self.hidden, heads=self.heads, sequence=1024,
                     vocabulary=50257, ffn=4 * self.hidden, query_groups=self.heads)


@dataclass(frozen=True)
class Run:
    """A row of its tables."""

    microbatches: int
    times: tuple[int, int, int, int]
    """Forward, gradient of the input, of the weights, message; microseconds, from the code."""
    bubble: dict[str, float]
    """Printed bubble rates."""
    throughput: dict[str, float]
    """Printed samples per GPU and second; PACI's by the PACI paper."""


def _run(m: int, times: tuple[int, int, int, int], bubbles: tuple, throughput: tuple) -> Run:
    return Run(m, times, dict(zip(("1f1b", "zb-h1"), bubbles)), dict(zip(SCHEDULES, throughput)))


def _memory(paci: int, zb_2p: int, zb_1p: int, interleaved: int) -> dict[str, int]:
    return dict(zip(SCHEDULES, (paci, zb_2p, zb_1p, paci, interleaved)))


SETTINGS = (
    Setting("1.5B", 8, 22, 2304, 24, 6, _memory(30, 59, 32, 40), (
        _run(24, (18522, 18086, 9337, 601), (.2431, .1585), (15.24, 14.5, 12.9, 11.8, 13.1)),
        _run(32, (18513, 18086, 9331, 626), (.1985, .1242), (15.23, 14.8, 13.4, 12.5, 13.4)),
        _run(64, (18546, 18097, 9321, 762), (.1240, .0674), (15.09, 14.9, 14.2, 13.6, 13.9)),
    )),
    Setting("6.2B", 8, 30, 4096, 32, 3, _memory(39, 70, 42, 48), (
        _run(24, (29718, 29444, 19927, 527), (.2347, .1323), (4.52, 4.32, 3.88, 3.50, 4.01)),
        _run(32, (29802, 29428, 19530, 577), (.1898, .1045), (4.51, 4.35, 4.00, 3.70, 4.08)),
        _run(64, (29935, 29621, 19388, 535), (.1091, .0554), (4.47, 4.39, 4.20, 4.03, 4.19)),
    )),
    Setting("14.6B", 16, 46, 5120, 40, 1, _memory(32, 51, 33, 39), (
        _run(48, (11347, 11248, 8132, 377), (.2552, .1397), (1.84, 1.81, 1.61, 1.40, 1.54)),
        _run(64, (11307, 11254, 8101, 379), (.2082, .1088), (1.84, 1.83, 1.67, 1.49, 1.59)),
        _run(128, (11325, 11308, 8109, 378), (.1251, .0576), (1.83, 1.85, 1.76, 1.64, 1.66)),
    )),
    Setting("28.3B", 32, 62, 6144, 48, 1, _memory(43, 74, 44, 58), (
        _run(96, (10419, 10207, 7715, 408), (.2646, .1421), (1.01, .99, .87, .76, .82)),
        _run(128, (10408, 10204, 7703, 408), (.2168, .1106), (.99, 1.00, .90, .80, .85)),
        _run(256, (10402, 10248, 7698, 460), (.1352, .0594), (.99, 1.00, .96, .88, .90)),
    )),
)
