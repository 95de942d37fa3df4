"""Builds the wheel. All metadata of the project is in pyproject.toml.

A wheel contains the launch scripts and example configurations, so that it works from any directory
(megatron_async/files/package_files.py).
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "launch")
OF_A_CLONE = ("setup_env.sh", "quickstart.sh", "test.sh", "requirements-*.txt")


class BuildWithShipped(build_py):
    """Build step that copies the package and the folders in `SHIPPED` into the wheel."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # A clone has these folders next to the package.
            return
        for name in SHIPPED:
            target = Path(self.build_lib) / "megatron_async" / "_shipped" / name
            source, leave = Path(__file__).parent / name, shutil.ignore_patterns(*OF_A_CLONE)
            shutil.copytree(source, target, ignore=leave, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShipped})
