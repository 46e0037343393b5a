"""Exact attention: the law (reference, online), its implementations, and the choice between them."""
