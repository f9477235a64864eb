"""Packaging of roamc: three folders of the repository, one package in Python."""

import re
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# Which folder holds which package. `passes` and `solvers` lie at the top of the repository; in Python they
# are roamc.passes and roamc.solvers, and nothing called `passes` or `solvers` lands in a user's environment.
FOLDERS = {"roamc": "roamc", "roamc.passes": "passes", "roamc.solvers": "solvers"}


def packages() -> list[str]:
    """Return the dotted name of every package under the three folders."""
    names = []
    for name, folder in FOLDERS.items():
        names += [name, *(f"{name}.{inner}" for inner in find_packages(folder))]
    return names


def version() -> str:
    """Read the version from roamc/version.py without importing roamc, which needs torch."""
    text = (Path(__file__).parent / "roamc" / "version.py").read_text(encoding="utf-8")
    return re.search(r'__version__ = "(.+)"', text).group(1)


class BuildWithMachineCode(build_py):
    """Also compiles the solvers, for half a minute, so that no user's first plan waits for it.

    The machine code fits the version of Python and numba that builds; others compile at the first call. So they do
    where building finds no numba. See solvers/machine_code.py.
    """

    def run(self) -> None:
        """Build, and write the machine code beside the solvers: in the clone itself for an editable install."""
        super().run()
        root = Path(__file__).parent if self.editable_mode else Path(self.build_lib).resolve()
        compiled = subprocess.run([sys.executable, "-c", SHIP, str(root)], capture_output=True, text=True)
        if compiled.returncode:
            self.warn(f"the solvers are not compiled ahead: {compiled.stderr.strip().splitlines()[-1]}")


SHIP = """
import sys
sys.path.insert(0, sys.argv[1])
import roamc
roamc.__path__.append(sys.argv[1])  # where solvers is a folder beside roamc
from roamc.solvers.machine_code import build
build()
"""

# Compiles fused kernels on a GPU. MIT; 1 GB installed, no dependencies. torch for CUDA pins its own.
TRITON = "triton>=3.6; platform_system == 'Linux'"
TRANSFORMERS = "transformers>=5,<6"  # the models that tests and benchmarks train, random weights only

setup(
    name="roamc",
    version=version(),
    description="A memory compiler for PyTorch training: plans a step's memory within a budget before it runs",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The roamc authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    cmdclass={"build_py": BuildWithMachineCode},
    package_dir=FOLDERS,
    packages=packages(),
    package_data={
        "roamc": ["py.typed"],  # covers roamc.passes and roamc.solvers too
        "roamc.cost": ["profiles/*"],  # shipped device profiles
        "roamc.report": ["page/*"],  # template, style and script of the HTML report
    },
    install_requires=[
        "torch>=2.11",  # graphs and kernels; roamc/version.py says what is tested, and a newer one gets a warning
        "numpy",  # solvers and timelines
        # Hot loops of the solvers, compiled once and cached on disk; needs no compiler on the user's machine, as an
        # extension module would. BSD-2; with llvmlite 210 MB installed.
        "numba>=0.61",
        # Maximum flow for order bounds, CP-SAT for small problems. Apache-2.0; with pandas 170 MB installed.
        "ortools>=9.10",
        "typer",  # the command line; brings rich, which prints the reports' tables
        "jinja2",  # the HTML report; torch needs it too
        "networkx",  # GraphML export, and graph algorithms in tests; torch needs it too
        "platformdirs",  # the user's cache folder, for measured device profiles. MIT; 0.1 MB, no dependencies
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-timeout",  # a hanging solver fails its test instead of the whole run
            "pytest-xdist",  # one worker per core
            "hypothesis",  # random problems for solvers, random graphs for passes
            "accelerate",  # the documentation's examples are run; Apache-2.0, 0.4 MB. Trainer needs it
            "lightning",  # the same; Apache-2.0, with torchmetrics and aiohttp 15 MB
            "expecttest",  # torch's own databases of operators, modules and optimizers import it
            "peft",  # LoRA adapters of configurations; Apache-2.0, 8 MB
            TRANSFORMERS,
            TRITON,  # its interpreter and compiler run without a GPU
        ],
        "gpu": [TRITON],
        "bench": [TRANSFORMERS],
        "dev": ["mypy", "ruff"],
        # The documentation as a site, built without a network. MIT; with mkdocs (BSD-2) and babel 115 MB installed.
        "docs": ["mkdocs-material"],
    },
    entry_points={
        "torch_dynamo_backends": ["roamc = roamc.frontends.backend:roamc"],  # so torch.compile finds it by name
        "console_scripts": ["roamc = roamc.cli.commands:main"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Compilers",
        "Typing :: Typed",
    ],
)
