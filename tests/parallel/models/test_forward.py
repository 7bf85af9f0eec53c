"""Any call of a model gives what the plain model gives: odd lengths, left padding, positions, embeddings, caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.models import NAMES, save_tiny
from tests.harness.pool import RankError, RankPool
from tests.parallel.models.cases import Call, Layout, answer, forward_all, generate_all

SPLIT = Layout(tp=2, sequence_parallel=True)
layouts = pytest.mark.parametrize(
    "layout", [Layout(tp=2), SPLIT, Layout(tp=4, sequence_parallel=True)], ids=["tp2", "sp2", "sp4"]
)


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], width: int) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask with the padding before the tokens."""
    input_ids, mask = ids(len(lengths), width), torch.ones(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        input_ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return {"input_ids": input_ids, "attention_mask": mask}


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def calls() -> list[Call]:
    padded, odd = left_padded([7, 3, 5], 7), left_padded([6, 2], 6)
    return [
        *[Call({"input_ids": ids(2, length)}) for length in (1, 2, 3, 5, 8)],
        Call(padded),
        Call(odd),
        Call({**padded, "position_ids": positions(padded["attention_mask"])}),
        Call({"input_ids": ids(2, 5), "position_ids": torch.arange(3, 8)[None]}),
        Call({"input_ids": ids(2, 5)}, embeds=True),
        Call(padded, embeds=True),
        Call({**padded, "use_cache": True}),
        Call({**padded, "output_hidden_states": True}),
        Call({**odd, "output_hidden_states": True}),
        # The first token of a row is no target: padding would predict it.
        Call({**padded, "labels": padded["input_ids"].masked_fill(positions(padded["attention_mask"]) == 0, -100)}),
        Call({**padded, "return_dict": False}),
        *[Call({**padded, "logits_to_keep": keep}) for keep in (1, 2, 3)],
        Call({**padded, "logits_to_keep": torch.tensor([4, 6])}),
    ]


def real(call: Call, output: dict[str, Any]) -> dict[str, Any]:
    """An output without the positions of padding, which mean nothing."""
    mask = call.inputs.get("attention_mask")
    if mask is None or "logits_to_keep" in call.inputs:
        return output
    keep = mask.bool()
    return {
        name: tuple(v[keep] for v in value) if isinstance(value, tuple) else value[keep] if value.ndim > 1 else value
        for name, value in output.items()
    }


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), SPLIT, Layout(tp=4, sequence_parallel=True)], ids=["tp2", "sp2", "sp4"]
)
@pytest.mark.parametrize("arch", NAMES)
def test_forward(pool2: RankPool, pool4: RankPool, tmp_path: Path, arch: str, layout: Layout) -> None:
    folder = save_tiny(arch, tmp_path / arch)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    results = (pool2 if layout.tp == 2 else pool4).run(forward_all, layout, str(folder), calls())
    for number, call in enumerate(calls()):
        with torch.no_grad():
            expected = real(call, answer(plain, call))
        for result in results:
            assert result[number].keys() == expected.keys()
            torch.testing.assert_close(
                real(call, result[number]),
                expected,
                rtol=1e-4,
                atol=1e-4,
                msg=lambda m, n=number: f"call {n}: {m}",
            )


def test_a_mask_that_cannot_be_padded_is_refused(pool2: RankPool, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(RankError, match=r"length 5 is padded to a multiple of tp_size=2.*\[2, 1, 5, 5\].*\[b, s\]"):
        pool2.run(forward_all, SPLIT, str(folder), [Call({"input_ids": ids(2, 5), "attention_mask": mask})])


GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False}


def generations() -> list[dict[str, Any]]:
    batch, single = left_padded([6, 2, 5, 1], 6), {"input_ids": ids(1, 5), "attention_mask": torch.ones(1, 5).long()}
    return [
        {**batch, **GREEDY, "pad_token_id": 0},
        {**single, **GREEDY},
        {**batch, **GREEDY, "pad_token_id": 0, "use_cache": False},
        {**batch, **GREEDY, "pad_token_id": 0, "num_beams": 2},
        {**single, **GREEDY, "min_new_tokens": 7},
    ]


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), SPLIT, Layout(tp=4, sequence_parallel=True)], ids=["tp2", "sp2", "sp4"]
)
@pytest.mark.parametrize("arch", NAMES)
def test_greedy_and_beam_generation(
    pool2: RankPool, pool4: RankPool, tmp_path: Path, arch: str, layout: Layout
) -> None:
    folder = save_tiny(arch, tmp_path / arch, seed=3)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    results = (pool2 if layout.tp == 2 else pool4).run(generate_all, layout, str(folder), generations())
    for number, batch in enumerate(generations()):
        expected = plain.generate(**batch).tolist()
        for result in results:
            assert result[number] == expected, f"generation {number}"


def test_ranks_sample_the_same_tokens(pool2: RankPool, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "llama")
    batch = {**left_padded([6, 2], 6), "do_sample": True, "max_new_tokens": 20, "pad_token_id": 0}
    first, second = pool2.run(generate_all, Layout(tp=2), str(folder), [batch, batch])
    assert first == second
    assert first[0] != first[1]
