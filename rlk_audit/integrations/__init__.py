"""The audit inside other programs: one module each, which alone needs that program."""
