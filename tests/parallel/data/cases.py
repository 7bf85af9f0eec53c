"""What the ranks of a pool run for the tests of the data feed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np

HARDEST = 3
SAMPLES = 24


def difficulty(index: int) -> int:
    return index % HARDEST + 1


def curriculum(folder: Path) -> dict[str, Any]:
    """A section that allows difficulty 1 for two steps, then 2 for two, then 3; writes the index that it needs."""
    from deepspeed.runtime.data_pipeline.data_sampling.utils import (
        close_mmap_dataset_builder,
        create_mmap_dataset_builder,
    )

    rows = {
        "samples": [[i for i in range(SAMPLES) if difficulty(i) == d] for d in range(1, HARDEST + 1)],
        "values": [[d] for d in range(1, HARDEST + 1)],
    }
    for name, values in rows.items():
        builder = create_mmap_dataset_builder(str(folder / name), np.int64)
        for value in values:
            builder.add_item_numpy(np.array(value, dtype=np.int64))
        close_mmap_dataset_builder(builder, str(folder / name))
    metric = {
        "index_to_sample_path": str(folder / "samples"),
        "index_to_metric_path": str(folder / "values"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 1,
        "max_difficulty": HARDEST,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 3], "max_step": [2, 4]},
    }
    return {
        "enabled": True,
        "seed": 7,
        "data_sampling": {
            "enabled": True,
            "curriculum_learning": {
                "enabled": True,
                "data_cluster_path": str(folder / "clusters"),
                "curriculum_metrics": {"length": metric},
            },
        },
    }


def curriculum_pass(section: dict[str, Any], tp: int, dp: int, epochs: list[int]) -> list[list[tuple[list[int], int]]]:
    """For each epoch this rank's batches: names of the samples, and how many are real. A global batch is 4."""
    from collie_parallel.config import CollieConfig
    from collie_parallel.data.dataloader import CollieDataLoader
    from collie_parallel.topology import setup_distribution

    setup_distribution(CollieConfig(tp_size=tp, dp_size=dp))
    given = copy.deepcopy(section)
    samples = [{"input_ids": [i] * difficulty(i), "labels": [i] * difficulty(i)} for i in range(SAMPLES)]
    loader = CollieDataLoader(samples, 2 // dp, 2, data_efficiency_config=section)
    passes = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        batches = [([max(row) for row in batch["input_ids"].tolist()], batch.real) for batch in loader]
        assert len(batches) == len(loader)
        passes.append(batches)
    assert section == given
    return passes
