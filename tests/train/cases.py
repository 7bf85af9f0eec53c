"""What the ranks run for tests of the Trainer on real engines."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.harness.batches import Sample, collate, ragged_batch
from tests.harness.models import tiny_model
from tests.harness.records import Records
from tests.harness.reference import make_optimizer

ARCH = "llama"
VOCAB = 67


@dataclass(frozen=True)
class Run:
    """A short training run through the Trainer.

    Args:
        collie: a CollieModelForCausalLM instead of the plain transformers model.
    """

    tp: int = 1
    dp: int = 1
    zero: int = 0
    collie: bool = False
    accumulation: int = 2
    micro: int = 2
    samples: int = 11
    epochs: int = 2
    optimizer: str = "sgd"
    eval_per_n_steps: int = 0
    bf16: bool = False


def train_samples(run: Run) -> list[Sample]:
    return ragged_batch(random.Random(1), run.samples, 2, 11, VOCAB, fully_masked=(3,))


def eval_samples() -> list[Sample]:
    """Five samples, of very different numbers of targets: neither 2 ranks nor batches of 2 divide them."""
    return ragged_batch(random.Random(2), 5, 3, 19, VOCAB)


def make_trainer(run: Run, folder: str, **kwargs: Any) -> Any:
    """A Trainer of the run's layout over the model saved in `folder`, with perplexity on `eval_samples`."""
    from collie import CollieConfig, CollieModelForCausalLM, EvaluatorForPerplexity, Trainer

    config = CollieConfig.from_pretrained(folder)
    config.tp_size, config.dp_size = run.tp, run.dp
    config.train_micro_batch_size, config.gradient_accumulation_steps = run.micro, run.accumulation
    config.eval_batch_size, config.train_epochs, config.eval_per_n_steps = 2, run.epochs, run.eval_per_n_steps
    config.ds_config = {"zero_optimization": {"stage": run.zero}, "gradient_clipping": 1.0}
    if run.bf16:
        config.ds_config["bf16"] = {"enabled": True}
    if run.collie:
        model: Any = CollieModelForCausalLM.from_pretrained(folder, config, attn_implementation="eager")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    evaluator = EvaluatorForPerplexity(model=model, dataset=eval_samples(), config=config, collate_fn=collate)
    arguments = {
        "optimizer": lambda parameters: make_optimizer(parameters, run.optimizer, 0.05),
        "train_dataset": train_samples(run),
        "train_dataset_collate_fn": collate,
        "evaluators": [evaluator],
    }
    return Trainer(model, config, **{**arguments, **kwargs})


def train(run: Run, model_folder: str) -> dict[str, Any]:
    """Train; what this rank saw (one list of samples a batch), step losses, perplexities, and the weights on rank 0."""
    from collie import Callback, env

    class Watch(Callback):
        def __init__(self):
            self.seen: list[list[Sample]] = []
            self.losses: list[float] = []
            self.evaluated: list[float] = []

        def on_train_batch_begin(self, trainer, batch):
            self.seen.append(unpadded(batch, batch.real))

        def on_train_batch_end(self, trainer, loss):
            if trainer.engine.global_steps > len(self.losses):
                self.losses.append(trainer.engine.step_loss)

        def on_evaluate_end(self, trainer, results):
            self.evaluated.append(results["ppl"])

    watch = Watch()
    trainer = make_trainer(run, model_folder, callbacks=[watch])
    trainer.eval()
    trainer.train()
    trainer.eval()
    trainer.save_model(f"{model_folder}/trained")
    weights = read_back(f"{model_folder}/trained") if env.rank == 0 else {}
    return {"seen": watch.seen, "losses": watch.losses, "ppl": watch.evaluated, "weights": weights}


