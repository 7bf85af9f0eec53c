"""Random seeds: the same on the ranks that hold one activation, different where the data differs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from collie_parallel.topology import env

if TYPE_CHECKING:
    from collie_parallel.config import CollieConfig


def set_seed(config: CollieConfig) -> None:
    """Seed python, numpy and torch from `config.seed`.

    Of torch's stream: tensor-parallel ranks share it, since they hold the same activations outside sharded blocks
    (dropout there must agree); inside sharded blocks `collie_parallel.tensor_parallel.dropout` gives each rank its own.
    Data-parallel ranks and pipeline stages get streams of their own. Python's and numpy's are the same on every rank.
    """
    env._seed = config.seed
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed + 1009 * env.dp_rank + 1000003 * env.pp_rank)
