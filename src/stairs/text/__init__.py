"""Text at the border: tokens from text, chat templates, and text from a stream of tokens."""
