"""The reference computes what it says, and the ragged batches are as described."""

from __future__ import annotations

import random

import pytest
import torch

from tests.harness.batches import IGNORE, Sample, collate, count_targets, ragged_batch
from tests.harness.models import NAMES, tiny_config, tiny_model
from tests.harness.reference import train_reference


def test_ragged_batches_are_ragged_and_partly_masked() -> None:
    samples = ragged_batch(random.Random(0), 40, 3, 9, vocab=20, pad_id=7, fully_masked=[0, 5])
    assert {len(sample["input_ids"]) for sample in samples} == set(range(3, 10))
    masked = [sum(label == IGNORE for label in sample["labels"]) for sample in samples]
    assert 0 in masked and any(0 < count < 3 for count in masked)
    for index, sample in enumerate(samples):
        assert len(sample["labels"]) == len(sample["input_ids"])
        assert 7 not in sample["input_ids"] and max(sample["input_ids"]) < 20
        assert all(a in (b, IGNORE) for a, b in zip(sample["labels"], sample["input_ids"], strict=True))
        assert (count_targets([sample]) == 0) == (index in (0, 5))


def test_the_collator_pads_on_the_right() -> None:
    samples: list[Sample] = [
        {"input_ids": [5, 6, 8], "labels": [IGNORE, 6, 8]},
        {"input_ids": [9], "labels": [9]},
    ]
    batch = collate(samples, pad_id=3)
    assert batch["input_ids"].tolist() == [[5, 6, 8], [9, 3, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE, 6, 8], [9, IGNORE, IGNORE]]
    assert count_targets(samples) == 2


def test_one_step_by_hand() -> None:
    """A bigram model whose loss and gradient are written out: softmax minus one-hot."""

    class Bigram(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))

        def forward(self, input_ids: torch.Tensor, **_: object):
            return type("Output", (), {"logits": self.table[input_ids]})

    model = Bigram()
    # Targets: 0 -> 1 and 1 -> 1 in the first sample, none in the second.
    samples: list[Sample] = [
        {"input_ids": [0, 1, 1], "labels": [0, 1, 1]},
        {"input_ids": [1, 0], "labels": [IGNORE, IGNORE]},
    ]
    before = model.table.detach().clone()
    run = train_reference(model, [samples], lr=0.5)
    p = before.softmax(-1)
    expected = torch.stack([p[0] - torch.tensor([0.0, 1.0]), p[1] - torch.tensor([0.0, 1.0])]) / 2
    assert run["losses"] == pytest.approx([float(-(p[0, 1].log() + p[1, 1].log()) / 2)])
    assert run["grad_norms"] == pytest.approx([float(expected.norm())])
    torch.testing.assert_close(run["first_grads"]["table"], expected)
    torch.testing.assert_close(run["weights"]["table"], before - 0.5 * expected)


# Adam divides by gradient sizes down to eps: rounding of 1e-8 in such a gradient moves a weight by 1e-3 * lr.
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1), ("adamw", 1e-3)])
@pytest.mark.parametrize("name", NAMES)
def test_padding_and_batching_do_not_change_a_run(name: str, optimizer: str, lr: float) -> None:
    rng = random.Random(4)
    batches = [ragged_batch(rng, 5, 2, 10, tiny_config(name).vocab_size, fully_masked=[1]) for _ in range(3)]
    runs = [
        train_reference(tiny_model(name), batches, lr=lr, optimizer=optimizer, clip=1.0, one_by_one=one_by_one)
        for one_by_one in (False, True)
    ]
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-5)
    assert runs[0]["losses"][0] > 1.0 and runs[0]["grad_norms"][0] > 1e-2


def test_a_step_without_targets_moves_nothing() -> None:
    model = tiny_model("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    empty = ragged_batch(random.Random(0), 3, 2, 6, 67, fully_masked=range(3))
    run = train_reference(model, [empty], lr=0.1, optimizer="adamw")
    assert (run["losses"], run["grad_norms"]) == ([0.0], [0.0])
    torch.testing.assert_close(run["weights"], before, rtol=0, atol=0)


def test_clipping_bounds_the_step() -> None:
    batches = [ragged_batch(random.Random(1), 4, 4, 8, 67)]
    before = tiny_model("llama").state_dict()
    free = train_reference(tiny_model("llama"), batches, lr=1.0)
    clip = free["grad_norms"][0] / 10
    clipped = train_reference(tiny_model("llama"), batches, lr=1.0, clip=clip)
    moved = torch.cat([(clipped["weights"][key] - before[key]).flatten() for key in clipped["first_grads"]])
    assert clipped["grad_norms"] == free["grad_norms"]
    assert moved.norm().item() == pytest.approx(clip, rel=1e-3)
