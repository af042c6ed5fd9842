"""Benchmarks of pipeline schedules, run by ``python -m megatron_paci bench``.

Importing this package needs neither PyTorch nor Megatron.
"""
