"""Counting: FLOPs, stored bytes and moved bytes, never mixed; each prediction has a counter beside it."""
