"""One run of a model in a layout, on the ranks of a pool, and what it is held against: one plain process."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.harness.batches import Sample, collate, ragged_batch
from tests.harness.models import save_tiny, tiny_model
from tests.harness.pool import RankPool
from tests.harness.reference import Reference, make_optimizer, train_reference

PROMPT = [3, 5, 7, 9]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@dataclass(frozen=True)
class Case:
    """A model, a layout and a short training run.

    Args:
        micro: samples of a micro-batch on one data-parallel rank.
        short: samples by which the last global batch falls short of a full one.
    """

    arch: str
    tp: int = 1
    dp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    kv_heads: int = 4
    accumulation: int = 1
    micro: int = 2
    steps: int = 5
    clip: float | None = None
    optimizer: str = "sgd"
    lr: float = 0.1
    checkpointing: bool = False
    attention: str = "eager"
    masked: tuple[int, ...] = ()
    short: int = 0
    seed: int = 0

    @property
    def overrides(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"attn_implementation": self.attention}
        if self.arch != "gpt_neox":
            fields["num_key_value_heads"] = self.kv_heads
        return fields


def global_batches(case: Case) -> list[list[Sample]]:
    """The samples of every step: ragged, with prompts masked, some fully."""
    rng = random.Random(case.seed)
    size = case.micro * case.accumulation * case.dp
    vocab = tiny_model(case.arch).config.vocab_size
    batches = [ragged_batch(rng, size, 2, 11, vocab, fully_masked=case.masked) for _ in range(case.steps)]
    if case.short:
        batches[-1] = batches[-1][: max(1, size - case.short)]
    return batches


def reference(case: Case) -> Reference:
    """The plain transformers model in one process."""
    model = tiny_model(case.arch, case.seed, **case.overrides)
    return train_reference(model, global_batches(case), case.lr, case.optimizer, case.clip)


def run_in_layout(pool: RankPool, case: Case) -> list[dict[str, Any]]:
    """Train in the layout of `case`; each rank's numbers, and the weights as plain transformers reads them."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(case.arch, f"{folder}/in", case.seed, **case.overrides)
        results = pool.run(_run, case, folder, timeout=120)
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/out", dtype=torch.float32)
        results[0]["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
    return results


def _run(case: Case, folder: str) -> dict[str, Any]:
    from collie_parallel.config import CollieConfig
    from collie_parallel.engine import setup_engine
    from collie_parallel.losses import GPTLMLoss
    from collie_parallel.models import CollieModelForCausalLM
    from collie_parallel.topology import env
    from collie_parallel.weights import save_model

    config = CollieConfig.from_pretrained(f"{folder}/in")
    config.tp_size, config.dp_size, config.sequence_parallel = case.tp, case.dp, case.sequence_parallel
    config.train_micro_batch_size, config.gradient_accumulation_steps = case.micro, case.accumulation
    config.checkpointing = case.checkpointing
    config.ds_config = {"zero_optimization": {"stage": case.zero}, "gradient_clipping": case.clip or 0.0}
    model = CollieModelForCausalLM.from_pretrained(f"{folder}/in", config, attn_implementation=case.attention)
    engine = setup_engine(
        config, model, optimizer=lambda parameters: make_optimizer(parameters, case.optimizer, case.lr)
    )
    batches, losses, norms, loss_fn = global_batches(case), [], [], GPTLMLoss()
    engine.train()
    for samples in batches:
        window = micro_batches(case, samples, env.dp_rank)
        engine.begin_step(window, loss_fn)
        for batch in window:
            engine.train_batch(batch, loss_fn)
        losses.append(engine.step_loss)
        norms.append(engine.grad_norm)
    tokens = engine.generate(
        input_ids=torch.tensor([PROMPT]), attention_mask=torch.ones(1, 4, dtype=torch.int64), **GREEDY
    )
    logits = engine.eval_batch(collate(batches[0][:3])).logits
    save_model(model, f"{folder}/out", config)
    return {"losses": losses, "norms": norms, "tokens": tokens.tolist(), "logits": logits}


def micro_batches(case: Case, samples: list[Sample], dp_rank: int) -> list[dict[str, torch.Tensor]]:
    """This rank's micro-batches of a global batch. A place without a sample is taken by one without targets."""
    width = case.micro * case.dp
    filler: Sample = {"input_ids": [1, 1], "labels": [-100, -100]}
    rounds = -(-len(samples) // width)
    padded = samples + [filler] * (rounds * width - len(samples))
    starts = [step * width + dp_rank * case.micro for step in range(rounds)]
    return [collate(padded[start : start + case.micro]) for start in starts]


def assert_equal(case: Case, results: list[dict[str, Any]], expected: Reference) -> None:
    """Losses to 1e-5 relative, gradient norms to 1e-4, weights to 1e-4, logits and greedy tokens of the trained model.

    The logits of the trained model are compared to 1e-3: they are of order ten and inherit the weights' differences.
    """
    model = tiny_model(case.arch, case.seed, **case.overrides)
    model.load_state_dict(expected["weights"])
    model.eval()
    batch = collate(global_batches(case)[0][:3])
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        tokens = model.generate(
            input_ids=torch.tensor([PROMPT]), attention_mask=torch.ones(1, 4, dtype=torch.int64), **GREEDY
        )
    for result in results:
        losses, norms = torch.tensor(result["losses"]), torch.tensor(result["norms"])
        torch.testing.assert_close(losses, torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norms, torch.tensor(expected["grad_norms"]), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["logits"][real], logits[real], rtol=1e-3, atol=1e-3)
        assert result["tokens"] == tokens.tolist()
    weights = results[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
