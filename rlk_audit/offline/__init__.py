"""Audit of what lies in files: dumps of tokens and logs of runs, each made into a RunView."""
