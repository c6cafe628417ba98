"""Signatures of faults: pure functions of a table of tokens, or of a report, that find one kind of fault each."""
