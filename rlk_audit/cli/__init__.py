"""The command line, ``rlk-audit``; it needs the extra ``report``."""
