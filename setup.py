"""Maps the folders at the root into the `chatkv` namespace; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

ROOTS = ("app", "engine", "kernels", "assets")

setup(
    packages=[
        name for root in ROOTS for name in (f"chatkv.{root}", *(f"chatkv.{root}.{sub}" for sub in find_packages(root)))
    ],
    package_data={
        "chatkv.app": ["**/*.tcss", "**/*.json", "py.typed"],
        "chatkv.assets": ["*.toml", "*.jinja", "*.json", "*.svg", "themes/*"],
    },
)
