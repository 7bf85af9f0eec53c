"""CoLLiE on the command line."""

__version__ = "2.0.0"
