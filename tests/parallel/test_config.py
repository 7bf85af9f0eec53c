"""`CollieConfig`: names, types, pass-through, layout, files."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftConfig
from transformers import BitsAndBytesConfig, LlamaConfig, PretrainedConfig

from collie_parallel.config import CollieConfig, load_config

# Written down from the documented surface, not read from the code.
DOCUMENTED = {
    "seed": 42,
    "pp_size": 1,
    "tp_size": 1,
    "dp_size": 1,
    "pp_partition_method": "parameters",
    "train_epochs": 100,
    "eval_per_n_steps": 0,
    "eval_per_n_epochs": 0,
    "train_micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "eval_batch_size": 1,
    "checkpointing": True,
    "use_flash": True,
    "dropout": 0.0,
    "init_method": {"init_func": torch.nn.init.normal_, "init_kwargs": {"mean": 0.0, "std": 0.02}},
    "low_cpu_mem_usage": True,
    "dataloader_num_workers": 0,
    "ds_config": {},
    "model_config": PretrainedConfig(),
    "peft_config": PeftConfig(),
    "quantization_config": BitsAndBytesConfig(),
    "sequence_parallel": False,
}
COUNTS = [name for name, value in DOCUMENTED.items() if type(value) is int]
SWITCHES = [name for name, value in DOCUMENTED.items() if type(value) is bool]
SIZES = ["tp_size", "pp_size", "dp_size", "train_micro_batch_size", "gradient_accumulation_steps", "eval_batch_size"]


def small_llama(**kwargs: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99, **kwargs
    )


# --- names and defaults


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_default(name):
    config = CollieConfig()
    assert getattr(config, name) == DOCUMENTED[name]
    assert type(getattr(config, name)) is type(DOCUMENTED[name])
    assert config.is_default(name)


def test_defaults_are_not_shared():
    first, second = CollieConfig(), CollieConfig()
    first.ds_config["bf16"] = {"enabled": True}
    first.init_method["init_kwargs"]["std"] = 1.0
    assert second.ds_config == {}
    assert second.init_method["init_kwargs"]["std"] == 0.02
    assert not first.is_default("init_method")
    assert second.is_default("init_method")


@st.composite
def misspelt(draw) -> tuple[str, str]:
    """A field's name, and that name with one letter changed, dropped, added or two of them swapped."""
    name = draw(st.sampled_from(sorted(DOCUMENTED)))
    place = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    wrong = draw(
        st.sampled_from(
            [
                name[:place] + letter + name[place + 1 :],
                name[:place] + name[place + 1 :],
                name[:place] + letter + name[place:],
                name[:place] + name[place + 1 : place + 2] + name[place] + name[place + 2 :],
            ]
        )
    )
    assume(wrong not in DOCUMENTED and not wrong.startswith("_"))
    return name, wrong


@given(misspelt())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_misspelt_field_is_refused_and_the_nearest_named(names):
    name, wrong = names
    config = CollieConfig()
    for attempt in (
        lambda: CollieConfig(**{wrong: 1}),
        lambda: setattr(config, wrong, 1),
        lambda: getattr(config, wrong),
    ):
        with pytest.raises(AttributeError) as refusal:
            attempt()
        assert repr(wrong) in str(refusal.value)
        assert repr(name) in str(refusal.value).partition("Did you mean")[2]
    assert wrong not in vars(config)


def test_the_issue_example():
    config = CollieConfig()
    with pytest.raises(AttributeError, match="Did you mean 'tp_size'"):
        config.tp_sise = 2
    assert config.tp_size == 1


def test_a_name_like_nothing_gets_no_suggestion():
    with pytest.raises(AttributeError) as refusal:
        CollieConfig(qqqqqqqq=1)
    assert "Did you mean" not in str(refusal.value)


# --- types and ranges


@given(st.sampled_from(COUNTS), st.one_of(st.text(), st.booleans(), st.none(), st.floats(), st.lists(st.integers())))
@settings(max_examples=100, deadline=None)
def test_counts_take_only_ints(name, value):
    config = CollieConfig()
    with pytest.raises(TypeError, match=rf"config\.{name}="):
        setattr(config, name, value)
    with pytest.raises(TypeError, match=rf"config\.{name}="):
        CollieConfig(**{name: value})
    assert getattr(config, name) == DOCUMENTED[name]


@given(st.sampled_from(SIZES), st.integers(max_value=0))
@settings(deadline=None)
def test_sizes_start_at_one(name, value):
    with pytest.raises(ValueError, match=rf"config\.{name}={value}\b.*at least 1"):
        CollieConfig(**{name: value})


@given(st.sampled_from(COUNTS), st.integers(1, 2**31))
@settings(deadline=None)
def test_counts_are_stored(name, value):
    config = CollieConfig(**{name: value})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is int