def resume(run: Run, at: int, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of a run that goes through, and of one that goes on from the checkpoint the first wrote at batch `at`."""
    from collie import Callback, env

    class SaveAt(Callback):
        def __init__(self, saves):
            self.batches, self.saves = 0, saves

        def on_train_batch_end(self, trainer, loss):
            self.batches += 1
            if self.saves and trainer.global_batch_idx == at:  # decided alike on every rank: saving is collective
                trainer.save_checkpoint(f"{folder}/checkpoint")

        def on_save_checkpoint(self, trainer):
            return {"batches": self.batches, "example": torch.ones(2)}

        def on_load_checkpoint(self, trainer, states):
            self.batches = states["batches"]

    through = make_trainer(run, folder, callbacks=[SaveAt(saves=True)])
    through.train()
    callback = SaveAt(saves=False)
    resumed = make_trainer(run, folder, callbacks=[callback])
    resumed.load_checkpoint(f"{folder}/checkpoint")
    state = {**resumed.state_dict(), "callback_batches": callback.batches}
    resumed.train()
    state["end"] = resumed.global_batch_idx
    weights = []
    for name, trainer in (("through", through), ("resumed", resumed)):
        trainer.save_model(f"{folder}/{name}")
        weights.append(read_back(f"{folder}/{name}") if env.rank == 0 else {})
    return weights[0], weights[1], state


def losses_around_a_checkpoint(run: Run, at: int, folder: str) -> tuple[dict[int, float], dict[int, float], int]:
    """Loss of each batch, by its number: of a run that saves after batch `at` and goes on, and of one that resumes.

    And the random number that comes after the resumed run.
    """
    from collie import Callback

    class Watch(Callback):
        def __init__(self, saves):
            self.losses: dict[int, float] = {}
            self.saves = saves

        def on_train_batch_end(self, trainer, loss):
            self.losses[trainer.global_batch_idx] = loss
            if self.saves and trainer.global_batch_idx == at:
                trainer.save_checkpoint(f"{folder}/checkpoint")

    through, resumed = Watch(saves=True), Watch(saves=False)
    make_trainer(run, folder, callbacks=[through]).train()
    torch.manual_seed(12345)  # what the checkpoint holds must count, not what is left over here
    trainer = make_trainer(run, folder, callbacks=[resumed])
    trainer.load_checkpoint(f"{folder}/checkpoint")
    trainer.train()
    return through.losses, resumed.losses, trainer.global_batch_idx


def save_inside_an_epoch(run: Run, folder: str) -> None:
    """A checkpoint after the first optimizer step of an epoch of several, in `folder/checkpoint`."""
    from collie import Callback

    class Save(Callback):
        def on_train_batch_end(self, trainer, loss):
            if trainer.global_batch_idx == run.accumulation - 1:
                trainer.save_checkpoint(f"{folder}/checkpoint")

    make_trainer(run, folder, callbacks=[Save()]).train()


def load_from_another_run(run: Run, model_folder: str, checkpoint: str) -> tuple[str, list[str]]:
    """The message with which a checkpoint is refused, and the names of the weights that changed on this rank."""
    trainer = make_trainer(run, model_folder)
    before, where, message = weights_here(trainer), trainer.state_dict(), ""
    try:
        trainer.load_checkpoint(checkpoint)
    except ValueError as error:
        message = str(error)
        assert trainer.state_dict() == where and trainer.engine.global_steps == 0
    after = weights_here(trainer)
    return message, [name for name, value in before.items() if not torch.equal(value, after[name])]


def weights_here(trainer: Any) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter."""
    named = trainer.engine.module.named_parameters()
    return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in named}


def train_fn_without_step(run: Run, folder: str, backward: bool) -> tuple[list[str], str]:
    """Warnings of a training whose train_fn never steps, and its error; `backward`: the train_fn calls that."""

    def train_fn(trainer, batch, global_step):
        loss = trainer.loss_fn(trainer.engine(**batch).logits, batch["labels"])
        if backward:
            trainer.engine.backward(loss)
        return loss.item()

    error = ""
    with Records() as records:
        trainer = make_trainer(run, folder, train_fn=train_fn, evaluators=[])
        try:
            trainer.train()
        except RuntimeError as refusal:
            error = str(refusal)
    assert trainer.engine.global_steps == 0
    return records.messages, error


