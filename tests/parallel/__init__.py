"""The lowest layer."""
