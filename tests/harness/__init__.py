"""What the tests share: a pool of rank processes, tiny models, ragged batches and the one-process reference."""
