"""The installed version; pyproject.toml is the one place where it is written."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rlk_audit")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"
