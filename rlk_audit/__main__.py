"""``python -m rlk_audit``: the command line."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line; without its packages, say what installs them."""
    # A stream that whoever started this has closed is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        from rlk_audit.cli.app import app
    except ImportError as error:
        print(f"the command line cannot be used ({error}): pip install 'rlk_audit[report]'", file=sys.stderr)
        raise SystemExit(2) from error
    try:
        app()
    except OSError as error:  # as of a full disk where help or the version should go
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        _empty_buffers()


def _empty_buffers() -> None:
    """Empty the standard streams: what cannot be written would fail again as Python ends, and change the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
