"""Model weights as Hugging Face files: read by slices, written without any rank holding the whole model."""

from collie_parallel.weights.reader import load_model
from collie_parallel.weights.writer import save_model

__all__ = ["load_model", "save_model"]
