"""Installs pmoe. Tool settings are in pyproject.toml, set-up from nothing is in the Makefile."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """Read from the text: importing pmoe would need torch, which a build does not have."""
    text = (HERE / "pmoe" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError('pmoe/__init__.py must hold a line __version__ = "..."')
    return found.group(1)


def readme() -> str:
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


TRAIN = ["matplotlib", "tqdm"]

setup(
    name="pmoe",
    version=version(),
    description="A Mixture-of-Experts layer for PyTorch that overlaps communication with computation",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="pmoe authors",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["pmoe", "pmoe.*"]),
    package_data={"pmoe": ["py.typed"]},
    entry_points={"console_scripts": ["pmoe = pmoe.cli:main"]},
    # torch is a range, never a pin: which build fits (CPU, CUDA version) is for the machine to say.
    install_requires=["torch>=2.11,<2.15", "numpy", "scipy>=1.15", "sortedcontainers>=2.4"],
    extras_require={
        "train": TRAIN,
        "dev": [
            *TRAIN,
            "mypy>=1.18",
            "pytest>=8.4",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            # One minor version only: the next one may format the same file differently.
            "ruff>=0.17,<0.18",
        ],
    },
)
