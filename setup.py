"""Packaging of megatron_async; its kernels are a distribution of their own (`kernels/`).

Exact pins are those whose behaviour the code was measured against; the full pinned environment of
a run is `launch/requirements-*.txt`, which `launch/setup_env.sh` installs.
"""

from setuptools import find_packages, setup

setup(
    name="megatron_async",
    version="0.1.0",
    description="Asynchronous RL for language models on Megatron-core and SGLang",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_async", "megatron_async.*"]),
    package_data={"megatron_async": ["py.typed"]},
    install_requires=[
        "megatron-async-kernels==0.1.0",
        "torch>=2.11",
        "megatron-core==0.16.1",
        "transformers==5.19.0",
        "safetensors>=0.8",
        "zstandard>=0.25",
        "ray[default]==2.60.0",
        "aiohttp>=3.14",
        "numpy>=2.0",
        "psutil>=7.0",
        "pydantic>=2.14",
        "pyyaml>=6.0",
        "rich>=15.0",
        "typer>=0.29",
        "tensorboard>=2.21",
        "reasoning-gym==0.1.25",
        "math-verify[antlr4_13_2]==0.9.0",
    ],
    extras_require={
        "sglang": ["sglang==0.5.23"],
        "dev": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-PyYAML"],
    },
    entry_points={"console_scripts": ["megatron-async = megatron_async.cli:main"]},
)
