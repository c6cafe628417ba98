"""Measurements of rlk_audit beside others'; `make bench` runs them and writes docs/benchmarks.md."""
