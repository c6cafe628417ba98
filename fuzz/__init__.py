"""Coverage-guided fuzzing of what reads files of others; see targets.py."""
