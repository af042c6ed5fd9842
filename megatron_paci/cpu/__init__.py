"""Run unmodified Megatron-Core and megatron.training on a machine without a GPU.

    from megatron_paci.cpu import CpuDevice, cpu_flags

    CpuDevice().install()          # before anything imports Megatron
    sys.argv += cpu_flags(sys.argv[1:])
    runpy.run_path("pretrain_gpt.py", run_name="__main__")

Importing this package is light: torch is imported by ``CpuDevice.install`` and not before.
"""

from megatron_paci.cpu.device import CpuDevice
from megatron_paci.cpu.flags import cpu_environment, cpu_flags

__all__ = ["CpuDevice", "cpu_environment", "cpu_flags"]
