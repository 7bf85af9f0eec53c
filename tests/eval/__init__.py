"""Evaluators and metrics."""
