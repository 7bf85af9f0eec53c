"""Helpers: calls, tensors, random state."""
