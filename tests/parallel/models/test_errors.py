"""What is refused before a model is built, and before any process group starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collie_parallel.config import CollieConfig
from collie_parallel.models import CollieModelForCausalLM, LlamaForCausalLM
from tests.harness.models import save_tiny, tiny_config


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group must not be started for what is refused."""
    monkeypatch.setattr(
        "collie_parallel.models.base.setup_distribution", lambda config: pytest.fail("distribution was set up")
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(save_tiny("llama", tmp_path))


def both_ways(folder: str, config: CollieConfig, **kwargs: Any) -> list[Callable[[], Any]]:
    return [
        lambda: CollieModelForCausalLM.from_pretrained(folder, config, **kwargs),
        lambda: CollieModelForCausalLM.from_config(config, **kwargs),
    ]


@pytest.mark.parametrize("kwargs", [{"tp_size": 2}, {"hidden_size": 64}, {"tp_size": 2, "train_epochs": 1}], ids=str)
def test_settings_among_the_arguments_are_named_with_where_they_belong(folder: str, kwargs: dict[str, int]) -> None:
    def without_config() -> Any:
        return CollieModelForCausalLM.from_pretrained(folder, **kwargs)

    for call in (without_config, *both_ways(folder, CollieConfig.from_pretrained(folder), **kwargs)):
        with pytest.raises(TypeError, match="belong to CollieConfig") as caught:
            call()
        for name in kwargs:
            assert name in str(caught.value)


def test_pipeline_stages(folder: str) -> None:
    for call in both_ways(folder, CollieConfig.from_pretrained(folder, pp_size=2)):
        with pytest.raises(ValueError, match=r"pp_size=2.*tp_size"):
            call()


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="'/nope/model'"):
        CollieModelForCausalLM.from_pretrained("/nope/model")


def test_a_class_for_another_architecture(folder: str) -> None:
    config = CollieConfig()
    config.model_config = tiny_config("gpt_neox")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is for model_type llama.*'gpt_neox'"):
        LlamaForCausalLM.from_config(config)
