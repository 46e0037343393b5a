"""What fits and what it costs, before a byte is loaded; afterwards, whether that was true."""
