"""The repository root is the package ``lrbench``; what pyproject.toml cannot say about that is said here."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithoutSetup(build_py):
    """Build the package's modules, leaving out this file, which lies beside them."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of the modules of ``package``, without ``setup``."""
        modules = super().find_package_modules(package, package_dir)
        return [entry for entry in modules if (entry[0], entry[1]) != ("lrbench", "setup")]


FOLDERS = find_packages(include=["bench*", "kernels*", "analysis*", "results*", "notebooks*"])

setup(
    packages=["lrbench", *(f"lrbench.{folder}" for folder in FOLDERS)],
    cmdclass={"build_py": BuildWithoutSetup},
)
