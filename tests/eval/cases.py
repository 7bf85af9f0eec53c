"""What the ranks run for tests of evaluators that stand alone."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

from tests.harness.batches import Sample, collate, ragged_batch

VOCAB = 67


def samples(count: int) -> list[Sample]:
    return ragged_batch(random.Random(3), count, 3, 19, VOCAB)


def evaluate(folder: str, count: int, batch_size: int, tp: int, dp: int, zero: int) -> dict[str, Any]:
    """Perplexity, and the greedy next token of each sample as a custom eval_fn and metric find them."""
    from collie import BaseMetric, CollieConfig, CollieModelForCausalLM, Evaluator, EvaluatorForPerplexity

    class Collect(BaseMetric):
        def reset(self):
            self.found = []

        def update(self, result):
            self.found += list(zip(result["length"], result["token"].tolist(), strict=True))

        def get_metric(self):
            return list(self.found)

    def next_token(evaluator, batch):
        logits = evaluator.engine.eval_batch(batch).logits  # [b, s, v]
        lengths = batch["attention_mask"].sum(1)
        return {"length": lengths.tolist(), "token": logits[torch.arange(len(lengths)), lengths - 1].argmax(-1)}

    config = CollieConfig.from_pretrained(folder)
    config.tp_size, config.dp_size, config.eval_batch_size = tp, dp, batch_size
    config.ds_config = {
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},  # of no use here, and left out
    }
    if tp > 1:
        model: Any = CollieModelForCausalLM.from_pretrained(folder, config, attn_implementation="eager")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    perplexity = EvaluatorForPerplexity(model=model, config=config, dataset=samples(count), collate_fn=collate)
    results = perplexity.eval()
    tokens = Evaluator(
        model, samples(count), config=config, eval_fn=next_token, metrics={"tokens": Collect(True)}, collate_fn=collate
    )
    tokens.engine = perplexity.engine  # a module has one engine
    return {**results, **tokens.eval(), "optimizer": perplexity.engine.optimizer is None}
