"""Decoder definitions: weights in, logits out; attention is a call, the cache an argument."""
