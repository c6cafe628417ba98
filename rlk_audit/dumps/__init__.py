"""Readers of dumps: one module a format, each turning files into samples as a stream."""
