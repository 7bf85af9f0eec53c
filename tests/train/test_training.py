"""The Trainer on real engines, against a plain loop over the plain model on the samples that the ranks saw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.harness.batches import collate, count_targets
from tests.harness.models import save_tiny, tiny_model
from tests.harness.reference import make_optimizer, token_losses, train_reference
from tests.train import cases
from tests.train.cases import Run

pytestmark = pytest.mark.distributed

ONE = [Run(epochs=2, eval_per_n_steps=3)]
TWO = [
    Run(dp=2),
    Run(dp=2, zero=1, accumulation=1),
    Run(dp=2, zero=2),
    Run(dp=2, zero=3, eval_per_n_steps=2),
    Run(tp=2, collie=True, eval_per_n_steps=3),
]


@pytest.fixture
def folder(tmp_path):
    """A folder with the untrained model."""
    return str(save_tiny(cases.ARCH, tmp_path))


def perplexity(model):
    """exp(sum of token losses / number of targets), one sample at a time."""
    samples, total = cases.eval_samples(), 0.0
    with torch.no_grad():
        for sample in samples:
            batch = collate([sample])
            total += token_losses(model(input_ids=batch["input_ids"]).logits, batch["labels"]).item()
    return math.exp(total / count_targets(samples))


def check(run, results):
    samples = cases.train_samples(run)
    replicas = [results[rank] for rank in range(0, run.tp * run.dp, run.tp)]  # tensor ranks see the same
    per_batch = [[s for seen in parts for s in seen] for parts in zip(*(r["seen"] for r in replicas), strict=True)]
    per_epoch = len(per_batch) // run.epochs
    steps = []
    for epoch in range(run.epochs):
        batches = per_batch[epoch * per_epoch : (epoch + 1) * per_epoch]
        seen = [sample for batch in batches for sample in batch]
        assert sorted(map(str, seen)) == sorted(map(str, samples)), "every sample once an epoch"
        for start in range(0, per_epoch, run.accumulation):
            steps.append([sample for batch in batches[start : start + run.accumulation] for sample in batch])
    model = tiny_model(cases.ARCH)
    before = perplexity(model)
    expected = train_reference(model, steps, lr=0.05, optimizer=run.optimizer, clip=1.0)
    after = perplexity(model.eval())
    for result in results:
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-5, atol=1e-6
        )
        assert result["ppl"][0] == pytest.approx(before, rel=1e-5)
        assert result["ppl"][-1] == pytest.approx(after, rel=1e-4)
        due = run.epochs * per_epoch // run.eval_per_n_steps if run.eval_per_n_steps else 0
        assert len(result["ppl"]) == 2 + due
    for name, value in expected["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", ONE)
def test_one_process(pool1, run, folder):
    check(run, pool1.run(cases.train, run, folder))


@pytest.mark.parametrize("run", TWO, ids=str)
def test_two_ranks(pool2, run, folder):
    check(run, pool2.run(cases.train, run, folder))


@pytest.mark.parametrize(
    "run",
    [
        Run(dp=2, zero=0, optimizer="adamw"),
        Run(dp=2, zero=1, optimizer="adamw"),
        Run(dp=2, zero=2, optimizer="adamw"),
        Run(dp=2, zero=3, optimizer="adamw"),
        Run(tp=2, collie=True, optimizer="adamw"),
    ],
    ids=str,
)
def test_resuming_gives_the_weights_of_the_run_that_goes_through(pool2, run, folder):
    at = 4 if run.tp == 2 else 3
    results = pool2.run(cases.resume, run, at, folder)
    through, resumed, state = results[0]
    for name, value in through.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-6)
    batches = 6 if run.tp == 2 else 3
    assert state["end"] == 2 * batches
    assert state["callback_batches"] == at + 1
    assert all(r[2] == state for r in results)


@pytest.mark.parametrize("at", [1, 4, 5, 9], ids=lambda at: f"after-batch-{at}")
@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_goes_on_from_a_checkpoint_inside_a_step(pool1, pool2, tmp_path, tp, at):
    """Steps of three batches: 1, 4 and 9 are inside of one, 5 ends one."""
    folder = str(save_tiny(cases.ARCH, tmp_path, attention_dropout=0.3))
    run = Run(tp=tp, collie=tp == 2, accumulation=3, optimizer="adamw")
    for through, resumed, end in (pool1 if tp == 1 else pool2).run(cases.losses_around_a_checkpoint, run, at, folder):
        first = (at + 1) // 3 * 3
        assert list(through) == list(range(12)) and list(resumed) == list(range(first, 12)) and end == 12
        assert resumed == {batch: loss for batch, loss in through.items() if batch >= first}


SAVED = Run(dp=2, zero=1, accumulation=2, micro=1, epochs=1, optimizer="adamw")
OTHERS = {
    "tensor parallel": (Run(tp=2, collie=True, zero=1, accumulation=2, micro=1, optimizer="adamw"), "'tp_size': 2"),
    "ZeRO stage 2": (replace(SAVED, zero=2), "'zero_stage': 2"),
    "ZeRO stage 3": (replace(SAVED, zero=3), "'zero_stage': 3"),
    "bf16": (replace(SAVED, bf16=True), "torch.bfloat16"),
    "SGD": (replace(SAVED, optimizer="sgd"), "'optimizer': 'SGD'"),
    "accumulation": (replace(SAVED, accumulation=1), "'gradient_accumulation_steps': 1"),
    "micro-batches": (replace(SAVED, micro=2), "'train_micro_batch_size': 2"),
}


def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(pool2, tmp_path):
    """The weights are others than the checkpoint's, so reading them would show, as it does for the same run."""
    folder, other = str(save_tiny(cases.ARCH, tmp_path / "a")), str(save_tiny(cases.ARCH, tmp_path / "b", seed=1))
    pool2.run(cases.save_inside_an_epoch, SAVED, folder)
    for name, (run, words) in OTHERS.items():
        for message, changed in pool2.run(cases.load_from_another_run, run, other, f"{folder}/checkpoint"):
            assert words in message, f"{name}: {message or 'was loaded'}"
            assert changed == [], name
    for message, changed in pool2.run(cases.load_from_another_run, SAVED, other, f"{folder}/checkpoint"):
        assert message == "" and len(changed) == len(list(tiny_model(cases.ARCH).parameters()))


