"""Model files: where they come from, what they say, and their tensors; nothing in them is trusted."""
