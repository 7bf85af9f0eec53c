"""A small English corpus that every machine has: the documentation inside Python's standard library."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_SKIPPED = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}


def standard_library_documentation() -> list[str]:
    """The language reference that `help()` shows, and the docstrings of the library's modules, classes, functions."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if not _SKIPPED & set(path.relative_to(library).parts)]
    texts = [topics[name] for name in sorted(topics)]
    for file in files:
        texts += _docstrings(file.read_text(encoding="utf-8", errors="replace"))
    return texts


def train_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `<s>` starts and `</s>` ends a document. Saved to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    fast.save_pretrained(folder)
    return fast


def pieces(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> list[dict[str, list[int]]]:
    """The documents one after another, cut into samples of `length` tokens."""
    stream: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    starts = range(0, len(stream) - length + 1, length)
    return [{"input_ids": stream[i : i + length], "labels": stream[i : i + length]} for i in starts]


def _docstrings(source: str) -> list[str]:
    try:
        with warnings.catch_warnings(action="ignore"):  # odd escapes in old modules
            tree = ast.parse(source)
    except SyntaxError:  # files that are templates
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in found if text and len(text) > 200]
