"""The whole way of a model, on whatever machine this is: corpus, tokenizer, training, checkpoint, resume, generation.

    torchrun --nproc_per_node 2 examples/demo.py      # the processes share every layer (tensor parallelism)
    python examples/demo.py                           # one process, the same numbers

A Llama of about seven million parameters learns from the documentation of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from collie import (
    Callback,
    CollieConfig,
    CollieModelForCausalLM,
    EvaluatorForPerplexity,
    PPLMetric,
    Trainer,
    env,
    setup_distribution,
)
from corpus import pieces, standard_library_documentation, train_tokenizer

PROMPTS = ("Return a list of", "The file object", "class")


def main() -> None:
    options = parse()
    tp_size = int(os.environ.get("WORLD_SIZE", "1"))
    config = CollieConfig(
        model_config=LlamaConfig(
            vocab_size=options.vocab,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 11 // 4,
            num_hidden_layers=options.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=options.length,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        tp_size=tp_size,
        train_epochs=1,
        train_micro_batch_size=options.batch,
        eval_batch_size=options.batch,
        checkpointing=False,
        ds_config={"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "gradient_clipping": 1.0},
    )
    transformers.utils.logging.disable_progress_bar()
    setup_distribution(config)

    say(f"1. corpus and tokenizer -> {options.out}")
    tokenizer, train_samples, eval_samples = prepare(options)

    model = CollieModelForCausalLM.from_config(config)
    trainer = make_trainer(model, config, tokenizer, train_samples, eval_samples)
    full = sum(p.numel() * (tp_size if getattr(p, "collie_shard", None) else 1) for p in model.parameters())
    say(f"2. a Llama of {full / 1e6:.1f} M parameters on {tp_size} process(es), tensor parallel")
    say(f"   perplexity before training: {trainer.eval()['ppl']:.1f}")

    say("3. first epoch")
    trainer.train()
    say(f"   perplexity: {trainer.eval()['ppl']:.1f}")

    say("4. checkpoint, then a new Trainer that resumes from it for a second epoch")
    trainer.save_checkpoint(str(options.out / "checkpoint"))
    config.train_epochs = 2
    resumed = make_trainer(CollieModelForCausalLM.from_config(config), config, tokenizer, train_samples, eval_samples)
    resumed.load_checkpoint(str(options.out / "checkpoint"))
    resumed.train()
    perplexity = resumed.eval()["ppl"]
    say(f"   perplexity after training: {perplexity:.1f}")

    say("5. saved in Hugging Face format, reloaded by plain transformers")
    resumed.save_model(str(options.out / "model"))
    if env.rank == 0:
        show(options.out / "model", tokenizer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for everything that is written")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of an epoch")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the tokenizer's vocabulary")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    return parser.parse_args()


def prepare(
    options: argparse.Namespace,
) -> tuple[PreTrainedTokenizerFast, list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """The tokenizer (made by rank 0), the training samples and the evaluation samples."""
    texts = standard_library_documentation()
    random.Random(0).shuffle(texts)
    folder = options.out / "tokenizer"
    if env.rank == 0:
        train_tokenizer(texts, options.vocab, folder)
    env.barrier()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    samples = pieces(texts, tokenizer, options.length)
    count = options.steps * options.batch
    return tokenizer, samples[:count], samples[-4 * options.batch :]


def make_trainer(
    model: torch.nn.Module,
    config: CollieConfig,
    tokenizer: PreTrainedTokenizerFast,
    train_samples: list[dict[str, list[int]]],
    eval_samples: list[dict[str, list[int]]],
) -> Trainer:
    evaluator = EvaluatorForPerplexity(model=model, dataset=eval_samples, config=config, metrics={"ppl": PPLMetric()})
    return Trainer(
        model,
        config,
        tokenizer=tokenizer,
        train_dataset=train_samples,
        evaluators=[evaluator],
        callbacks=[ShowLoss()],
    )


class ShowLoss(Callback):
    """Prints the mean loss of every ten steps, with the speed."""

    def on_train_begin(self, trainer: Trainer) -> None:
        self.losses: list[float] = []
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) == 10:
            seconds = (time.perf_counter() - self.started) / 10
            say(f"   step {trainer.global_batch_idx + 1:4d}  loss {sum(self.losses) / 10:.3f}  {seconds:.2f} s a step")
            self.losses, self.started = [], time.perf_counter()


def show(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A few greedy continuations, after `>>>`, by the plain transformers model that `folder` holds."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
        tokens = plain.generate(**inputs, max_new_tokens=24, do_sample=False, repetition_penalty=1.3)
        new = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"   {prompt} >>> {' '.join(new.split())}")
    print(f"   the model is in {folder}: AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def say(text: str) -> None:
    if env.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
