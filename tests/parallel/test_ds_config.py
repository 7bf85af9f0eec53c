"""`collie_parallel.ds_config`: what DeepSpeed gets, and what is refused before it starts."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig

from collie_parallel import ds_config
from collie_parallel.config import CollieConfig


@pytest.fixture(autouse=True)
def cpu_device(monkeypatch):
    """The answers for a CPU device are what is tested, whatever machine this is."""
    monkeypatch.setattr("collie_parallel.device.has_accelerator", lambda: False)


def resolve(settings: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return ds_config.resolve(CollieConfig(ds_config=settings or {}, **fields))


# --- batch sizes


@given(st.integers(1, 64), st.integers(1, 64))
@settings(deadline=None)
def test_batch_sizes_are_filled(micro, steps):
    resolved = resolve(train_micro_batch_size=micro, gradient_accumulation_steps=steps)
    assert resolved["train_micro_batch_size_per_gpu"] == micro
    assert resolved["gradient_accumulation_steps"] == steps


@given(st.integers(1, 8), st.integers(1, 8))
@settings(deadline=None)
def test_contradictions_name_both_values(given_value, own):
    for key, field in (
        ("train_micro_batch_size_per_gpu", "train_micro_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        config = CollieConfig(ds_config={key: given_value}, **{field: own})
        if given_value == own:
            assert ds_config.resolve(config)[key] == own
        else:
            with pytest.raises(ValueError) as refusal:
                ds_config.resolve(config)
            assert f"[{key!r}]={given_value} contradicts config.{field}={own}" in str(refusal.value)
            assert f"Set config.{field}={given_value}" in str(refusal.value)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 512))
@settings(deadline=None)
def test_train_batch_size(micro, steps, replicas, total):
    fields = {"train_micro_batch_size": micro, "gradient_accumulation_steps": steps, "dp_size": replicas}
    right = micro * steps * replicas
    assert resolve({"train_batch_size": right}, **fields)["train_batch_size"] == right
    if total != right:
        with pytest.raises(ValueError) as refusal:
            resolve({"train_batch_size": total}, **fields)
        for number in (f"={total} ", f"={micro} ", f"={steps} ", f"={replicas}."):
            assert number in str(refusal.value)


def test_train_batch_size_before_and_after_the_world_size_is_known():
    config = CollieConfig(ds_config={"train_batch_size": 8}, train_micro_batch_size=2)
    ds_config.check(config)  # four replicas would fit
    with pytest.warns(UserWarning):
        config.resolve_layout(4)
    ds_config.check(config)
    config = CollieConfig(ds_config={"train_batch_size": 8}, train_micro_batch_size=2)
    with pytest.warns(UserWarning):
        config.resolve_layout(2)
    with pytest.raises(ValueError, match=r"train_batch_size'\]=8 .*dp_size=2"):
        ds_config.resolve(config)
    with pytest.raises(ValueError, match="a whole number of replicas"):
        resolve({"train_batch_size": 7}, train_micro_batch_size=2)


@pytest.mark.parametrize("value", [True, 0, -4, "8", 8.0, None])
def test_train_batch_size_of_another_kind(value):
    with pytest.raises(ValueError, match="train_batch_size"):
        resolve({"train_batch_size": value}, train_micro_batch_size=3)


# --- reading


def test_paths_are_read_at_once(tmp_path):
    content = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    (tmp_path / "ds.yaml").write_text("bf16: {enabled: true}\noptimizer: {type: AdamW, params: {lr: 1e-5}}\n")
    for path in (tmp_path / "ds.json", str(tmp_path / "ds.yaml")):
        config = CollieConfig(ds_config=path)
        assert config.ds_config == content
        assert ds_config.precision(config) is torch.bfloat16
    (tmp_path / "ds.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"ds\.json"):
        CollieConfig(ds_config=tmp_path / "ds.json")


@pytest.mark.parametrize("value", [None, 3, [], {"a"}])
def test_neither_dict_nor_path(value):
    with pytest.raises(TypeError, match=r"config\.ds_config="):
        CollieConfig(ds_config=value)


@given(st.sampled_from(sorted(ds_config.KNOWN_KEYS)), st.data())
@settings(max_examples=150, deadline=None)
def test_misspelt_keys_are_refused(key, data):
    place = data.draw(st.integers(0, len(key) - 1))
    wrong = key[:place] + key[place + 1 :]
    if wrong in ds_config.KNOWN_KEYS or wrong.startswith("_") or len(key) < 5:
        return
    with pytest.raises(ValueError) as refusal:
        CollieConfig(ds_config={wrong: 1})
    assert repr(wrong) in str(refusal.value)
    assert repr(key) in str(refusal.value).partition("Did you mean")[2]


@pytest.mark.parametrize("key", sorted(ds_config.REMOVED_KEYS))
def test_dropped_settings_are_refused(key):
    with pytest.raises(ValueError, match=f"{key}.*dropped"):
        CollieConfig(ds_config={key: {}})


def test_unknown_settings_pass_with_a_warning():
    with pytest.warns(UserWarning, match="'brand_new'"):
        config = CollieConfig(ds_config={"brand_new": 1, "_comment": "mine"})
    with pytest.warns(UserWarning, match="'brand_new'"):
        assert ds_config.resolve(config)["brand_new"] == 1


class _Asked(dict):
    """A dict that notes which keys it is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `key in d.keys()` asks as well

    def __copy__(self) -> _Asked:
        return self


