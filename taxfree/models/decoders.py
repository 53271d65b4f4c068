"""Reads a model of Transformers into a ``Decoder``: its own tensors, where they are."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from taxfree.errors import UsageError
from taxfree.models.scaled import is_fp8_layer, step_unsupported_reason, weight_scale
from taxfree_kernels.decode_step.decoder import SCALED, Decoder, Layer, weights_of
from taxfree_kernels.variant import BLOCK

SERVED = ("llama", "mistral", "qwen2", "qwen3")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_NO_BIAS = ("o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
_OF_MLP = ("gate", "up", "down")
_CHANGING = ("dynamic", "longrope")  # rotary frequencies that depend on the length


def local(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter, where it is."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part.detach()


def _whole(parameter: Any) -> torch.Tensor:
    """A parameter on every rank. An embedding is sharded if the head is tied to it: a copy then."""
    part = local(parameter)
    if part.shape == parameter.shape:
        return part
    return parameter.full_tensor().detach()  # type: ignore[no-any-return]


def group_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """The group on which a model's parameters are sharded; None if they are not."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return None


def decoder_of(model: Any, rank: int = 0, world_size: int = 1) -> Decoder:
    """A rank's part of a Llama, Mistral, Qwen2 or Qwen3 of Transformers; collective.

    Args:
        model: for causal language modelling; whole if there is one rank, else sharded by its
            ``tp_plan``, as DTensors or as each rank's own tensors.

    Raises:
        UsageError: a step does not compute what the model does; the message says what is missing.
    """
    reason = _unsupported_reason(model) or _uneven(model.config, world_size)
    if reason is not None:
        raise _refusal(reason)
    inner, attention = model.model, model.model.layers[0].self_attn
    embedding, head = _whole(inner.embed_tokens.weight), local(model.lm_head.weight)
    vocab = len(embedding)
    share = -(-vocab // world_size)  # the last rank may have fewer rows
    if len(head) == vocab:
        head = head[rank * share :][:share]
    decoder = Decoder(
        layers=tuple(_layer(each, rank, world_size) for each in inner.layers),
        embedding=embedding,
        norm=local(inner.norm.weight),
        head=head,
        inv_freq=inner.rotary_emb.inv_freq.float(),
        head_dim=attention.head_dim,
        eps=inner.norm.variance_epsilon,
        rope_scale=float(inner.rotary_emb.attention_scaling),
        vocab_start=rank * share,
    )
    reason = _misfit(decoder, model.config, vocab, world_size)
    if reason is not None:
        raise _refusal(reason)
    return decoder


def _refusal(reason: str) -> UsageError:
    return UsageError(f"decode_step does not serve this model: {reason}", "use model.generate")


def _layer(layer: Any, rank: int, world_size: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    scaled = [getattr(mlp if name in _OF_MLP else attention, f"{name}_proj") for name in SCALED]
    projections = {name: getattr(attention, f"{name}_proj") for name in "qkv"}
    norms = {f"{name}_norm": getattr(attention, f"{name}_norm", None) for name in "qk"}
    return Layer(
        input_norm=local(layer.input_layernorm.weight),
        **{name: local(each.weight) for name, each in projections.items()},
        o=local(attention.o_proj.weight),
        post_norm=local(layer.post_attention_layernorm.weight),
        gate=local(mlp.gate_proj.weight),
        up=local(mlp.up_proj.weight),
        down=local(mlp.down_proj.weight),
        **{f"{n}_bias": local(e.bias) for n, e in projections.items() if e.bias is not None},
        **{name: local(norm.weight) for name, norm in norms.items() if norm is not None},
        window=_window(attention),
        scales=tuple(_scale(each, rank, world_size) for each in scaled if is_fp8_layer(each)),
    )


def _scale(module: Any, rank: int, world_size: int) -> torch.Tensor:
    """The rank's part of a weight's scales; all ranks may hold those of all channels."""
    scale, rows = weight_scale(module), len(local(module.weight))
    if len(scale) == world_size * rows:
        return scale[rank * rows :][:rows]
    return scale


def _window(attention: Any) -> int | None:
    """The last positions that a layer sees: a Qwen says it by layer, a Mistral for all."""
    config = attention.config
    if config.model_type == "mistral":
        return config.sliding_window  # type: ignore[no-any-return]
    return getattr(attention, "sliding_window", None)


def _unsupported_reason(model: Any) -> str | None:
    """What a step would not compute, as far as the whole model tells it; None if it is served."""
    config: Any = getattr(model, "config", None)
    inner: Any = getattr(model, "model", None)
    if config is None or not hasattr(inner, "layers") or not hasattr(model, "lm_head"):
        return f"{type(model).__name__} has no config, model.layers and lm_head, as a Llama has"
    is_quantised = getattr(config, "quantization_config", None) is not None
    if is_quantised and not any(map(is_fp8_layer, inner.modules())):
        return "its weights are quantised"
    if any(getattr(config, name, None) for name in _EXPERTS):
        return "it has experts"
    if getattr(config, "kv_lora_rank", None):
        return "its attention is latent"
    if any(getattr(config, name, None) for name in _SOFT_CAPS):
        return "its logits have a soft cap"
    for name, module in inner.named_modules():
        if name.endswith("norm") and "RMSNorm" not in type(module).__name__:
            return f"{name} is a {type(module).__name__}, not an RMSNorm"
        if getattr(module, "sinks", None) is not None:
            return "its attention has sinks"
    if config.model_type not in SERVED:
        return f"of Transformers' models it serves {', '.join(SERVED)}, not {config.model_type}"
    if config.hidden_act != "silu":
        return f"its MLPs have {config.hidden_act}, not silu"
    kinds = {type(each) for name, each in inner.named_modules() if name.endswith("_proj")}
    if len(kinds) > 1 and any(map(is_fp8_layer, inner.modules())):
        return f"its layers are {', '.join(sorted(kind.__name__ for kind in kinds))}"
    for name, module in model.named_modules():
        if (reason := _module_unsupported_reason(name, module, config)) is not None:
            return reason
    return _rotary_unsupported_reason(inner)


def _module_unsupported_reason(name: str, module: Any, config: Any) -> str | None:
    if name.endswith("norm") and module.variance_epsilon != config.rms_norm_eps:
        return f"eps of {name} is {module.variance_epsilon}, not {config.rms_norm_eps}"
    if name.endswith(("_proj", "lm_head")):
        if is_fp8_layer(module) and name.endswith("_proj"):
            if (reason := step_unsupported_reason(module)) is not None:
                return f"{name} has {reason}"
        elif type(module).forward is not torch.nn.Linear.forward:
            return f"{name} is a {type(module).__name__}, not a torch.nn.Linear"
        if name.endswith(_NO_BIAS) and module.bias is not None:
            return f"{name} has a bias, which a step does not add"
    if name.endswith("self_attn") and not math.isclose(module.scaling, module.head_dim**-0.5):
        return f"{name} is scaled by {module.scaling}, not by {module.head_dim**-0.5}"
    return None


def _rotary_unsupported_reason(inner: Any) -> str | None:
    rotary, head_dim = inner.rotary_emb, inner.layers[0].self_attn.head_dim
    if rotary.rope_type in _CHANGING:
        return f"its rotary embedding is {rotary.rope_type}: frequencies depend on the length"
    turned = 2 * rotary.inv_freq.numel()
    if turned != head_dim:
        return f"its rotary embedding is partial: {turned} of {head_dim} values of a head"
    return None


def _uneven(config: Any, world_size: int) -> str | None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % world_size:
            return f"{name} {getattr(config, name)} do not divide over {world_size} ranks"
    return None


def _misfit(decoder: Decoder, config: Any, vocab: int, world_size: int) -> str | None:
    """What is of another shape, dtype or place than a step reads; None if nothing is."""
    hidden, first = config.hidden_size, decoder.embedding
    outer, inner, middle = (
        count // world_size
        for count in (
            config.num_attention_heads * decoder.head_dim,
            config.num_key_value_heads * decoder.head_dim,
            config.intermediate_size,
        )
    )
    own = min(-(-vocab // world_size), vocab - decoder.vocab_start)
    wanted: dict[str, tuple[int, ...]] = {
        "embedding": (vocab, hidden), "norm": (hidden,), "head": (own, hidden),
        "input_norm": (hidden,), "post_norm": (hidden,),
        "q": (outer, hidden), "k": (inner, hidden), "v": (inner, hidden), "o": (hidden, outer),
        "gate": (middle, hidden), "up": (middle, hidden), "down": (hidden, middle),
        "q_bias": (outer,), "k_bias": (inner,), "v_bias": (inner,),
        "q_norm": (decoder.head_dim,), "k_norm": (decoder.head_dim,),
    }  # fmt: skip
    for holder in (decoder, *decoder.layers):
        for name, shape in wanted.items():
            tensor = getattr(holder, name, None)
            if tensor is None:
                continue
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return f"{name} is a {type(tensor).__name__}"
            dtype = first.dtype
            if name in SCALED and isinstance(holder, Layer) and holder.scales:
                dtype = torch.float8_e4m3fn
            elif tensor.dtype not in _DTYPES:
                return f"{name} is {tensor.dtype}"
            if (tensor.dtype, tensor.device) != (dtype, first.device):
                return (
                    f"{name} is {tensor.dtype} on {tensor.device}, the embedding "
                    f"{first.dtype} on {first.device}"
                )
            if tuple(tensor.shape) != shape:
                return (
                    f"this rank's part of {name} is {list(tensor.shape)}, not {list(shape)}: "
                    "it is sharded in another way"
                )
    for layer in decoder.layers:
        for weight, scale in zip(weights_of(layer), layer.scales, strict=bool(layer.scales)):
            rows, k = weight.shape
            blocks = (rows // BLOCK, k // BLOCK) if rows % BLOCK == k % BLOCK == 0 else None
            if scale.dtype != torch.float32 or scale.shape not in ((rows, 1), blocks):
                return (
                    f"scales {list(scale.shape)} in {scale.dtype} of this rank's part of a weight "
                    f"{list(weight.shape)} are not float32 of its channels or whole blocks"
                )
    return None
