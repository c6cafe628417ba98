"""Packages that only some formats need."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rlk_audit.dumps.sample import DumpError


def need(module: str, path: Path) -> Any:
    """Return a module of an optional package.

    Raises:
        DumpError: it is not installed; the text says how to install it.
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DumpError(
            f"{path.name} needs {package}, which cannot be imported ({error}): pip install 'rlk_audit[tables]'"
        ) from error
