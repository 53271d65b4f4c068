"""Models as Transformers builds them: their linear layers are read on the meta device.

The decoder runs once on a few tokens without data. That tells which layers a module calls, which
one is the last, and what is done to its sum.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from taxfree.errors import UsageError
from taxfree.problems import quoted
from taxfree_tune.shapes.models import (
    Attention,
    Block,
    Column,
    Model,
    facts_of,
    plan_note,
    quantisation_of,
    text_part,
)

Parts: TypeAlias = list[tuple[tuple[int, int], ...]]

#: of which configs make lists, and features whose norm is tried on a CPU
_MOST_LAYERS, _MOST_NORMED = 1000, 1 << 20
_PARTS = ("vision", "audio")
#: what configs call the layers that a quantisation leaves as they are
_UNQUANTISED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_ADDS = ("add", "add_", "__add__", "__radd__", "__iadd__")
_SAME_VALUES = ("view", "reshape", "contiguous", "dropout")


@cache
def built_model(text: str) -> Model:
    """Return the decoder that Transformers builds from a config.

    Args:
        text: the config, JSON.

    Raises:
        UsageError: it builds none.
        ImportError: Transformers is not installed.
    """
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # of tokens and of absent kernels, which no layer depends on
    try:
        return _model(json.loads(text))
    except (UsageError, ImportError):
        raise
    except Exception as error:  # whatever the code of a model raises for a config
        why = " ".join(str(error).split())
        raise UsageError(f"Transformers does not build it: {why[:200]}") from error
    finally:
        logging.set_verbosity(level)


def _model(document: dict[str, Any]) -> Model:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = document.get("model_type")
    if kind is None:
        raise UsageError("model_type is missing")
    if kind not in CONFIG_MAPPING:
        raise UsageError(f"Transformers knows no model_type {quoted(str(kind))}")
    _require_few_layers(document)
    config = CONFIG_MAPPING[kind].from_dict(document).get_text_config(decoder=True)
    decoder = _on_meta(config)
    dtypes = {name: text_part(document).get(name) for name in ("dtype", "torch_dtype")}
    return read_model(decoder, config.to_dict() | dtypes, document)


def _require_few_layers(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict):
            _require_few_layers(value)
        is_count = isinstance(value, int) and name.endswith(("_layer", "_layers"))
        if is_count and value > _MOST_LAYERS:
            raise UsageError(f"{name} is {value}")


def _on_meta(config: Any) -> Any:
    """The decoder of a config, without memory."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto import modeling_auto as known

    is_encoder = type(config) in known.MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder
    if config.is_encoder_decoder or is_encoder:
        raise UsageError(f"{config.model_type} is no decoder")
    has_head = type(config) in known.MODEL_FOR_CAUSAL_LM_MAPPING
    of_kind = AutoModelForCausalLM if has_head else AutoModel
    with torch.device("meta"):
        return of_kind.from_config(config, dtype=torch.bfloat16).eval()


def read_model(decoder: Any, config: Mapping[str, Any], document: Mapping[str, Any]) -> Model:
    """Return what a decoder on the meta device has.

    Args:
        decoder: of Transformers.
        config: its own, as a mapping.
        given: that of the whole model.
    """
    hidden = decoder.config.hidden_size
    heads = getattr(decoder.config, "num_attention_heads", None)
    if heads is None:
        raise UsageError(f"{decoder.config.model_type} has no attention heads")
    facts = facts_of(config)
    windows, kinds = facts.pop("windows"), config.get("layer_types")
    calls, quantised = _Calls(decoder), _quantisation(document)
    blocks, attentions, notes = list[Block](), list[Attention](), list[str]()
    others = [f"the {part} part" for part in _PARTS if document.get(f"{part}_config")]
    for name, layers in calls.by_module.items():
        module = decoder.get_submodule(name)
        last = [number for number, layer in enumerate(layers) if layer.outputs == hidden][-1:]
        columns = [layer for number, layer in enumerate(layers) if [number] != last]
        if not last or not columns:
            continue
        if _is_recurrent(module):
            others.append(f"linear attention ({type(module).__name__})")
            continue
        row = layers[last[0]]
        if empty := [layer.name for layer in layers if 0 in (layer.inputs, layer.outputs)]:
            raise UsageError(f"{empty[0]} has no features")
        behind = calls.behind[row.name]
        parts: Parts = [((column.outputs, column.outputs),) for column in columns]
        is_latent = any(column.inputs != hidden for column in columns)
        if "attention" in type(module).__name__.lower():
            dim = row.inputs // heads
            kv_heads, parts = (heads, parts) if is_latent else _heads(columns, heads, dim)
            if kv_heads < 1 or heads % kv_heads:
                raise UsageError(f"{heads} heads do not share {kv_heads} kv heads")
            number = re.search(r"\d+", name)
            seen = windows
            if isinstance(kinds, list) and number:
                seen = windows if kinds[int(number[0])] == "sliding_attention" else (0,)
                seen = seen[-1:]
            attentions += [Attention(heads, kv_heads, dim, window) for window in seen]
        blocks.append(
            Block(
                () if is_latent else tuple(map(Column, parts, (column.bias for column in columns))),
                row.inputs,
                row.bias,
                "residual" in behind,
                next((norm for norm in ("residual", "sum") if f"norm of {norm}" in behind), ""),
                *quantised(row.name),
            )
        )
        notes += _notes(decoder, row.name)
    embedded = decoder.get_output_embeddings()
    return Model(
        decoder.config.model_type,
        hidden,
        tuple(dict.fromkeys(blocks)),
        tuple(sorted(dict.fromkeys(attentions), key=lambda attention: attention.window)),
        decoder.config.num_hidden_layers,
        decoder.config.vocab_size,
        embedded is not None and embedded.bias is not None,
        others=tuple(dict.fromkeys(others)),
        notes=tuple(dict.fromkeys(notes)),
        **facts,
    )


