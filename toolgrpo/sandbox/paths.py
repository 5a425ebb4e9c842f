"""Where the interpreter and this package lie: what confined code may read, and how a helper process
is started.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def interpreter_paths() -> list[str]:
    """Return what confined code may read: the interpreter's libraries, the loader's, time zones."""
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {str(Path(base) / "lib") for base in (sys.base_prefix, sys.prefix)}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    paths |= {"/dev/null", "/dev/urandom", "/dev/zero"}
    return sorted(path for path in paths if Path(path).exists())


def open_to_all(path: str) -> bool:
    """Return whether every folder on the way can be entered by any user."""
    here = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in here.parents)


def package_root() -> Path:
    """Return the folder that `toolgrpo` lies in."""
    return Path(__file__).resolve().parents[2]


def starter(module: str, function: str) -> str:
    """Return Python that imports our package from where it lies, forgets that place, and starts."""
    root = str(package_root())
    start = f"from toolgrpo.sandbox.{module} import {function}; del sys.path[0]; {function}()"
    return f"import sys; sys.path.insert(0, {root!r}); {start}"