def adapters(run: Run, folder: str) -> dict[str, Any]:
    """Train LoRA adapters, save them, train on, load them back; logits at the three moments (rank 0)."""
    from peft import LoraConfig, get_peft_model

    from collie import CollieConfig, Trainer

    config = CollieConfig(train_epochs=1, dp_size=run.dp, tp_size=run.tp)
    config.ds_config = {"zero_optimization": {"stage": run.zero}}
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(ARCH), lora)
    trainer = Trainer(model, config, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    batch = collate(train_samples(run)[:2])
    trainer.train([batch])
    saved = trainer.engine.eval_batch(batch).logits
    trainer.save_peft(f"{folder}/adapter")
    trainer.save_checkpoint(f"{folder}/checkpoint")
    refused = ""
    try:
        trainer.save_model(f"{folder}/model")
    except ValueError as error:
        refused = str(error)
    trainer.train([batch])
    later = trainer.engine.eval_batch(batch).logits
    trainer.load_peft(f"{folder}/adapter")
    loaded = trainer.engine.eval_batch(batch).logits
    trainer.train([batch])  # the optimizer's own copies were replaced, too
    again = trainer.engine.eval_batch(batch).logits
    trainer.load_checkpoint(f"{folder}/checkpoint")
    resumed = trainer.engine.eval_batch(batch).logits
    logits = {"saved": saved, "later": later, "loaded": loaded, "again": again, "resumed": resumed}
    return {
        **logits,
        "batch": batch,
        "refused": refused,
        "files": os.listdir(f"{folder}/adapter"),
    }


def own_train_fn(run: Run, model_folder: str) -> dict[str, Any]:
    """The documented way to write a train_fn, on a real engine: what this rank saw, and the weights on rank 0."""
    from collie import env

    seen = []

    def train_fn(trainer, batch, global_step):
        seen.append(unpadded(batch, batch.real))
        outputs = trainer.engine(**batch)
        loss = trainer.loss_fn(outputs.logits, batch["labels"])
        trainer.engine.backward(loss)
        trainer.engine.step()
        return loss.item()

    trainer = make_trainer(run, model_folder, train_fn=train_fn)
    trainer.train()
    trainer.save_model(f"{model_folder}/trained")
    return {"seen": seen, "weights": read_back(f"{model_folder}/trained") if env.rank == 0 else {}}


def unpadded(batch: Any, real: int) -> list[Sample]:
    rows = zip(batch["input_ids"][:real], batch["attention_mask"][:real], batch["labels"][:real], strict=True)
    return [{"input_ids": ids[mask == 1].tolist(), "labels": labels[mask == 1].tolist()} for ids, mask, labels in rows]


def read_back(folder: str) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: value.clone() for name, value in model.state_dict().items()}


def learning_rates(folder: str, given: str) -> list[float]:
    """Learning rate before each batch, with optimizer and scheduler from ds_config, as objects, or as functions."""
    from collie import Callback, CollieConfig, Trainer

    class Watch(Callback):
        def __init__(self):
            self.seen: list[float] = []

        def on_train_batch_begin(self, trainer, batch):
            self.seen.append(trainer.lr)

    model = tiny_model(ARCH)
    config = CollieConfig(train_epochs=1)
    arguments: dict[str, Any] = {}
    if given == "ds_config":
        warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"}
        config.ds_config = {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.8}},
            "scheduler": {"type": "WarmupLR", "params": warmup},
        }
    else:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.8)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if given == "functions":
            optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.8)  # noqa: E731
            scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)  # noqa: E731
        arguments = {"optimizer": optimizer, "lr_scheduler": scheduler}
    watch = Watch()
    trainer = Trainer(model, config, callbacks=watch, **arguments)
    assert trainer.optimizer is trainer.engine.optimizer and trainer.lr_scheduler is trainer.engine.lr_scheduler
    trainer.train([collate(train_samples(Run())[:2])] * 4)
    return watch.seen


def documented_script(folder: str) -> dict[str, Any]:
    """Texts, a tokenizer, the datasets and padders that the documentation names, and nothing else."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from collie import CollieConfig, CollieDatasetForTraining, CollieModelForCausalLM, EvaluatorForPerplexity, Trainer
    from collie.metrics import PPLMetric

    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "a", "b", "c", "d", "e"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    texts = [{"text": "a b c d e"}, {"text": "a b c"}, {"text": "a b c d"}]
    dataset = CollieDatasetForTraining(texts, tokenizer)
    config = CollieConfig.from_pretrained(folder)
    config.train_epochs, config.train_micro_batch_size = 30, 2
    config.eval_per_n_epochs, config.eval_batch_size = 15, 2
    config.ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    model = CollieModelForCausalLM.from_pretrained(folder, config)
    evaluator = EvaluatorForPerplexity(
        model=model, config=config, tokenizer=tokenizer, dataset=dataset, metrics={"ppl": PPLMetric()}
    )
    trainer = Trainer(model=model, config=config, tokenizer=tokenizer, train_dataset=dataset, evaluators=[evaluator])
    before = trainer.eval()["ppl"]
    trainer.train()
    after = trainer.eval()["ppl"]
    trainer.save_model(f"{folder}/out")
    prompt = tokenizer("a b", return_tensors="pt")
    ids = trainer.engine.generate(
        input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=2, do_sample=False
    )
    return {"before": before, "after": after, "ids": ids}
