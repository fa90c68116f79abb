"""The compiled encoder: built with the machine's own compiler, once, into a folder of the user's cache."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import xxhash

from cache.semantic.embedding.errors import NativeUnavailable
from cache.semantic.embedding.model_files import make_file

_SOURCE = Path(__file__).with_name("bert.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
_LONGEST_BUILD = 120


def native_library(cache: Path) -> ctypes.CDLL:
    """The library, built in some seconds if this machine has not built this source yet.

    Args:
        cache: folder of the library; machines of different kinds may share it.

    Raises:
        NativeUnavailable: no compiler, a failed compilation (a CPU without the instructions), or a full disk.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (g++, or what CXX names) on PATH")
    try:
        target = cache / f"bert-{_digest(compiler)}.so"
        if not target.is_file():
            make_file(target, (compiler, *_FLAGS, str(_SOURCE), "-o"), _LONGEST_BUILD)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
        raise NativeUnavailable(f"{compiler} refuses its source: {reason.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{compiler} took more than {_LONGEST_BUILD} s for its source") from error
    except OSError as error:
        raise NativeUnavailable(f"it cannot be built or loaded: {error}") from error


def _digest(compiler: str) -> str:
    """The name of the build: a digest of source, flags, compiler and CPU features."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603  the user's compiler
    parts = (_SOURCE.read_text("utf-8"), *_FLAGS, version, platform.machine(), _cpu_features())
    return xxhash.xxh3_128_hexdigest("\0".join(parts).encode())


def _cpu_features() -> str:
    """What -march=native depends on."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor()
    lines = path.read_text("utf-8", "replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