@pytest.mark.parametrize(("accumulation", "backward"), [(1, True), (1, False), (2, False)])
def test_a_train_fn_that_never_steps_is_told_once(pool1, folder, accumulation, backward):
    run = Run(accumulation=accumulation, epochs=2)
    ((messages, error),) = pool1.run(cases.train_fn_without_step, run, folder, backward)
    assert len(messages) == 1 and "engine.step()" in messages[0]
    assert error == ""


def test_a_train_fn_that_leaves_out_the_step_inside_a_window_is_refused(pool1, folder):
    ((messages, error),) = pool1.run(cases.train_fn_without_step, Run(accumulation=2), folder, True)
    assert messages == [] and "engine.step()" in error


@pytest.mark.parametrize("zero", [0, 3])
def test_adapters_are_saved_and_loaded_as_peft_does(pool2, zero, tmp_path):
    from peft import PeftModel

    result = pool2.run(cases.adapters, Run(dp=2, zero=zero), str(tmp_path))[0]
    assert not torch.allclose(result["saved"], result["later"])
    for name in ("loaded", "resumed"):
        torch.testing.assert_close(result[name], result["saved"])
    torch.testing.assert_close(result["again"], result["later"])
    assert sorted(result["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert "save_peft" in result["refused"]
    plain = PeftModel.from_pretrained(tiny_model(cases.ARCH), str(tmp_path / "adapter")).eval()
    batch = result["batch"]
    logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(logits, result["saved"], rtol=1e-4, atol=1e-4)


def test_documented_train_fn_averages_the_mean_losses_of_a_step(pool2, folder):
    run = Run(dp=2, samples=8, epochs=1)
    results = pool2.run(cases.own_train_fn, run, folder)
    parts = [part for result in results for part in result["seen"]]
    assert len(parts) == 4, "two micro-batches on each of two ranks, one step"
    model = tiny_model(cases.ARCH)
    optimizer = make_optimizer(model.parameters(), run.optimizer, 0.05)
    for part in parts:
        batch = collate(part)
        labels = batch.pop("labels")
        mean = token_losses(model(**batch).logits, labels) / max(count_targets(part), 1)
        (mean / len(parts)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", ["objects", "functions"])
def test_optimizer_and_scheduler_of_the_user(pool1, folder, given):
    (seen,) = pool1.run(cases.learning_rates, folder, given)
    assert seen == pytest.approx([0.8, 0.4, 0.2, 0.1])


def test_optimizer_and_scheduler_of_ds_config(pool1, folder):
    (seen,) = pool1.run(cases.learning_rates, folder, "ds_config")
    assert seen[1:] == pytest.approx([0.0, 0.2, 0.4])  # DeepSpeed counts its warm-up from the first step


def test_the_documented_script_learns_and_plain_transformers_reads_what_it_saved(pool1, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (result,) = pool1.run(cases.documented_script, folder)
    assert result["after"] < 2 < result["before"]
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/out")
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/out")
    prompt = tokenizer("a b", return_tensors="pt")
    ids = model.generate(
        input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=2, do_sample=False
    )
    assert tokenizer.decode(ids[0]) == "a b c d"
    assert torch.equal(ids, result["ids"])
