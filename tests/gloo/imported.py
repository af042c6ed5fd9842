"""What every rank of a test needs, imported once, in the process that ranks are forked from.

Importing this makes the process one without a GPU, for its life and that of its forks.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os

from megatron_paci.cpu import CpuDevice, cpu_environment

os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores
os.environ["LOCAL_WORLD_SIZE"] = "8"  # ranks of the largest tests: each has a device of its own
os.environ.update(cpu_environment(os.environ))
CpuDevice().install()

import megatron.core.tokenizers.text  # noqa: E402, F401  (training imports it late)
import megatron.training  # noqa: E402, F401
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

MockGPTLowLevelDataset.size = 1000  # its 100,000 documents take longer than the training

# Every run parses the sources of Megatron's configurations twice, for the help texts of flags.
_parse = functools.partial(
    ArgumentGroupFactory._get_field_docstrings, object.__new__(ArgumentGroupFactory)
)
_parsed = functools.cache(_parse)
ArgumentGroupFactory._get_field_docstrings = lambda factory, configuration: _parsed(configuration)
add_megatron_arguments(argparse.ArgumentParser())

gc.collect()
gc.freeze()  # a fork that collects garbage need not look through all that, and copy its pages
