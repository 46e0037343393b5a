"""HTTP in one process, the engine in another: OpenAI's API, prefixes by name, metrics, a page."""