@pytest.mark.parametrize("name", ["train_epochs", "eval_per_n_steps", "eval_per_n_epochs", "dataloader_num_workers"])
def test_counts_that_may_be_zero(name):
    assert getattr(CollieConfig(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=f"{name}=-1"):
        CollieConfig(**{name: -1})


def test_text_number_gets_a_remedy():
    with pytest.raises(TypeError, match="write tp_size=2, without quotes"):
        CollieConfig(tp_size="2")


def test_integers_of_other_libraries_are_ints():
    import numpy

    assert type(CollieConfig(tp_size=numpy.int64(2)).tp_size) is int


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_switches_take_only_bools(name, value):
    with pytest.raises(TypeError, match=f"{name}=.*True or False"):
        CollieConfig(**{name: value})


@pytest.mark.parametrize("value", [1.0, -0.1, 2, float("nan"), float("inf")])
def test_dropout_out_of_range(value):
    with pytest.raises(ValueError, match="dropout"):
        CollieConfig(dropout=value)


@pytest.mark.parametrize("value", ["0.1", True, None])
def test_dropout_of_another_type(value):
    with pytest.raises(TypeError, match="dropout"):
        CollieConfig(dropout=value)


def test_dropout_takes_an_int_zero():
    assert type(CollieConfig(dropout=0).dropout) is float


@pytest.mark.parametrize("value", ["parameters", "uniform", "type:.*DecoderLayer"])
def test_partition_methods(value):
    assert CollieConfig(pp_partition_method=value).pp_partition_method == value


@pytest.mark.parametrize("value", ["balanced", "type:", "type:(", ""])
def test_unknown_partition_methods(value):
    with pytest.raises(ValueError, match="pp_partition_method"):
        CollieConfig(pp_partition_method=value)


@pytest.mark.parametrize(
    "value, error",
    [
        (torch.nn.init.zeros_, TypeError),
        ({}, ValueError),
        ({"init_func": "normal_"}, TypeError),
        ({"init_func": torch.nn.init.zeros_, "init_kwargs": [0]}, TypeError),
        ({"init_fun": torch.nn.init.zeros_}, ValueError),
    ],
)
def test_bad_init_method(value, error):
    with pytest.raises(error, match="init_method"):
        CollieConfig(init_method=value)


@pytest.mark.parametrize("name", ["model_config", "peft_config", "quantization_config"])
@pytest.mark.parametrize("value", ["llama", {"a": 1}, 3, torch.nn.Linear(1, 1)])
def test_foreign_objects_for_library_configs(name, value):
    with pytest.raises(TypeError, match=rf"config\.{name}="):
        CollieConfig(**{name: value})


def test_none_takes_adapter_and_quantization_away():
    config = CollieConfig(peft_config=LoraConfig(r=4), quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    config.peft_config = None
    config.quantization_config = None
    assert config.peft_config == PeftConfig()
    assert not config.quantization_config.load_in_8bit


# --- pass-through to the model config


def test_model_attributes_pass_through():
    config = CollieConfig(model_config=small_llama())
    assert config.hidden_size == 32
    config.hidden_size = 64
    assert config.model_config.hidden_size == 64
    assert "hidden_size" not in vars(config)
    config.tie_word_embeddings = True
    assert config.model_config.tie_word_embeddings is True


def test_model_attributes_of_another_name_pass_through():
    from transformers import GPT2Config

    config = CollieConfig(model_config=GPT2Config(n_embd=48))
    assert config.hidden_size == 48  # attribute_map
    config.hidden_size = 96
    assert config.model_config.n_embd == 96


def test_own_fields_come_before_the_models():
    from transformers import BartConfig

    config = CollieConfig(model_config=BartConfig(dropout=0.3))
    assert config.dropout == 0.0
    config.dropout = 0.1
    assert config.model_config.dropout == 0.3


def test_what_the_model_lacks_is_refused():
    config = CollieConfig(model_config=small_llama())
    with pytest.raises(AttributeError, match=r"LlamaConfig.*'hidden_size'.*config\.model_config\.hiden_size"):
        config.hiden_size = 64
    with pytest.raises(AttributeError, match="Did you mean 'hidden_size'"):
        _ = config.hiden_size
    assert not hasattr(config, "n_experts")
    with pytest.raises(AttributeError, match="to_dict"):
        config.to_dict = 3  # a method is no setting


# --- copies


def full_config() -> CollieConfig:
    return CollieConfig(
        seed=7,
        tp_size=2,
        pp_size=2,
        dp_size=3,
        sequence_parallel=True,
        pp_partition_method="type:Layer",
        train_epochs=0,
        eval_per_n_steps=5,
        train_micro_batch_size=4,
        gradient_accumulation_steps=3,
        dropout=0.25,
        checkpointing=False,
        init_method={"init_func": torch.nn.init.uniform_, "init_kwargs": {"a": -0.1, "b": 0.1}},
        ds_config={"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
        model_config=small_llama(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        quantization_config=BitsAndBytesConfig(llm_int8_threshold=5.0),
    )


@pytest.mark.parametrize("make", [CollieConfig, full_config])
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_clones_are_equal_and_apart(make, clone):
    config = make()
    twin = clone(config)
    assert twin == config
    twin.seed = 8
    assert twin != config
    assert config.seed == make().seed


def test_deep_copy_shares_nothing():
    config = full_config()
    twin = copy.deepcopy(config)
    twin.ds_config["bf16"]["enabled"] = False
    twin.hidden_size = 64
    assert config.ds_config["bf16"]["enabled"] is True
    assert config.hidden_size == 32


def test_equality_looks_at_values():
    read = CollieConfig()
    assert read.model_config is read.model_config  # made once
    assert read == CollieConfig() == CollieConfig(tp_size=1, ds_config={})
    assert CollieConfig(quantization_config=BitsAndBytesConfig(load_in_8bit=True)) != CollieConfig()
    assert CollieConfig(peft_config=LoraConfig(r=4)) != CollieConfig(peft_config=LoraConfig(r=8))
    assert CollieConfig(model_config=small_llama()) != CollieConfig(model_config=small_llama(pad_token_id=1))
    assert CollieConfig() != 3
    with pytest.raises(TypeError):
        hash(read)


def test_shown():
    assert repr(CollieConfig()) == "CollieConfig()"
    assert repr(CollieConfig(tp_size=2, seed=1)) == "CollieConfig(seed=1, tp_size=2)"
    text = str(full_config())
    assert all(name in text for name in DOCUMENTED)
    assert "LlamaConfig" in text and "model_type=llama" in text
    assert "uniform_" in repr(full_config())


# --- layout


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 8)))
@settings(deadline=None)
def test_layout(tp_size, pp_size, world_size, dp_size):
    config = CollieConfig(tp_size=tp_size, pp_size=pp_size, **({} if dp_size is None else {"dp_size": dp_size}))
    if world_size % (tp_size * pp_size):
        with pytest.raises(ValueError) as refusal:
            config.resolve_layout(world_size)
        assert f"tp_size={tp_size}" in str(refusal.value) and f"pp_size={pp_size}" in str(refusal.value)
        assert f"world size is {world_size}" in str(refusal.value) and "Start" in str(refusal.value)
        assert config.dp_size == (dp_size or 1)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.resolve_layout(world_size)
        config.resolve_layout(world_size)
    assert config.tp_size * config.pp_size * config.dp_size == world_size
    assert config.is_dp_size_settled
    assert len(caught) == (config.dp_size != (dp_size or 1))
    if caught:
        message = str(caught[0].message)
        assert f"dp_size={dp_size or 1}" in message and f"dp_size={config.dp_size} is used" in message
        assert ("the default" in message) == (dp_size is None)


def test_only_rank_0_warns(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    config = CollieConfig()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.resolve_layout(4)
    assert config.dp_size == 4


# --- cross checks


def test_valid_config_sees_changes_in_place():
    config = full_config()
    config.ds_config["train_micro_batch_size_per_gpu"] = 5
    with pytest.raises(ValueError, match=r"=5 contradicts config\.train_micro_batch_size=4"):
        config.valid_config()
    config = CollieConfig()
    config.init_method["init_func"] = "normal_"
    with pytest.raises(TypeError, match="init_method"):
        config.valid_config()


def test_quantized_weights_are_not_split():
    config = CollieConfig(tp_size=2, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ValueError, match=r"load_in_8bit=True.*tp_size=2"):
        config.valid_config()


def test_valid_config_is_content():
    CollieConfig().valid_config()
    full_config().valid_config()


# --- files


def test_save_and_load(tmp_path):
    config = full_config()
    config.save_pretrained(tmp_path / "new" / "folder")
    assert CollieConfig.from_pretrained(tmp_path / "new" / "folder") == config
    saved = json.loads((tmp_path / "new" / "folder" / "collie_config.json").read_text())
    assert saved["init_method"]["init_func"] == "torch.nn.init.uniform_"
    assert saved["peft_config"]["peft_type"] == "LORA"
    assert saved["quantization_config"]["llm_int8_threshold"] == 5.0


def test_save_and_load_of_the_defaults(tmp_path):
    CollieConfig().save_pretrained(tmp_path)
    assert CollieConfig.from_pretrained(str(tmp_path)) == CollieConfig()


def test_a_plain_model_folder(tmp_path):
    small_llama().save_pretrained(tmp_path)
    config = CollieConfig.from_pretrained(str(tmp_path), tp_size=2, hidden_size=64, trust_remote_code=False)
    assert isinstance(config.model_config, LlamaConfig)
    assert (config.tp_size, config.hidden_size, config.num_hidden_layers) == (2, 64, 2)


def test_arguments_win_over_the_saved(tmp_path):
    full_config().save_pretrained(tmp_path)
    config = CollieConfig.from_pretrained(tmp_path, tp_size=1, model_config=small_llama(pad_token_id=3))
    assert (config.tp_size, config.pp_size, config.pad_token_id) == (1, 2, 3)


def test_a_derived_dp_size_is_not_saved(tmp_path):
    config = CollieConfig(tp_size=2)
    with pytest.warns(UserWarning, match="dp_size=4 is used"):
        config.resolve_layout(8)
    config.save_pretrained(tmp_path)
    again = CollieConfig.from_pretrained(tmp_path)
    assert again == CollieConfig(tp_size=2)
    assert not again.is_dp_size_settled


def test_unknown_arguments_of_from_pretrained(tmp_path):
    small_llama().save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match=r"'tp_sise'.*Did you mean 'tp_size'"):
        CollieConfig.from_pretrained(tmp_path, tp_sise=2)


def test_no_config_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        CollieConfig.from_pretrained(str(tmp_path))
    with pytest.raises(OSError, match="absent"):
        CollieConfig.from_pretrained(str(tmp_path / "absent"), local_files_only=True)


def test_a_path_that_is_no_folder_is_not_asked_for_at_the_hub(monkeypatch):
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(FileNotFoundError, match=r"There is no folder '/nope/model'"):
        CollieConfig.from_pretrained("/nope/model")


def test_unknown_field_in_the_file(tmp_path):
    (tmp_path / "collie_config.json").write_text('{"tp_sise": 2}')
    with pytest.raises(ValueError, match=r"'tp_sise'.*Did you mean 'tp_size'"):
        CollieConfig.from_pretrained(tmp_path)


def test_wrong_type_in_the_file(tmp_path):
    (tmp_path / "collie_config.json").write_text('{"tp_size": "2"}')
    with pytest.raises(TypeError, match="tp_size='2'"):
        CollieConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("function", ["os.system", "torch.load", "torch.nn.init.math.exp", "torch.nn.init.torch"])
def test_a_file_cannot_make_us_import_a_function(tmp_path, function):
    (tmp_path / "collie_config.json").write_text(json.dumps({"init_method": {"init_func": function}}))
    with pytest.raises(ValueError, match=r"not a function of torch\.nn\.init"):
        CollieConfig.from_pretrained(tmp_path)
    kept = {"init_func": torch.nn.init.zeros_}
    assert CollieConfig.from_pretrained(tmp_path, init_method=kept).init_method == kept


def test_what_json_cannot_hold(tmp_path):
    config = CollieConfig(init_method={"init_func": torch.nn.init.normal_, "init_kwargs": {"generator": object()}})
    with pytest.raises(ValueError, match="cannot be saved as JSON"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "collie_config.json").exists()


def test_load_config(tmp_path):
    expected = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "eps": 1e-08}}, "steps_per_print": 10}
    (tmp_path / "a.json").write_text(json.dumps(expected))
    (tmp_path / "a.yaml").write_text(
        "optimizer:\n  type: AdamW\n  params: {lr: 1e-5, eps: 1E-08}\nsteps_per_print: 10\n"
    )
    (tmp_path / "a.YML").write_text((tmp_path / "a.yaml").read_text())
    for name in ("a.json", "a.yaml", "a.YML"):
        assert load_config(str(tmp_path / name)) == expected
        assert load_config(tmp_path / name) == expected


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["{:e}", "{:g}", "{!r}", "{:.0e}"]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_yaml_numbers_are_numbers(tmp_path, number, style):
    text = style.format(number)
    (tmp_path / "a.yaml").write_text(f"lr: {text}\n")
    assert load_config(tmp_path / "a.yaml")["lr"] == float(text)


@pytest.mark.parametrize(
    "name, text, error, message",
    [
        ("a.json", "{", ValueError, "does not parse as json"),
        ("a.json", '{"a": 1, "a": 2}', ValueError, "'a' is given twice"),
        ("a.json", "[1]", ValueError, "holds a list"),
        ("a.yaml", "a: [", ValueError, "does not parse as yaml"),
        ("a.yaml", "", ValueError, "holds a NoneType"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", ValueError, "does not parse"),
        ("a.toml", "a = 1", ValueError, r"neither \.json nor"),
    ],
)
def test_bad_config_files(tmp_path, name, text, error, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        load_config(tmp_path / name)


def test_missing_config_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        load_config(tmp_path / "absent.json")


# --- weight of the import


def test_import_is_light():
    code = (
        "import sys; from collie_parallel.config import CollieConfig; config = CollieConfig(tp_size=2); str(config);"
        "heavy = {'torch', 'transformers', 'deepspeed', 'megatron', 'peft'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
