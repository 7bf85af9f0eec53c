"""The engine: one small interface over DeepSpeed that trains, evaluates and generates in every layout."""

from collie_parallel.engine.engine import Engine
from collie_parallel.engine.setup import setup_engine

__all__ = ["Engine", "setup_engine"]
