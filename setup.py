"""Maps the folders at the root into the `chatkv` namespace, and puts compiled kernels into wheels; everything else
stands in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ROOTS = ("app", "engine", "kernels", "assets")
NATIVE = Path("kernels/cpu/native")


class BuildWithKernels(build_py):
    """Compiles the native kernels into what is built. Without a compiler they are compiled, or done without, where the
    program runs; an editable checkout compiles at first use in any case."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            build = _load_build()
            compiler = build.find_compiler()
            file = Path(self.build_lib) / "chatkv" / NATIVE / "prebuilt" / build.prebuilt_name()
            file.parent.mkdir(parents=True, exist_ok=True)
            build.compile_library(file, compiler)
        except Exception as error:  # a wheel without them is a good wheel
            print(f"native kernels left out: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The kernels are for one platform, and for any Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def _load_build():  # type: ignore[no-untyped-def]
    """The module by its file: the package is not installed yet."""
    spec = importlib.util.spec_from_file_location("chatkv_native_build", ROOT / NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


setup(
    packages=[
        name for root in ROOTS for name in (f"chatkv.{root}", *(f"chatkv.{root}.{sub}" for sub in find_packages(root)))
    ],
    package_data={
        "chatkv.app": ["**/*.tcss", "**/*.json", "py.typed"],
        "chatkv.assets": ["*.toml", "*.jinja", "*.json", "*.svg", "themes/*"],
        "chatkv.kernels": ["cpu/native/src/*"],
    },
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