class _Linear(NamedTuple):
    """A linear layer that was called."""

    name: str
    inputs: int
    outputs: int
    bias: bool


def _linear(name: str, module: nn.Module) -> _Linear | None:
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        sizes = module.in_features, module.out_features
    elif isinstance(module, Conv1D):
        sizes = tuple(module.weight.shape)
    else:
        return None
    return _Linear(name, *sizes, module.bias is not None)


class _Calls(TorchFunctionMode):
    """The linear layers that a decoder calls.

    Attributes:
        by_module: name of a module -> its own linear layers, in the order of their calls.
        behind: name of a linear layer -> what is done to its output: "residual", "norm of sum",
            "norm of residual".
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.by_module: dict[str, list[_Linear]] = defaultdict(list)
        self.behind: dict[str, set[str]] = defaultdict(set)
        self._sums: dict[int, list[tuple[str, str]]] = {}  # by id -> layer, "sum" or "residual"
        self._alive: list[Any] = []  # so that no id is used again
        for name, module in decoder.named_modules():
            if (linear := _linear(name, module)) is not None:
                module.register_forward_hook(self._noting(linear))
            elif _is_rms_norm(module):
                module.register_forward_pre_hook(self._normed)
            elif _is_experts(module):  # they dispatch by the values of tokens
                module.forward = lambda x, *_, **__: torch.empty_like(x)
        tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
        with self, torch.no_grad():
            decoder(input_ids=tokens, use_cache=False)

    def _noting(self, linear: _Linear) -> Any:
        def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self.by_module[linear.name.rpartition(".")[0]].append(linear)
            self._keep(output, [(linear.name, "sum")])

        return note

    def _normed(self, module: nn.Module, inputs: Any) -> None:
        for name, what in self._sums.get(id(inputs[0]), ()):
            self.behind[name].add(f"norm of {what}")

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.Tensor.item, torch.Tensor.__bool__):  # is there padding, ...
            return function is torch.Tensor.__bool__ and True
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        of_args = [self._sums.get(id(tensor), ()) for tensor in args]
        if name in _SAME_VALUES and of_args[0]:
            self._keep(result, of_args[0])
        elif name in _ADDS and all(_shape(tensor) == _shape(args[0]) for tensor in args[:2]):
            sums = [layer for of_arg in of_args for layer, what in of_arg if what == "sum"]
            for layer in sums:
                self.behind[layer].add("residual")
            self._keep(result, [(layer, "residual") for layer in sums])
        return result

    def _keep(self, tensor: Any, sums: Sequence[tuple[str, str]]) -> None:
        self._alive.append(tensor)
        self._sums[id(tensor)] = list(sums)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else None


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether a module computes what the operations do: x / rms(x) * weight."""
    if "norm" not in type(module).__name__.lower() or {*dict(module.named_parameters())} != {
        "weight"
    }:
        return False
    if (features := module.weight.numel()) > _MOST_NORMED:  # type: ignore[operator]
        raise UsageError(f"a norm of {features} features")
    copied: Any = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad(), torch.device("cpu"):
        copied.weight.fill_(2)
        x = torch.arange(copied.weight.numel()).float() + 1
        try:
            y = copied(x[None])[0]
        except Exception:  # it takes more than rows
            return False
    return bool(torch.allclose(y, 2 * x / x.pow(2).mean().sqrt(), rtol=1e-3))


def _is_experts(module: nn.Module) -> bool:
    weights = [parameter for parameter in module._parameters.values() if parameter is not None]
    return not isinstance(module, nn.Conv1d) and any(weight.dim() == 3 for weight in weights)


def _is_recurrent(module: nn.Module) -> bool:
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_convolution or "Lightning" in type(module).__name__


def _heads(columns: Sequence[_Linear], heads: int, dim: int) -> tuple[int, Parts]:
    """The kv heads of an attention, and the parts of its projections."""
    if len(columns) == 1:  # queries, keys and values
        kv_heads = (columns[0].outputs // dim - heads) // 2
        kv = kv_heads * dim, kv_heads
        return kv_heads, [((heads * dim, heads), kv, kv)]
    kv_heads = min(column.outputs for column in columns) // dim
    return kv_heads, [
        ((column.outputs, kv_heads if column.outputs == kv_heads * dim else heads),)
        for column in columns
    ]


def _notes(decoder: Any, row: str) -> Iterator[str]:
    """What the plan of Transformers says of a layer that others sum."""
    plan = decoder._tp_plan or {}
    style = plan.get(re.sub(r"\.\d+\.", ".*.", row))
    if not plan:
        yield f"all layers under Transformers, which has no plan for {decoder.config.model_type}"
    elif not str(style).startswith("rowwise"):
        yield plan_note(re.sub(r".*\.\d+\.", "", row), style)


def _quantisation(document: Mapping[str, Any]) -> Any:
    """A function of a layer's name: what :func:`quantisation_of` says of its weight."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    said = document.get("quantization_config") or text_part(document).get("quantization_config")
    if not isinstance(said, dict):
        return lambda name: ("", "")
    kept = [layer for field in _UNQUANTISED for layer in said.get(field) or ()]
    patterns = [layer.removeprefix("re:") for layer in kept]
    how = quantisation_of(said)
    return lambda name: how if should_convert_module(name, patterns) else ("", "")
