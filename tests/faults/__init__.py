"""One rank fails: what becomes of the others, of the output and of the exit code."""
