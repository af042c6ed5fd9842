"""Packaging of megatron_paci. To work on the project, `make` lists the commands that set it up."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version():
    """Return the version from megatron_paci/version.py, without importing torch and Megatron."""
    text = (ROOT / "megatron_paci" / "version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)[1]


def long_description():
    """Return the README; empty in a source tree that has none."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="megatron-paci",
    version=version(),
    description="PACI, an asynchronous pipeline schedule without flushes, for Megatron-Core",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_paci", "megatron_paci.*"]),
    # The releases of Megatron-Core between the oldest and the newest that the hooks were tried on
    # (megatron_paci/compatibility.py); the exact versions of everything, as tested together, are in
    # requirements.lock. `make canary` tries another one.
    install_requires=[
        "megatron-core[training]>=0.18.2,<0.20",
        "torch>=2.12",
        "sentencepiece>=0.2",
        "numpy>=1.26",
        "matplotlib>=3.8",
        "tqdm>=4.66",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.8", "hypothesis>=6.100", "emerging-optimizers>=0.3"],
        "muon": ["emerging-optimizers>=0.3"],
        "docs": ["sphinx==9.1.1"],
        "tensorboard": ["tensorboard>=2.16"],
        "wandb": ["wandb>=0.17"],
        # Megatron can also use NVIDIA's apex. That is installed from its source repository; the
        # project called "apex" on PyPI is something else, so no extra here may ever name it.
        "gpu": ["transformer-engine[pytorch]>=2.0"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
