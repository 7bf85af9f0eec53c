"""Calling functions by the names of their parameters, and walking nested collections."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

__all__ = ["Dict", "apply_to_collection", "auto_param_call", "dictToObj", "dict_as_params", "is_static_method"]


class Dict(dict[str, Any]):
    """A dict whose keys are also attributes: `d.a` is `d["a"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{name!r} is not a key; there are {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"{name!r} is not a key; there are {sorted(self)}") from None


def dictToObj(dictObj: Any) -> Any:
    """Turn dicts, at every depth of dicts, lists and tuples, into `Dict`; anything else is returned as it is."""
    if isinstance(dictObj, dict):
        return Dict({key: dictToObj(value) for key, value in dictObj.items()})
    if isinstance(dictObj, list):
        return [dictToObj(value) for value in dictObj]
    if type(dictObj) is tuple:
        return tuple(dictToObj(value) for value in dictObj)
    return dictObj


def apply_to_collection(
    data: Any,
    dtype: type | tuple[type, ...],
    function: Callable[..., Any],
    *args: Any,
    wrong_dtype: type | tuple[type, ...] | None = None,
    include_none: bool = True,
    **kwargs: Any,
) -> Any:
    """Apply `function` to every element of type `dtype` in a nested collection and rebuild the collection around it.

    Args:
        data: a value, or mappings, sequences and named tuples of values, nested.
        dtype: what to apply `function` to. Elements of other types are kept.
        function: called as `function(element, *args, **kwargs)`.
        wrong_dtype: types left alone though they are of `dtype`.
        include_none: keep an element for which `function` returned None; otherwise it is dropped.

    Returns:
        A collection of the same types as `data`. A string is an element, never a sequence of characters.
    """
    if isinstance(data, dtype) and (wrong_dtype is None or not isinstance(data, wrong_dtype)):
        return function(data, *args, **kwargs)

    def recurse(value: Any) -> Any:
        return apply_to_collection(
            value, dtype, function, *args, wrong_dtype=wrong_dtype, include_none=include_none, **kwargs
        )

    if isinstance(data, Mapping):
        pairs = [(key, recurse(value)) for key, value in data.items()]
        pairs = [(key, value) for key, value in pairs if include_none or value is not None]
        if isinstance(data, defaultdict):
            return defaultdict(data.default_factory, OrderedDict(pairs))
        return type(data)(OrderedDict(pairs))  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(recurse(value) for value in data))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        values = [recurse(value) for value in data]
        return type(data)([value for value in values if include_none or value is not None])  # type: ignore[call-arg]
    return data


def is_static_method(func: Any) -> bool:
    """Whether `func` is a static method: the descriptor, or a function from a class that defines it so."""
    if isinstance(func, staticmethod):
        return True
    if not inspect.isfunction(func) or "." not in func.__qualname__:
        return False
    owner_path, _, name = func.__qualname__.rpartition(".")
    owner: Any = inspect.getmodule(func)
    for part in owner_path.split("."):
        owner = getattr(owner, part, None)
    return inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, name, None), staticmethod)


def auto_param_call(
    fn: Callable[..., Any],
    *args: Mapping[str, Any],
    signature_fn: Callable[..., Any] | None = None,
    mapping: Mapping[str, str] | None = None,
) -> Any:
    """Call `fn` with the values that its parameters' names find in the dicts `args`.

    Args:
        fn: any callable. Its `**kwargs` parameter, if it has one, receives everything.
        args: dicts from which values are taken.
        signature_fn: read the parameter names from this function instead (`fn` may be a wrapper).
        mapping: {key in the dicts: parameter name}.

    Returns:
        What `fn` returns.

    Raises:
        TypeError: an argument is not a dict.
        ValueError: a required parameter is in none of the dicts, or two dicts hold different values for one.

    Example:
        auto_param_call(loss_fn, {"labels": labels, "input_ids": ids}, {"logits": logits})
    """
    for position, arg in enumerate(args):
        if not isinstance(arg, Mapping):
            raise TypeError(f"auto_param_call takes dicts of values; argument {position} is {type(arg).__name__}.")
    names = dict(mapping or {})
    values: dict[str, Any] = {}
    for arg in args:
        for key, value in arg.items():
            name = names.get(key, key)
            if name in values and values[name] is not value:
                raise ValueError(f"{name!r} is in two of the dicts given, with different values. Keep one of them.")
            values[name] = value

    parameters = inspect.signature(signature_fn or fn).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return fn(**values)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    missing: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.name in values:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(values[parameter.name])
            else:
                keywords[parameter.name] = values[parameter.name]
        elif parameter.default is parameter.empty:
            missing.append(parameter.name)
    if missing:
        called = getattr(fn, "__qualname__", type(fn).__name__)
        raise ValueError(
            f"{called} needs {missing}, but there is only {sorted(values)}. Give them, or rename with mapping."
        )
    return fn(*positional, **keywords)


def dict_as_params(input_keys: str | Sequence[str], output_keys: str | Sequence[str]) -> Callable[..., nn.Module]:
    """Let a module of positional tensors live in a chain of modules that pass one dict on.

    Args:
        input_keys: keys whose values are the module's positional arguments, in order.
        output_keys: keys under which its outputs are put into the dict, in order.

    Returns:
        A builder: `builder(cls, *args, **kwargs)` makes `cls(*args, **kwargs)` with a forward from dict to dict.

    Example:
        embed = dict_as_params("input_ids", "hidden_states")(nn.Embedding, 100, 16)
        embed({"input_ids": ids})  # {"input_ids": ids, "hidden_states": [b, s, 16]}
    """
    ins = (input_keys,) if isinstance(input_keys, str) else tuple(input_keys)
    outs = (output_keys,) if isinstance(output_keys, str) else tuple(output_keys)

    def build(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        def forward(self: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
            missing = [key for key in ins if key not in inputs]
            if missing:
                raise KeyError(f"{cls.__name__} needs {missing}; the dict holds {sorted(inputs)}.")
            output = cls.forward(self, *(inputs[key] for key in ins))
            values = (output,) if len(outs) == 1 else tuple(output)
            if len(values) != len(outs):
                raise ValueError(f"{cls.__name__} returned {len(values)} values for the keys {list(outs)}.")
            return {**inputs, **dict(zip(outs, values, strict=True))}

        wrapped: Any = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
        return wrapped(*args, **kwargs)

    return build
