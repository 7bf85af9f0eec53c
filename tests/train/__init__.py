"""Trainer, callbacks, monitors, progress."""
