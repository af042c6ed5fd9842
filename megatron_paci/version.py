"""The version of megatron_paci; setup.py reads it from here without importing the package."""

__version__ = "0.1.0"
