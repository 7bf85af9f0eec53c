"""Where every documented name lives, module by module; None for what this release does not have yet.

The only content of this package: the modules under `collie` read their names from here.
"""

from __future__ import annotations

_PARALLEL, _EVAL, _TRAIN = "collie_parallel", "collie_eval", "collie_train"


def _from(module: str, *names: str) -> dict[str, str | None]:
    return {name: f"{module}:{name}" for name in names}


def _missing(*names: str) -> dict[str, str | None]:
    return dict.fromkeys(names)


_MODELS = f"{_PARALLEL}.models"
_DATA = f"{_PARALLEL}.data"
_CALLS = f"{_PARALLEL}.utils.calls"
_TENSORS = f"{_PARALLEL}.utils.tensors"
_LAYERS = f"{_PARALLEL}.tensor_parallel.layers"
_MONITOR = f"{_TRAIN}.monitor"

# module path -> {documented name -> "module:name" or None}
MODULES: dict[str, dict[str, str | None]] = {
    "collie.config": _from(f"{_PARALLEL}.config", "CollieConfig", "load_config"),
    "collie.module": {
        **_from(_LAYERS, "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
        **_from(f"{_PARALLEL}.losses", "GPTLMLoss"),
        **_missing(
            "ColumnParallelLinearWithoutBias",
            "LinearWithHiddenStates",
            "ColumnParallelLMHead",
            "RowParallelLinearWithoutBias",
            "PipelineGenerationMixin",
            "PipelineModel",
            "MultiParallelGrid",
        ),
    },
    "collie.callbacks": {
        **_from(f"{_TRAIN}.callbacks.callback", "Callback"),
        **_missing("CheckpointCallback", "HasMonitorCallback", "LoadBestModelCallback"),
    },
    "collie.callbacks.callback": _from(f"{_TRAIN}.callbacks.callback", "Callback"),
    "collie.callbacks.callback_manager": _from(
        f"{_TRAIN}.callbacks.callback_manager", "CallbackManager", "prepare_callback"
    ),
    "collie.callbacks.checkpoint_callback": _missing("CheckpointCallback"),
    "collie.callbacks.has_monitor_callback": _missing("CanItemDataType", "ResultsMonitor", "HasMonitorCallback"),
    "collie.callbacks.load_best_model_callback": _missing("LoadBestModelCallback"),
    "collie.callbacks.topk_saver": _missing("Saver", "TopkQueue", "TopkSaver"),
    "collie.controller": {
        **_from(f"{_TRAIN}.trainer", "Trainer"),
        **_from(f"{_EVAL}.evaluator", "Evaluator"),
        **_from(f"{_EVAL}.perplexity", "EvaluatorForPerplexity"),
        **_missing("EvaluatorForClassfication", "EvaluatorForClassification", "EvaluatorForGeneration", "Server"),
    },
    "collie.controller.evaluator": {
        **_from(f"{_EVAL}.evaluator", "Evaluator"),
        **_from(f"{_EVAL}.perplexity", "EvaluatorForPerplexity"),
        **_missing("EvaluatorForClassfication", "EvaluatorForClassification", "EvaluatorForGeneration"),
    },
    "collie.controller.server": _missing("Server"),
    "collie.controller.trainer": _from(f"{_TRAIN}.trainer", "Trainer"),
    "collie.data": {
        **_from(f"{_DATA}.batch_sampler", "CollieBatchSampler"),
        **_from(f"{_DATA}.dataloader", "CollieDataLoader"),
        **_from(f"{_DATA}.dataset", "CollieDatasetForTraining"),
        **_missing(
            "CollieDatasetForPerplexity",
            "CollieDatasetForTemplatedMultiTurnChat",
            "CollieDatasetForGeneration",
            "CollieDatasetForClassification",
        ),
    },
    "collie.data.batch_sampler": _from(f"{_DATA}.batch_sampler", "CollieBatchSampler"),
    "collie.data.dataloader": _from(f"{_DATA}.dataloader", "CollieDataLoader"),
    "collie.data.dataset": {
        **_from(f"{_DATA}.dataset", "CollieDatasetForTraining"),
        **_missing(
            "CollieDatasetForPerplexity",
            "CollieDatasetForTemplatedMultiTurnChat",
            "CollieDatasetForGeneration",
            "CollieDatasetForClassification",
        ),
    },
    "collie.data.template_utils": _missing("prepare_chatml_messages", "prepare_moss_messages", "tokenize_conversation"),
    "collie.driver.io.base": _missing("IODriver"),
    "collie.driver.io.file": _missing("FileIODriver"),
    "collie.metrics": {
        **_from(f"{_EVAL}.metrics.base", "BaseMetric"),
        **_from(f"{_EVAL}.metrics.ppl", "PPLMetric"),
        **_missing("AccuracyMetric", "BleuMetric", "ClassifyFPreRecMetric", "DecodeMetric", "RougeMetric"),
    },
    "collie.metrics.accuracy": _missing("AccuracyMetric"),
    "collie.metrics.base": _from(f"{_EVAL}.metrics.base", "BaseMetric"),
    "collie.metrics.bleu": _missing("BleuMetric", "ngrams", "lcs", "modified_precision"),
    "collie.metrics.classify_f1_pre_rec_metric": _missing("ClassifyFPreRecMetric"),
    "collie.metrics.decode": _missing("DecodeMetric"),
    "collie.metrics.ppl": _from(f"{_EVAL}.metrics.ppl", "PPLMetric"),
    "collie.metrics.rouge": _missing(
        "Ngrams", "ngrams", "rouge_n", "f_r_p_rouge_n", "rouge_l_summary_level", "RougeMetric"
    ),
    "collie.models": {
        **_from(_MODELS, "CollieModelForCausalLM", "LlamaForCausalLM", "InternLMForCausalLM", "InternLM2ForCausalLM"),
        **_missing("ChatGLMForCausalLM", "ChatGLM2ForCausalLM", "MossForCausalLM", "Moss003MoonForCausalLM"),
    },
    "collie.models.base": _from(_MODELS, "CollieModelForCausalLM"),
    "collie.models.chatglm.model": _missing("ChatGLMForCausalLM"),
    "collie.models.chatglm2.model": _missing("ChatGLM2ForCausalLM"),
    "collie.models.internlm.model": _from(_MODELS, "InternLMForCausalLM"),
    "collie.models.internlm2.model": _from(_MODELS, "InternLM2ForCausalLM"),
    "collie.models.llama.model": _from(_MODELS, "LlamaForCausalLM"),
    "collie.models.moss.model": _missing("MossForCausalLM"),
    "collie.models.moss_moon.model": _missing("Moss003MoonForCausalLM"),
    "collie.optim": _missing("AdaLomo", "Adan", "Lion", "Lomo", "SophiaG"),
    "collie.optim.adalomo": _missing("AdaLomo"),
    "collie.optim.adan": _missing("Adan", "MultiTensorApply"),
    "collie.optim.lion": _missing("Lion"),
    "collie.optim.lomo": _missing("Lomo", "DynamicLossScaler"),
    "collie.optim.sophiag": _missing("SophiaG", "sophiag"),
    "collie.utils.data_provider": _missing("BaseProvider", "GradioProvider", "DashProvider", "_GenerationStreamer"),
    "collie.utils.dist_utils": {
        **_from(f"{_PARALLEL}.topology", "Env", "env", "setup_distribution"),
        **_from(f"{_PARALLEL}.seed", "set_seed"),
        **_from(_TENSORS, "broadcast_tensor"),
        **_from(f"{_PARALLEL}.ds_config", "is_zero3_enabled"),
        **_missing(
            "zero3_load_state_dict",
            "setup_ds_engine",
            "is_port_occupied",
            "find_free_port",
            "patch_deepspeed",
            "patch_transformers",
            "patch_megatron",
            "patch_bitesandbytes",
            "launch",
            "initialize",
        ),
    },
    "collie.utils.metric_wrapper": _from(f"{_EVAL}.metrics.wrapper", "_MetricsWrapper"),
    "collie.utils.monitor": {
        **_from(
            _MONITOR,
            "BaseMonitor",
            "DummyDeepSpeedMonitor",
            "EvalMonitor",
            "LRMonitor",
            "LossMonitor",
            "StepTimeMonitor",
            "_MultiMonitors",
            "get_monitor",
        ),
        **_missing("TGSMonitor", "MemoryMonitor", "NetworkIOMonitor", "DiskIOMonitor", "CPUMemoryMonitor"),
    },
    "collie.utils.padder": _from(f"{_DATA}.padder", "ColliePadder"),
    "collie.utils.peft_utils": _missing(
        "patch_peft_model", "patch_prompt_tuning", "patch_peft", "pp_merge_peft", "load_peft"
    ),
    "collie.utils.utils": {
        **_from(f"{_TRAIN}.progress", "progress"),
        **_from(
            _CALLS,
            "Dict",
            "apply_to_collection",
            "auto_param_call",
            "dictToObj",
            "dict_as_params",
            "is_static_method",
        ),
        **_from(_TENSORS, "concat_tensor", "find_tensors", "get_keys_to_not_convert", "stack_tensor"),
    },
}

MODULES["collie.utils"] = {
    name: target
    for module in ("dist_utils", "padder", "utils", "monitor", "data_provider")
    for name, target in MODULES[f"collie.utils.{module}"].items()
    if not name.startswith("_")
}
MODULES["collie.driver.io"] = {**MODULES["collie.driver.io.base"], **MODULES["collie.driver.io.file"]}
MODULES["collie.driver"] = {}

# What `from collie import X` takes.
_TOP_LEVEL = {
    "collie.controller": (
        "Trainer",
        "Evaluator",
        "EvaluatorForPerplexity",
        "EvaluatorForClassfication",
        "EvaluatorForClassification",
        "EvaluatorForGeneration",
        "Server",
    ),
    "collie.config": ("CollieConfig",),
    "collie.models": (
        "LlamaForCausalLM",
        "MossForCausalLM",
        "CollieModelForCausalLM",
        "ChatGLMForCausalLM",
        "InternLMForCausalLM",
        "ChatGLM2ForCausalLM",
        "Moss003MoonForCausalLM",
        "InternLM2ForCausalLM",
    ),
    "collie.module": (
        "PipelineGenerationMixin",
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "ColumnParallelLinearWithoutBias",
        "RowParallelLinearWithoutBias",
        "LinearWithHiddenStates",
        "ColumnParallelLMHead",
        "GPTLMLoss",
    ),
    "collie.callbacks": ("Callback", "CheckpointCallback", "HasMonitorCallback", "LoadBestModelCallback"),
    "collie.utils": (
        "progress",
        "setup_distribution",
        "set_seed",
        "env",
        "setup_ds_engine",
        "zero3_load_state_dict",
        "is_zero3_enabled",
        "broadcast_tensor",
        "concat_tensor",
        "find_tensors",
        "BaseProvider",
        "GradioProvider",
        "DashProvider",
        "BaseMonitor",
        "StepTimeMonitor",
        "TGSMonitor",
        "MemoryMonitor",
        "LossMonitor",
        "EvalMonitor",
        "LRMonitor",
        "NetworkIOMonitor",
        "DiskIOMonitor",
        "CPUMemoryMonitor",
        "ColliePadder",
        "dict_as_params",
        "is_static_method",
        "auto_param_call",
        "get_keys_to_not_convert",
    ),
    "collie.metrics": (
        "BaseMetric",
        "DecodeMetric",
        "AccuracyMetric",
        "PPLMetric",
        "BleuMetric",
        "ClassifyFPreRecMetric",
        "RougeMetric",
    ),
    "collie.data": (
        "CollieDatasetForTraining",
        "CollieDatasetForTemplatedMultiTurnChat",
        "CollieDatasetForGeneration",
        "CollieDatasetForPerplexity",
        "CollieDatasetForClassification",
        "CollieBatchSampler",
        "CollieDataLoader",
    ),
    "collie.optim": ("Lomo", "AdaLomo", "Lion", "SophiaG", "Adan"),
}
MODULES["collie"] = {name: MODULES[module][name] for module, names in _TOP_LEVEL.items() for name in names}
