"""Tensor parallelism: a transformers model sharded from outside, by the plan its architecture ships."""
