"""Documented names and module paths: present, absent with a plain message, and light to import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import collie
from collie._table import MODULES

# By hand from the documented surface: `from collie import X`.
TOP_LEVEL = set(
    """
    Trainer Evaluator EvaluatorForPerplexity EvaluatorForClassfication EvaluatorForGeneration Server CollieConfig
    LlamaForCausalLM MossForCausalLM CollieModelForCausalLM ChatGLMForCausalLM InternLMForCausalLM
    ChatGLM2ForCausalLM Moss003MoonForCausalLM InternLM2ForCausalLM PipelineGenerationMixin ColumnParallelLinear
    RowParallelLinear VocabParallelEmbedding ColumnParallelLinearWithoutBias RowParallelLinearWithoutBias
    LinearWithHiddenStates ColumnParallelLMHead GPTLMLoss Callback CheckpointCallback HasMonitorCallback
    LoadBestModelCallback progress setup_distribution set_seed env setup_ds_engine zero3_load_state_dict
    is_zero3_enabled broadcast_tensor concat_tensor find_tensors BaseProvider GradioProvider DashProvider
    BaseMonitor StepTimeMonitor TGSMonitor MemoryMonitor LossMonitor EvalMonitor LRMonitor NetworkIOMonitor
    DiskIOMonitor CPUMemoryMonitor ColliePadder dict_as_params is_static_method auto_param_call
    get_keys_to_not_convert BaseMetric DecodeMetric AccuracyMetric PPLMetric BleuMetric ClassifyFPreRecMetric
    RougeMetric CollieDatasetForTraining CollieDatasetForTemplatedMultiTurnChat CollieDatasetForGeneration
    CollieDatasetForPerplexity CollieDatasetForClassification CollieBatchSampler CollieDataLoader Lomo AdaLomo
    Lion SophiaG Adan
    """.split()  # noqa: SIM905 - a list of a hundred strings is no easier to compare with the document
)

PAIRS = [(module, name) for module, table in MODULES.items() for name in table]
PRESENT = [(module, name) for module, name in PAIRS if MODULES[module][name] is not None]
ABSENT = [(module, name) for module, name in PAIRS if MODULES[module][name] is None]


def test_every_documented_top_level_name_is_in_the_table():
    assert set(MODULES["collie"]) >= TOP_LEVEL


@pytest.mark.parametrize(("module", "name"), PRESENT)
def test_present_name_resolves_to_the_object_of_that_name(module, name):
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, type):
        assert found.__name__ in (name, "MonitorGroup")
    elif callable(found):
        assert found.__name__ == name


@pytest.mark.parametrize(("module", "name"), ABSENT)
def test_absent_name_says_so(module, name):
    with pytest.raises(ImportError, match=rf"{module}\.{name} is documented, but this release"):
        exec(f"from {module} import {name}")


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = collie.Trainr  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Trainr'"):
        exec("from collie import Trainr")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_dir_lists_what_is_there(module):
    listed = dir(importlib.import_module(module))
    assert listed == sorted(name for name, target in MODULES[module].items() if target is not None)


@pytest.mark.parametrize("package", ["collie", "collie_train", "collie_eval", "collie_parallel"])
def test_importing_a_package_imports_no_heavy_library(package):
    heavy = ["torch", "transformers", "deepspeed", "megatron", "peft", "rich", "numpy"]
    code = f"import sys, {package}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_one_object_under_all_its_paths():
    import collie_train.trainer
    from collie.controller.trainer import Trainer
    from collie.utils import progress
    from collie.utils.utils import progress as from_module

    assert collie.Trainer is Trainer is collie_train.trainer.Trainer
    assert collie.progress is progress is from_module
