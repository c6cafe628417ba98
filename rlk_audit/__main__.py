"""``python -m rlk_audit``: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its packages, say what installs them."""
    try:
        from rlk_audit.cli.app import app
    except ImportError as error:
        print(f"the command line cannot be used ({error}): pip install 'rlk_audit[report]'", file=sys.stderr)
        raise SystemExit(2) from error
    try:
        app()
    except OSError as error:  # as of a full disk where help or the version should go
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
