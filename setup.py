"""Builds the wheel; everything about the project stands in pyproject.toml.

A wheel carries the launch scripts and example configurations, so that it works from any directory
(megatron_async/files/package_files.py).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "launch")
OF_A_CLONE = ("setup_env.sh", "quickstart.sh", "test.sh", "requirements-*.txt")


class BuildWithShipped(build_py):
    """The package and what is shipped with it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a clone has them beside the package
            return
        for name in SHIPPED:
            target = Path(self.build_lib) / "megatron_async" / "_shipped" / name
            source, leave = Path(__file__).parent / name, shutil.ignore_patterns(*OF_A_CLONE)
            shutil.copytree(source, target, ignore=leave, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShipped})
