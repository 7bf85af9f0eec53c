"""The data feed."""
