"""Model files: where they come from, what they say, their tensors; nothing in them is trusted."""
