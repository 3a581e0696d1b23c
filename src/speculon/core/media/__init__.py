"""Images of requests: read within limits, from where they come, and their places in messages."""