def test_known_keys_are_what_deepspeed_reads():
    from deepspeed.runtime import config as deepspeed_config

    asked = _Asked({"train_micro_batch_size_per_gpu": 1})
    deepspeed_config.DeepSpeedConfig(asked)
    assert asked.asked <= ds_config.KNOWN_KEYS | ds_config.REMOVED_KEYS
    removed = set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert removed == ds_config.REMOVED_KEYS
    assert not removed & ds_config.KNOWN_KEYS


# --- ZeRO, precision, clipping


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stage(stage):
    config = CollieConfig(ds_config={"zero_optimization": {"stage": stage}})
    assert ds_config.zero_stage(config) == stage
    assert ds_config.is_zero3_enabled(config) is (stage == 3)


def test_zero_stage_without_a_section():
    assert ds_config.zero_stage(CollieConfig()) == 0
    assert ds_config.zero_stage(CollieConfig(ds_config={"zero_optimization": True})) == 1


@pytest.mark.parametrize("stage", [4, -1, "3", "auto", 1.0, True, None])
def test_no_such_zero_stage(stage):
    with pytest.raises(ValueError, match=r"stage.*0, 1, 2 or 3"):
        resolve({"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_not_split_under_a_pipeline(stage):
    with pytest.raises(ValueError, match=rf"stage {stage}.*pp_size=2"):
        resolve({"zero_optimization": {"stage": stage}}, pp_size=2)


def test_precision():
    def of(settings, **fields):
        return ds_config.precision(CollieConfig(ds_config=settings, **fields))

    assert of({}) is torch.float32
    assert of({"fp16": {"enabled": False}, "bf16": {}}) is torch.float32
    assert of({"fp16": {"enabled": True}}) is torch.float16
    assert of({"bf16": {"enabled": True}, "fp16": {"enabled": False}}) is torch.bfloat16
    assert of({"bfloat16": {"enabled": True}}) is torch.bfloat16


def test_both_precisions():
    with pytest.raises(ValueError, match=r"fp16\.enabled=True and bf16\.enabled=True"):
        resolve({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.parametrize("section", ["fp16", "bf16"])
@pytest.mark.parametrize("value", ["true", 1, None])
def test_enabled_is_a_switch(section, value):
    with pytest.raises(ValueError, match=rf"{section}.*enabled"):
        resolve({section: {"enabled": value}})


@pytest.mark.parametrize("value, norm", [(None, 0.0), (0, 0.0), (1, 1.0), (0.5, 0.5), ("auto", 1.0)])
def test_gradient_clipping(value, norm):
    config = CollieConfig(ds_config={} if value is None else {"gradient_clipping": value})
    assert ds_config.gradient_clipping(config) == norm
    assert ds_config.resolve(config)["gradient_clipping"] == norm  # without it DeepSpeed would clip at 1.0


@pytest.mark.parametrize("value", [-1, "1", True, float("nan")])
def test_bad_gradient_clipping(value):
    with pytest.raises(ValueError, match="gradient_clipping"):
        resolve({"gradient_clipping": value})


@pytest.mark.parametrize("section", ["optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "monitor_config"])
def test_sections_are_mappings(section):
    with pytest.raises(TypeError, match=rf"{section}.*mapping"):
        CollieConfig(ds_config={section: "AdamW"})


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_sections_without_a_type(section):
    with pytest.raises(ValueError, match=rf"{section}.*no type"):
        resolve({section: {"params": {}}})


# --- what DeepSpeed gets


def test_defaults_that_the_user_can_override():
    resolved = resolve()
    assert resolved["zero_allow_untested_optimizer"] is True
    assert resolved["zero_force_ds_cpu_optimizer"] is False
    assert resolved["wall_clock_breakdown"] is False
    assert resolved["steps_per_print"] > 10**6
    assert resolve({"steps_per_print": 5, "wall_clock_breakdown": True})["steps_per_print"] == 5


def test_the_users_dict_stays_as_it_was():
    given_settings = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": "auto"}},
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "monitor_config": {"wandb": {"enabled": True}},
    }
    before = copy.deepcopy(given_settings)
    config = CollieConfig(ds_config=given_settings)
    resolved = ds_config.resolve(config)
    resolved["optimizer"]["params"]["lr"] = 9
    assert config.ds_config == given_settings == before
    assert ds_config.resolve(CollieConfig(ds_config=ds_config.resolve(config))) == ds_config.resolve(config)


def test_monitors_keep_their_section_to_themselves():
    section = {"wandb": {"enabled": True, "project": "p"}}
    config = CollieConfig(ds_config={"monitor_config": section})
    assert "monitor_config" not in ds_config.resolve(config)
    assert "wandb" not in ds_config.resolve(config)
    assert ds_config.monitor_config(config) == section
    assert ds_config.monitor_config(CollieConfig()) == {}


HF_TRAINER_STYLE = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "data_types": {"keep_in_fp32_modules": "auto"},
}


def test_auto_as_for_transformers_trainer():
    config = CollieConfig(
        ds_config=HF_TRAINER_STYLE,
        model_config=LlamaConfig(hidden_size=10, num_attention_heads=1, dtype="bfloat16"),
        train_micro_batch_size=2,
        gradient_accumulation_steps=3,
    )
    resolved = ds_config.resolve(config)
    assert ds_config.precision(config) is torch.bfloat16
    assert (resolved["bf16"]["enabled"], resolved["fp16"]["enabled"]) == (True, False)
    assert resolved["optimizer"]["params"] == {
        "lr": 2e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "torch_adam": True,
    }
    assert resolved["scheduler"]["params"] == {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-5, "warmup_num_steps": 1}
    assert resolved["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 100,
        "stage3_prefetch_bucket_size": 90,
        "stage3_param_persistence_threshold": 100,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    assert resolved["train_micro_batch_size_per_gpu"] == 2
    assert resolved["gradient_accumulation_steps"] == 3
    assert resolved["gradient_clipping"] == 1.0
    assert "train_batch_size" not in resolved
    assert resolved["data_types"]["keep_in_fp32_modules"] == "auto"  # DeepSpeed's own word


@pytest.mark.parametrize(
    "settings, path",
    [
        ({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
        ),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size"),
    ],
)
def test_auto_that_nothing_answers(settings, path):
    with pytest.raises(ValueError, match=rf"'auto' for {path}\b"):
        resolve(settings, model_config=PretrainedConfig())


# --- the optimizer's type and parameters


def check_optimizer(kind: str, **params: Any) -> None:
    ds_config.check(CollieConfig(ds_config={"optimizer": {"type": kind, "params": params}}))


@pytest.mark.parametrize(("kind", "nearest"), [("Adamm", "adam"), ("AdamWW", "adamw"), ("SDG", "sgd")])
def test_an_optimizer_of_no_library_is_refused_and_the_nearest_named(kind, nearest):
    with pytest.raises(ValueError, match=rf"'type'\]='{kind}'.*Did you mean ") as caught:
        check_optimizer(kind, lr=0.1)
    assert nearest in str(caught.value).partition("Did you mean")[2].lower()


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "RMSprop"])
def test_a_parameter_that_the_optimizer_lacks_is_refused_with_those_it_has(kind):
    with pytest.raises(ValueError, match=rf"'learning_rate', which {kind} does not take.* takes .*\blr\b") as caught:
        check_optimizer(kind, learning_rate=0.1)
    assert "params," not in str(caught.value)
    with pytest.raises(ValueError, match="Did you mean 'weight_decay'"):
        check_optimizer(kind, weigth_decay=0.1)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "adamw", "Adam", "Lamb", "Lion", "Adagrad", "RMSprop"])
def test_optimizers_of_deepspeed_and_torch_pass(kind):
    check_optimizer(kind, lr=0.1, weight_decay=0.01)


def test_deepspeeds_own_parameters_of_adam_pass():
    check_optimizer("AdamW", lr=0.1, betas=[0.9, 0.99], eps=1e-6, torch_adam=True, adam_w_mode=True)


# --- nothing is compiled on a CPU device


@pytest.mark.parametrize("name", ["Adam", "AdamW", "adamw"])
@pytest.mark.parametrize("params", [None, {}, {"lr": 0.1}, {"lr": 0.1, "torch_adam": False}])
@pytest.mark.parametrize("offload", [False, True])
def test_adam_is_pytorchs_on_a_cpu_device(name, params, offload):
    section = {"type": name} | ({} if params is None else {"params": params})
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}} if offload else {"stage": 0}
    resolved = resolve({"optimizer": section, "zero_optimization": zero})
    assert resolved["optimizer"]["params"]["torch_adam"] is True
    assert resolved["zero_optimization"] == zero


@pytest.mark.parametrize("name", ["Lamb", "Lion"])
def test_compiled_optimizers_are_refused_on_a_cpu_device(name):
    with pytest.raises(ValueError, match=rf"{name}.*compiles.*optimizer object"):
        resolve({"optimizer": {"type": name, "params": {}}})


def test_adagrad_is_compiled_for_offload_only():
    section = {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
    assert resolve(section)["optimizer"] == section["optimizer"]
    with pytest.raises(ValueError, match="Adagrad"):
        resolve({**section, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})


def test_an_accelerator_keeps_deepspeeds_optimizers(monkeypatch):
    monkeypatch.setattr("collie_parallel.device.has_accelerator", lambda: True)
    for name in ("AdamW", "Lion"):
        section = {"optimizer": {"type": name, "params": {"lr": 0.1}}}
        assert resolve(section)["optimizer"] == section["optimizer"]
