"""Puts the configurations of `configs/` into the wheel, as `dapo_jax/configs`; everything else is in pyproject.toml.

setuptools takes data files from inside a package only, and these stand at the top of the checkout, where people read them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigurations(build_py):
    """Copies the configurations when a wheel is built; an installation by `pip install -e` reads those of the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib, "dapo_jax", "configs"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigurations})
