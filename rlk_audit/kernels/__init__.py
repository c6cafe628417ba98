"""Faster paths for the per-token work. Each has the signature of ``measure.measure`` and equals it in every bit."""
