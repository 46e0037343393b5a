"""The K/V cache: blocks and their owners, prefixes that are shared or pinned, and the tensors."""
