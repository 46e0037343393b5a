"""Exact attention: the law (reference, online), its implementations, and their choice."""
