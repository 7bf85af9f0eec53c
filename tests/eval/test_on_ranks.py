"""Evaluators standing alone on real engines: every sample counts once, whatever the ranks and batches."""

from __future__ import annotations

import math

import pytest
import torch

from tests.eval import cases
from tests.harness.batches import collate, count_targets
from tests.harness.models import save_tiny, tiny_model
from tests.harness.reference import token_losses

pytestmark = pytest.mark.distributed

LAYOUTS = [
    # count, batch size, tp, dp, zero
    (5, 2, 1, 2, 0),
    (1, 3, 1, 2, 0),
    (7, 2, 1, 2, 3),
    (5, 2, 2, 1, 0),
]


@pytest.mark.parametrize(("count", "batch_size", "tp", "dp", "zero"), LAYOUTS)
def test_perplexity_and_own_metric(pool2, tmp_path, count, batch_size, tp, dp, zero):
    folder = str(save_tiny("llama", tmp_path))
    model = tiny_model("llama").eval()
    total, tokens = 0.0, []
    with torch.no_grad():
        for sample in cases.samples(count):
            batch = collate([sample])
            logits = model(input_ids=batch["input_ids"]).logits
            total += token_losses(logits, batch["labels"]).item()
            tokens.append((len(sample["input_ids"]), logits[0, -1].argmax().item()))
    expected = math.exp(total / count_targets(cases.samples(count)))
    for result in pool2.run(cases.evaluate, folder, count, batch_size, tp, dp, zero):
        assert result["ppl"] == pytest.approx(expected, rel=1e-5)
        assert sorted(result["tokens"]) == sorted(tokens)
        assert zero == 3 or result["optimizer"]
