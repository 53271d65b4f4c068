"""A stand-in of vLLM: what the plugin uses of it, with the recorded signatures, and nothing else.

Its functions are made from `integrations/vllm/signatures.json`, so that a call with other arguments
fails as vLLM's would; its objects have the recorded attributes alone.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import importlib.machinery
import json
import logging
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.library import Library

from taxfree_kernels.fp8 import dequantised, quantised_weight
from tests.ranks import ROOT

FOLDER = ROOT / "integrations" / "vllm"
RECORDED: dict[str, Any] = json.loads((FOLDER / "signatures.json").read_text())
_LINEAR = "vllm.model_executor.layers.linear"


def recorded(where: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a recorded signature, which calls `behaviour` by the parameters' names."""
    names: dict[str, Any] = {"behaviour": behaviour}
    exec(f"def made{RECORDED['functions'][where]}: return behaviour(**locals())", names)
    made: Callable[..., Any] = names["made"]
    return made


def having(where: str, **values: Any) -> SimpleNamespace:
    """An object that has what is recorded of a class."""
    assert sorted(values) == RECORDED["attributes"][where], where
    return SimpleNamespace(**values)


class _Mode(enum.IntEnum):
    NONE = 0
    VLLM_COMPILE = 3


class UnquantizedLinearMethod:
    apply = recorded(
        f"{_LINEAR}:UnquantizedLinearMethod.apply",
        lambda self, layer, x, bias: nn.functional.linear(x, layer.weight, bias),
    )


class QuantizedLinearMethod(UnquantizedLinearMethod):
    pass


class Fp8LinearMethod:
    """Weights in fp8 as vLLM has them: [n, k] with scales of blocks, else [k, n] once loaded.

    Args:
        scales: of whom: "block", "channel", or "tensor", also a static one of the input.
    """

    scales = "block"

    def create_weights(self, layer: Any) -> None:
        weight = layer.weight.float()
        values, scale = quantised_weight(weight.t(), self.scales)
        layer.weight = nn.Parameter(values.t().contiguous(), requires_grad=False)
        layer.weight_block_size = [128, 128] if self.scales == "block" else None
        name = "weight_scale_inv" if self.scales == "block" else "weight_scale"
        setattr(layer, name, nn.Parameter(scale.t().contiguous(), requires_grad=False))
        layer.input_scale = None
        if self.scales == "tensor":
            layer.input_scale = nn.Parameter(torch.tensor([0.01]), requires_grad=False)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.scales != "block":
            layer.weight = nn.Parameter(layer.weight.t(), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = dequantised_weight(layer).to(x.dtype)
        return nn.functional.linear(x, weight, bias)


class ChannelsLinearMethod(Fp8LinearMethod):
    scales = "channel"


class TensorLinearMethod(Fp8LinearMethod):
    scales = "tensor"


for made in (ChannelsLinearMethod, TensorLinearMethod):
    made.__name__ = "Fp8LinearMethod"  # by which the plugin knows them


def dequantised_weight(layer: Any) -> torch.Tensor:
    """float32 [n, k]: what a layer's weight in fp8 stands for."""
    weight = layer.weight if layer.weight.stride(1) == 1 else layer.weight.t()
    blocks = getattr(layer, "weight_scale_inv", None)
    return dequantised(weight, layer.weight_scale if blocks is None else blocks)


class RowParallelLinear(nn.Module):
    """vLLM's layer as far as the plugin is concerned."""

    others: dict[str, type[nn.Module]] = {}  # noqa: RUF012

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(cls.others.get(cls.__name__, cls))

    register_oot = classmethod(
        recorded(
            "vllm.model_executor.custom_op:PluggableLayer.register_oot",
            lambda cls, _decorated_layer_cls, name: lambda made: cls.others.setdefault(name, made),
        )
    )

    def _init(self, **given: Any) -> None:
        nn.Module.__init__(self)
        size = ENGINE.group.world_size
        values = {
            "tp_size": 1 if given["disable_tp"] else size,
            "output_size_per_partition": given["output_size"],
            "input_size_per_partition": given["input_size"] // size,
            "quant_method": (given["quant_config"] or UnquantizedLinearMethod)(),
            "bias": None,
        } | {
            name: given[name]
            for name in ("input_is_parallel", "reduce_results", "return_bias", "skip_bias_add",
                         "params_dtype")
        }  # fmt: skip
        attributes = RECORDED["attributes"]
        known = {*attributes[f"{_LINEAR}:LinearBase"], *attributes[f"{_LINEAR}:RowParallelLinear"]}
        assert values.keys() == known
        for name, value in values.items():
            setattr(self, name, value)
        shape = given["output_size"], self.input_size_per_partition
        self.weight = nn.Parameter(torch.randn(shape).to(self.params_dtype), requires_grad=False)
        if given["bias"]:
            bias = torch.arange(shape[0]).to(self.params_dtype)
            self.bias = nn.Parameter(bias, requires_grad=False)
        if isinstance(self.quant_method, Fp8LinearMethod):
            self.quant_method.create_weights(self)

    __init__ = recorded(
        f"{_LINEAR}:RowParallelLinear.__init__", lambda self, **given: self._init(**given)
    )

    def _library(self, x: torch.Tensor) -> Any:
        is_added = ENGINE.group.rank_in_group == 0 and not self.skip_bias_add
        y = self.quant_method.apply(self, x, self.bias if is_added else None)
        if self.reduce_results and self.tp_size > 1:
            y = ENGINE.group.all_reduce(y)
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    forward = recorded(
        f"{_LINEAR}:RowParallelLinear.forward", lambda self, input_: self._library(input_)
    )


class _Coordinator:
    """A group of ranks that sums by itself."""

    def __init__(self) -> None:
        group = dist.new_group()
        values = {"device_group": group, "rank_in_group": dist.get_rank(), "unique_name": "tp:0"}
        assert (
            sorted(values)
            == RECORDED["attributes"]["vllm.distributed.parallel_state:GroupCoordinator"]
        )
        self.__dict__.update(values, world_size=dist.get_world_size())

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y, group=self.device_group)
        return y

    all_reduce = recorded(
        "vllm.distributed.parallel_state:GroupCoordinator.all_reduce",
        lambda self, input_: self._sum(input_),
    )


