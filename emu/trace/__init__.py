"""Request traces: read, made, looked at."""
