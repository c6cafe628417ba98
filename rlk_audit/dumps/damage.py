"""Errors of libraries on damaged files, turned into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlk_audit.dumps.sample import DumpError

_SHOWN = 200


@contextmanager
def told_as(message: str) -> Iterator[None]:
    """Raise a DumpError of ``message`` and the error's first line for whatever error comes: damage raises any."""
    try:
        yield
    except DumpError:
        raise
    except Exception as error:
        raise DumpError(f"{message} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    lines = str(error).split("\n")
    text = "".join(sign if sign.isprintable() else "?" for sign in lines[0].strip())
    return text[:_SHOWN] or type(error).__name__