class InductorPass(CustomGraphPass):
    hash_dict = staticmethod(
        recorded(
            "vllm.compilation.passes.inductor_pass:InductorPass.hash_dict",
            lambda dict_: hashlib.sha256(json.dumps(dict_, sort_keys=True).encode()).hexdigest(),
        )
    )


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = x.float() + x_residual.float()
    part = summed if variance_size is None else summed[:, :variance_size]
    normalised = summed * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + epsilon)
    assert weight is not None
    return (normalised.to(weight.dtype) * weight).to(x.dtype), summed.to(x.dtype)


_norm = recorded("vllm.ir.ops.layernorm:fused_add_rms_norm", _fused_add_rms_norm)
_NORM_SCHEMA = (
    "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, "
    "int? variance_size=None) -> (Tensor, Tensor)"
)


class _Engine:
    """The state of the stand-in: its group and its configuration."""

    group: Any = None
    config: Any = None

    def configure(
        self, mode: int = _Mode.NONE, most_rows: int = 64, use_ubatching: bool = False
    ) -> Any:
        self.config = having(
            "vllm.config.vllm:VllmConfig",
            compilation_config=having(
                "vllm.config.compilation:CompilationConfig", mode=mode, inductor_compile_config={}
            ),
            parallel_config=having(
                "vllm.config.parallel:ParallelConfig",
                prefill_context_parallel_size=1, use_ubatching=use_ubatching,
            ),
            scheduler_config=having(
                "vllm.config.scheduler:SchedulerConfig", max_num_batched_tokens=most_rows
            ),
        )  # fmt: skip
        return self.config


ENGINE = _Engine()


def _modules() -> dict[str, dict[str, Any]]:
    """Modules by name, with what the plugin imports."""
    assert [each.name for each in _Mode] == RECORDED["attributes"][
        "vllm.config.compilation:CompilationMode"
    ]
    platform = having("vllm.platforms.interface:Platform", pass_key="post_grad_custom_post_pass")
    ops = SimpleNamespace(fused_add_rms_norm=torch.ops.vllm_ir.fused_add_rms_norm)
    return {
        "vllm": {},
        "vllm.compilation": {},
        "vllm.compilation.passes": {},
        "vllm.compilation.passes.inductor_pass": {"InductorPass": InductorPass},
        "vllm.config": {
            "CompilationMode": _Mode,
            "VllmConfig": object,
            "get_current_vllm_config": recorded(
                "vllm.config.vllm:get_current_vllm_config", lambda: ENGINE.config
            ),
        },
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "GroupCoordinator": _Coordinator,
            "get_tp_group": recorded(
                "vllm.distributed.parallel_state:get_tp_group", lambda: ENGINE.group
            ),
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.ir": {"ops": ops},
        "vllm.logger": {"init_logger": recorded("vllm.logger:init_logger", logging.getLogger)},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        _LINEAR: {
            "RowParallelLinear": RowParallelLinear,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        "vllm.platforms": {"current_platform": platform},
    }


@cache
def plugin() -> Any:
    """The plugin's module, imported once in this process with the stand-in in vLLM's place."""
    library = Library("vllm_ir", "DEF")
    library.define(_NORM_SCHEMA)
    library.impl("fused_add_rms_norm", _norm, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "vllm_ir::fused_add_rms_norm", lambda x, *_: (x.clone(), x.clone()), lib=library
    )
    plugin.library = library  # type: ignore[attr-defined]
    ENGINE.group = _Coordinator()
    for name, content in _modules().items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("taxfree_vllm.row_parallel")
    finally:  # nothing else here is to find them
        sys.path.remove(str(FOLDER))
        for name in _modules():
            del sys.modules[name]
