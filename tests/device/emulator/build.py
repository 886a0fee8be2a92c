"""Builds the emulated accelerator once per machine, which takes about a minute on one core.

This starts a process with two emulated devices:

    PYTHONPATH=$(python -m tests.device.emulator.build) EMU_DEVICES=2 python ...
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

SOURCES = Path(__file__).parent
CACHE = Path(sys.prefix) / "device"
MODULES = ("device", "collectives")
FLAGS = ("-O1", "-g0", "-std=c++20", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=_C", "-DUSE_C10D_GLOO")
LIBRARIES = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10")


class BuildError(RuntimeError):
    """The emulated accelerator cannot be built; the text says what is missing."""


def build(cache: Path = CACHE) -> Path:
    """Return the directory to put on PYTHONPATH.

    Builds the emulator if there is no build of these sources with this torch. Processes may call
    this at the same time: one builds, the others wait.

    Raises:
        BuildError: there is no compiler, there are no headers, or the compiler fails.
    """
    target = cache / _fingerprint()
    if target.is_dir():
        return target
    compiler = _find_compiler()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                package = Path(scratch) / "package"
                shutil.copytree(
                    SOURCES / "package", package, ignore=shutil.ignore_patterns("__pycache__")
                )
                _compile(compiler, Path(scratch), package / "torch_npu" / "_C.so")
                package.rename(target)
    return target


def _fingerprint() -> str:
    """Return a digest of everything that the build depends on."""
    digest = hashlib.sha256(f"{version('torch')} {sys.version} {FLAGS}".encode())
    package = [
        path
        for path in (SOURCES / "package").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    for file in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), *package]):
        digest.update(f"{file.relative_to(SOURCES)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _find_compiler() -> str:
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(
            f"the emulated accelerator needs a C++ compiler, but there is no {name}. "
            "Install g++, or set CXX."
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise BuildError(
            f"the emulated accelerator needs {header}. Install the headers of Python (python3-dev)."
        )
    return compiler


def _compile(compiler: str, scratch: Path, target: Path) -> None:
    """Compile the sources in parallel and link them."""
    [torch] = find_spec("torch").submodule_search_locations  # importing torch would take longer
    includes = [
        f"{torch}/include",
        f"{torch}/include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    flags = [*FLAGS, *(f"-I{directory}" for directory in includes)]
    objects = [str(scratch / f"{name}.o") for name in MODULES]
    compilations = [
        subprocess.Popen(
            [compiler, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", output],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, output in zip(MODULES, objects, strict=True)
    ]
    errors = [process.communicate()[1] for process in compilations]
    for process, text in zip(compilations, errors, strict=True):
        _check(process.returncode, text)
    link = [
        compiler,
        "-shared",
        *objects,
        "-o",
        str(target),
        f"-L{torch}/lib",
        *LIBRARIES,
        f"-Wl,-rpath,{torch}/lib",
    ]
    linked = subprocess.run(link, capture_output=True, text=True, check=False)
    _check(linked.returncode, linked.stderr)


def _check(exit_status: int, errors: str) -> None:
    if exit_status:
        lines = "\n".join(errors.splitlines()[:20])
        raise BuildError(
            f"the emulated accelerator does not compile with torch {version('torch')}:\n{lines}"
        )


if __name__ == "__main__":
    print(build())
