"""The tiny models are real, random in every weight, and sensitive to what the tests vary."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.harness.batches import collate, ragged_batch
from tests.harness.models import NAMES, save_tiny, tiny_config, tiny_model


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def logits(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False).logits


def ids(name: str, length: int = 12) -> torch.Tensor:
    return torch.randint(1, tiny_config(name).vocab_size, (2, length), generator=torch.Generator().manual_seed(3))


def test_no_weight_is_trivial(name: str) -> None:
    for key, parameter in tiny_model(name).named_parameters():
        assert not (parameter == 0).any() and not (parameter == 1).any(), key
        assert parameter.numel() == 1 or parameter.std() > 0.01, key


def test_the_seed_alone_decides(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = tiny_model(name, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = tiny_model(name, seed=5), tiny_model(name, seed=6)
    for (key, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), key
        assert not torch.equal(a, c), key


def test_logits_tell_tokens_apart_and_stay_moderate(name: str) -> None:
    out = logits(tiny_model(name), ids(name))
    assert out.shape == (2, 12, tiny_config(name).vocab_size)
    assert 0.1 < out.std() < 20.0 and out.abs().max() < 100.0


def test_every_parameter_matters(name: str) -> None:
    """Each parameter has a gradient that is not rounding noise, so an error in it shows."""
    model = tiny_model(name)
    input_ids = ids(name, 16)
    (logits_ := model(input_ids=input_ids, use_cache=False).logits).square().mean().backward()
    assert torch.isfinite(logits_).all()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        # Softmax does not see what is added to all keys alike: the key part of a bias has none, in exact arithmetic.
        assert parameter.grad.abs().max() > 1e-6, key


@pytest.mark.parametrize("grouped", [name for name in NAMES if name != "gpt_neox"])
def test_kv_heads_can_be_fewer(grouped: str) -> None:
    model = tiny_model(grouped, num_key_value_heads=2)
    assert torch.isfinite(logits(model, ids(grouped))).all()
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in tiny_model(grouped).parameters())


def test_windows_cut_off_context() -> None:
    for name in ("gemma2", "gemma3_text", "phi3", "mixtral"):
        windowed, free = tiny_model(name), tiny_model(name, sliding_window=64)
        free.load_state_dict(windowed.state_dict())
        input_ids = ids(name)
        difference = (logits(windowed, input_ids) - logits(free, input_ids)).abs()
        assert difference[:, :3].max() < 1e-5 and difference[:, -1].max() > 1e-3, name


def test_routers_choose_with_a_margin() -> None:
    for name in ("mixtral", "qwen3_moe"):
        model = tiny_model(name)
        with torch.no_grad():
            out = model(input_ids=ids(name, 32), use_cache=False, output_router_logits=True)
        for router_logits in out.router_logits:
            ordered = router_logits.float().softmax(-1).sort(dim=-1, descending=True).values
            assert (ordered[:, 1] - ordered[:, 2]).min() > 1e-5, name
            assert len(router_logits.topk(2).indices.unique()) == 4, f"{name}: an expert is never chosen"


def test_saved_models_come_back(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "model", seed=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    torch.testing.assert_close(logits(loaded, ids(name)), logits(tiny_model(name, seed=2), ids(name)))


def test_padding_on_the_right_does_not_change_real_tokens(name: str) -> None:
    samples = ragged_batch(random.Random(1), 4, 2, 14, tiny_config(name).vocab_size)
    model = tiny_model(name)
    batch = collate(samples)
    batch.pop("labels")
    with torch.no_grad():
        padded = model(**batch, use_cache=False).logits
    for row, sample in enumerate(samples):
        alone = logits(model, torch.tensor([sample["input_ids"]]))
        torch.testing.assert_close(padded[row, : alone.shape[1]], alone[0], rtol=1e-4, atol=1e-5)
