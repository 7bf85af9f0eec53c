"""CoLLiE's lowest layer: layouts, engine, data feed and weights."""

__version__ = "2.0.0"
