"""A model's layers, and the problems that tensor parallelism makes of them.

The layers are those that Transformers builds from a config (`taxfree_tune.built`). Those of the
models of `known_models.json` need no Transformers: it holds the fields that are read here of the
`config.json` of each repository that it names, and the layers that Transformers' plan does not sum.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from taxfree.errors import UsageError
from taxfree.problems import DTYPE_ALIASES, quoted
from taxfree_kernels.variant import BLOCK, MOST_HEAD_DIM
from taxfree_tune.shapes.text import read_text

#: How a model comes to run the operations: its row-parallel layers sum, as under PyTorch's tensor
#: parallelism, Transformers and vLLM; its rows are sharded between the layers, too; or an engine
#: calls the operations of attention.
ModelPath: TypeAlias = Literal["tp", "sequence", "attention"]
#: What an operation does in a model
Role: TypeAlias = Literal["sum", "gather_rows", "scatter_rows", "decode", "prompt"]

PATHS: dict[ModelPath, tuple[Role, ...]] = {
    "tp": ("sum",),
    "sequence": ("gather_rows", "scatter_rows"),
    "attention": ("decode", "prompt"),
}
Fields: TypeAlias = dict[str, int | str]

_DTYPES = ("dtype", "torch_dtype")  # newer configs have the first
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ALTERNATING = ("gemma2", "gemma3", "gpt_oss")  # layers with and without a window
_CONFIG_HINT = "give the config.json of a Hugging Face decoder model"


@dataclass(frozen=True)
class Column:
    """A linear layer whose output features are sharded.

    Args:
        parts: features, and the heads or single features that they are dealt in; of fewer heads
            than ranks each rank has one.
        bias: whether it has one.
    """

    parts: tuple[tuple[int, int], ...]
    bias: bool = False

    def features(self, tp: int) -> int:
        """Those of one rank."""
        return sum(size // count * max(1, count // tp) for size, count in self.parts)


@dataclass(frozen=True)
class Block:
    """Linear layers on the same rows, and the one that sums what is computed from them.

    Args:
        columns: the layers on the rows; none where each rank has them whole.
        inputs: input features of the last layer, which are sharded.
        bias: whether that one has a bias.
        adds_residual: whether its sum is added to a residual.
        norm: what an RMSNorm normalises: the sum, the sum with the residual, or neither.
        quantised: how the weights are quantised; empty if they are not.
        scales: who has a scale, if that is a format of fp8 that operations compute in; else empty.
    """

    columns: tuple[Column, ...]
    inputs: int
    bias: bool = False
    adds_residual: bool = True
    norm: Literal["", "sum", "residual"] = "residual"
    quantised: str = ""
    scales: str = ""


@dataclass(frozen=True)
class Attention:
    """Query heads, kv heads, columns of each, and the last keys that are seen; 0: all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True)
class Model:
    """A decoder.

    Args:
        family: its type in Transformers, such as "llama".
        hidden: columns of the residual stream.
        blocks, attentions: each kind once; attention's block is the first.
        layers, vocabulary: how many there are, and tokens.
        head_bias: whether the layer to the vocabulary has one.
        dtype: in which it computes; None if the config does not say.
        experts: number of routed experts; 0 for a dense model.
        latent_dim: of the keys that a decode of latent attention reads; 0 for other attention.
        has_soft_cap, has_sinks, has_alibi, has_chunks: whether attention caps its logits, has a
            learned sink or linear biases, or has layers that see a chunk.
        others: what else of the model no operation serves.
        notes: layers that the plan of Transformers does not sum as others do.
    """

    family: str
    hidden: int
    blocks: tuple[Block, ...]
    attentions: tuple[Attention, ...]
    layers: int
    vocabulary: int
    head_bias: bool = False
    dtype: str | None = None
    experts: int = 0
    latent_dim: int = 0
    has_soft_cap: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    has_chunks: bool = False
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_served(self) -> bool:
        """Whether the operations compute in its dtype, if it says one."""
        return self.dtype is None or self.dtype in DTYPE_ALIASES.values()

    @property
    def scales(self) -> str:
        """Who has a scale in the weights of all layers, where a step takes such; else "none"."""
        (scales, *others) = {block.scales for block in self.blocks}
        return scales if scales in ("channel", "block") and not others else "none"

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.attentions[0].heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.attentions[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.attentions[0].head_dim

    @property
    def head(self) -> Column:
        """The layer to the vocabulary."""
        return Column(((self.vocabulary, self.vocabulary),), self.head_bias)


# -- configs --


@cache
def known_models() -> dict[str, tuple[str, ...]]:
    """Names of the models that need no config file -> their Hugging Face repositories."""
    return {name: tuple(entry["repositories"]) for name, entry in _known().items()}


@cache
def _known() -> dict[str, Any]:
    text = files("taxfree_tune.shapes").joinpath("known_models.json").read_text(encoding="utf-8")
    models: dict[str, Any] = json.loads(text)
    return models


def load_model(name: str | Path) -> Model:
    """Return a model.

    Args:
        name: path of a config, or of the folder it is in; else the name of a known model or of
            one of its repositories.

    Raises:
        UsageError: there is no such file or model, or no decoder is built from the file.
    """
    if _is_known(name):
        return _known_model(known_entry(str(name)))
    text = json.dumps(_file(Path(name)))
    try:
        from taxfree_tune.built import built_model

        return built_model(text)
    except ImportError as error:
        raise UsageError(
            f"model config {quoted(str(name))} is read by Transformers, which is not installed",
            "pip install 'taxfree[models]', or name one of: " + ", ".join(known_models()),
        ) from error
    except UsageError as error:
        what = f"model config {quoted(str(name))}: {error.message}"
        raise UsageError(what, _CONFIG_HINT) from error


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the decoder."""
    # A multimodal model keeps its decoder's dimensions one level down, and perhaps not its type.
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        return config
    return {name: config[name] for name in _DTYPES if name in config} | text_config


def _is_known(name: str | Path) -> bool:
    """Whether a model is named, not a file."""
    return not os.path.exists(name) and not str(name).endswith(".json")


def _file(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(read_text(path, "model config"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model config {quoted(str(path))} is not JSON", _CONFIG_HINT) from error
    if not isinstance(config, dict):
        raise UsageError(f"model config {quoted(str(path))} is not an object", _CONFIG_HINT)
    return config


def known_entry(name: str) -> Mapping[str, Any]:
    """What is known of a model: its `config`, and of what Transformers' `plan` does not sum.

    Raises:
        UsageError: no model has this name or repository.
    """
    wanted = name.lower()
    for called, repositories in known_models().items():
        if wanted == called or wanted in map(str.lower, repositories):
            entry: dict[str, Any] = _known()[called]
            return entry
    close = get_close_matches(wanted, known_models(), n=1)
    raise UsageError(
        f"model {quoted(name)} is neither a file nor a known model",
        f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known_models())}",
    )


def _known_model(entry: Mapping[str, Any]) -> Model:
    """A known model: what Transformers builds from its config, without Transformers."""
    config = entry["config"]
    family, hidden = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    is_latent, has_bias = "kv_lora_rank" in config, config.get("attention_bias", False)
    dim = config["v_head_dim"] if is_latent else config.get("head_dim", hidden // heads)
    q, kv = (heads * dim, heads), (kv_heads * dim, kv_heads)
    columns = [(q,), (kv,), (kv,)] if family != "phi3" else [(q, kv, kv)]
    qkv_bias = has_bias or family == "qwen2"
    # Gemma's norms, one of which is before the residual, are none that the operation computes.
    how, scales = quantisation_of(config.get("quantization_config", {}))
    behind: dict[str, Any] = {"quantised": how, "scales": scales}
    if family.startswith("gemma"):
        behind |= {"adds_residual": False, "norm": ""}
    blocks = [
        Block(
            () if is_latent else tuple(Column(parts, qkv_bias) for parts in columns),
            heads * dim,
            has_bias,
            **behind,
        )
    ]
    for width, is_shared in _mlps(config):
        count, features = (1, 2 * width) if family == "phi3" else (2, width)
        gate_up = (Column(((features, features),)),) * count
        blocks.append(Block(gate_up, width, **behind | ({"norm": ""} if is_shared else {})))
    facts = facts_of(config)
    windows = facts.pop("windows")
    return Model(
        family,
        hidden,
        tuple(blocks),
        tuple(Attention(heads, kv_heads, dim, window) for window in windows),
        config["num_hidden_layers"],
        config["vocab_size"],
        notes=tuple(itertools.starmap(plan_note, entry.get("plan", {}).items())),
        **facts,
    )


def plan_note(layer: str, style: str | None) -> str:
    """What to say of a row-parallel layer that the plan of Transformers does not sum.

    Args:
        layer: in a decoder layer.
        style: what the plan says of it; None for nothing.
    """
    return f"{layer} under Transformers, whose plan says {style or 'nothing'} of it"


def _mlps(config: Mapping[str, Any]) -> list[tuple[int, bool]]:
    """Widths of the dense MLPs and shared experts, and whether they are the latter."""
    if _experts(config) == 0:
        return [(config["intermediate_size"], False)]
    widths = []
    if config.get("first_k_dense_replace", 0):
        widths.append((config["intermediate_size"], False))
    if shared := config.get("n_shared_experts", 0):
        widths.append((shared * config["moe_intermediate_size"], True))
    return widths


# -- quantisation --


def quantisation_of(said: Mapping[str, Any]) -> tuple[str, str]:
    """What a `quantization_config` says of the layers that it quantises.

    Returns:
        How they are, empty if they are not; and who has a scale (as in a problem's `scales`), empty
        where that is no format of fp8 that is served.
    """
    if not said:
        return "", ""
    method = str(said.get("quant_method", "quantized"))
    match method:
        case "fp8":
            how, scales = _own_fp8(said)
        case "fbgemm_fp8":
            how, scales = "", "channel"
        case "modelopt":
            algorithm = str(said.get("quant_algo") or "")
            how, scales = algorithm, _OF_MODELOPT.get(algorithm.upper(), "")
        case "compressed-tensors":
            how, scales = _of_compressed_tensors(said)
        case _:
            how, scales = "", ""
    return f"{method}, {how}" if how else method, scales


_OF_MODELOPT = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
_BLOCKS = [BLOCK, BLOCK]


def _own_fp8(said: Mapping[str, Any]) -> tuple[str, str]:
    block, scheme = said.get("weight_block_size"), said.get("activation_scheme")
    if block is not None:
        how = f"blocks of {'x'.join(map(str, block))}" if isinstance(block, list) else str(block)
        return how, "block" if block == _BLOCKS and scheme in (None, "dynamic") else ""
    return "", "tensor" if scheme in ("static", "dynamic") else ""


def _of_compressed_tensors(said: Mapping[str, Any]) -> tuple[str, str]:
    if (groups := said.get("config_groups")) is None:
        return "", ""
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    distinct = {_scheme(scheme) for scheme in schemes if isinstance(scheme, dict)}
    if len(distinct) != 1:
        return f"{len(distinct)} schemes", ""
    return distinct.pop()


def _scheme(group: Mapping[str, Any]) -> tuple[str, str]:
    """The weights and activations of a scheme of compressed-tensors."""
    parts = [group.get("weights") or {}, group.get("input_activations") or {}]
    kinds = [f"{part.get('type', 'no')}{part.get('num_bits', '')}" for part in parts]
    of_weights, of_activations = (str(part.get("strategy")) for part in parts)
    how = f"weights {kinds[0]} per {of_weights}, activations {kinds[1]} per {of_activations}"
    is_fp8 = kinds == ["float8", "float8"] and all(part.get("symmetric", True) for part in parts)
    match of_weights, of_activations:
        case "tensor", "tensor":
            scales = "tensor"
        case "channel", "token":
            scales = "channel"
        case "block", "group":
            sizes = parts[0].get("block_structure"), parts[1].get("group_size")
            scales = "block" if sizes == (_BLOCKS, _BLOCKS[0]) else ""
        case _:
            scales = ""
    is_of_all = "Linear" in (group.get("targets") or ["Linear"])
    return how, scales if is_fp8 and is_of_all else ""


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a :class:`Model` that a decoder's config says, and the `windows` of its layers."""
    family = str(config.get("model_type"))
    latent = config.get("kv_lora_rank") or 0
    return {
        "dtype": _dtype_in(config),
        "experts": _experts(config),
        "latent_dim": latent and latent + config["qk_rope_head_dim"],
        "has_soft_cap": config.get("attn_logit_softcapping") is not None,
        "has_sinks": family == "gpt_oss",
        "has_alibi": family == "bloom"
        or bool(config.get("alibi") or (config.get("attn_config") or {}).get("alibi")),
        "has_chunks": config.get("attention_chunk_size") is not None,
        "windows": _windows(config, family),
    }


def _experts(config: Mapping[str, Any]) -> int:
    experts = max(config.get(field) or 0 for field in _EXPERTS)
    return experts if experts > 1 else 0


def _windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return (0,)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        sees_all = [kind != "sliding_attention" for kind in kinds]
    else:
        sees_all = [False, family.removesuffix("_text") in _ALTERNATING]
    return tuple(
        dict.fromkeys(0 if is_whole else window for is_whole in sorted(sees_all, reverse=True))
    )


def _dtype_in(config: Mapping[str, Any]) -> str | None:
    dtypes = [config[name] for name in _DTYPES if config.get(name) is not None]
    return str(dtypes[0]).removeprefix("torch.") if dtypes else None


# -- problems --


def split_layers(
    role: Role, model: Model, tp: int, is_training: bool = False, is_cast: bool = False
) -> list[Fields]:
    """Return one rank's problems of a role, of a model that is split over `tp` ranks.

    With more ranks than kv heads, each kv head is held by several ranks.

    Args:
        role: of the operation: "sum": sums of row-parallel layers, alone and with what compiled
            code and vLLM take along; "gather_rows", "scatter_rows": of rows that are sharded
            between the layers, for each weight and for those that share the rows; "decode":
            attention with all heads on every rank; "prompt": with its own heads on each.
        is_training: whether those of the backward are wanted too.
        is_cast: whether the model runs in a 16-bit type, whatever its config says.

    Returns:
        Fields of a problem -> value; fields with the operation's usual value are left out.

    Raises:
        UsageError: the model does not split over so many ranks.
    """
    if not (model.is_served or is_cast):
        return []
    if role in ("decode", "prompt"):
        return _attentions(role, model, tp)
    _require_split(model, tp)
    blocks = [block for block in model.blocks if is_cast or _is_listed(block, is_training)]
    if role == "gather_rows":
        return _gathers(model, blocks, tp, is_training, is_cast)
    listed = [sums for block in blocks for sums in _sums(role, model.hidden, block, tp, is_cast)]
    if is_training:  # the gradients of what columns read
        columns = [column for block in blocks for column in block.columns]
        if model.vocabulary and model.vocabulary % tp == 0:
            columns.append(model.head)
        listed += [
            _fields(model.hidden, column.features(tp), weight_layout="kn") for column in columns
        ]
        if role == "sum":  # compiled code adds those of the same rows, one to another
            shared = [
                column for block in blocks for column in block.columns if len(block.columns) > 1
            ]
            listed += [
                _fields(model.hidden, column.features(tp), weight_layout="kn", residual=1)
                for column in shared
            ]
    return listed


def _is_listed(block: Block, is_training: bool) -> bool:
    """Whether operations compute a block as its weights are."""
    return not block.quantised or bool(block.scales and not is_training)


def _fields(n: int, k: int, **others: int | str) -> Fields:
    return {"n": n, "k": k, **{name: value for name, value in others.items() if value}}


def _gathers(
    model: Model, blocks: Iterable[Block], tp: int, is_training: bool, is_cast: bool
) -> list[Fields]:
    """Of all columns of a block at once, and of each; the head is not quantised.

    Raises:
        UsageError: blocks of a weight do not split over so many ranks.
    """
    hidden, listed, columns = model.hidden, [], []
    for block in blocks:
        features = [column.features(tp) for column in block.columns]
        of_all = [sum(features)] if len(features) > 1 else []  # biases are added behind the matmul
        for size in (*features, *of_all):
            _require_blocks(block, size, is_cast, f"output size {size * tp}", tp)
        listed += [_fields(size, hidden, **_kind(block, is_cast)) for size in of_all]
        columns += [(column, _kind(block, is_cast)) for column in block.columns]
    if model.vocabulary and model.vocabulary % tp == 0:
        columns.append((model.head, {}))
    listed += [
        _fields(column.features(tp), hidden, bias=column.bias, **kind) for column, kind in columns
    ]
    if is_training:  # gathered rows are kept, and a bias is added behind; then the gradients
        listed += [_fields(column.features(tp), hidden) for column, _ in columns if column.bias]
        listed += [_fields(block.inputs // tp, hidden, weight_layout="kn") for block in blocks]
    return [fields | {"gather_dim": 0} for fields in listed]


def _kind(block: Block, is_cast: bool) -> dict[str, str]:
    """Fields of a problem that say in what its factors are."""
    return {"x_dtype": "fp8", "scales": block.scales} if block.scales and not is_cast else {}


def _require_blocks(block: Block, size: int, is_cast: bool, what: str, tp: int) -> None:
    """Refuse sizes that begin or end within a block that has a scale."""
    if _kind(block, is_cast).get("scales") == "block" and size % BLOCK:
        raise UsageError(
            f"{what} does not split into blocks of {BLOCK} over {tp} ranks",
            "try another --tp or --gpus",
        )


def _sums(role: Role, hidden: int, block: Block, tp: int, is_cast: bool) -> Iterator[Fields]:
    """A sum alone, and with what a sum to all ranks may take along.

    Raises:
        UsageError: blocks of a weight do not split over so many ranks.
    """
    n, k = hidden, block.inputs // tp
    of_block: dict[str, int | str] = {"bias": block.bias, **_kind(block, is_cast)}
    _require_blocks(block, k, is_cast, f"input size {block.inputs}", tp)
    yield _fields(n, k, **of_block)
    if role == "sum" and block.adds_residual:
        yield _fields(n, k, **of_block, residual=1)
    if role == "sum" and block.norm:
        yield _fields(n, k, **of_block, residual=block.norm == "residual", rms_norm=1)


def _attentions(role: Role, model: Model, tp: int) -> list[Fields]:
    if model.latent_dim or model.has_sinks or model.has_alibi:
        return []
    listed: list[Fields] = []
    for attention in model.attentions:
        if attention.head_dim > MOST_HEAD_DIM:
            continue
        heads, kv_heads = attention.heads, attention.kv_heads
        if role == "prompt":
            if attention.window or model.has_soft_cap:
                continue
            _require_split(model, tp)
            heads, kv_heads = heads // tp, max(1, kv_heads // tp)
        capped = {"soft_cap": 1} if model.has_soft_cap else {}
        window = {"window": attention.window} if attention.window else {}
        sizes = {"q_heads": heads, "kv_heads": kv_heads, "head_dim": attention.head_dim}
        listed.append({**sizes, **capped, **window})
    return listed


def left_out_layers(
    role: Role, model: Model, is_cast: bool = False, is_training: bool = False
) -> list[str]:
    """Return what of a model no operation of a role serves, each with the reason.

    Args:
        is_cast, is_training: as for `split_layers`.
    """
    if not (model.is_served or is_cast):
        return [f"all layers, of {model.dtype}: --dtype lists the model in another type"]
    left = list(model.others)
    if role in ("sum", "gather_rows", "scatter_rows"):
        kinds = dict.fromkeys(
            block.quantised for block in model.blocks if not _is_listed(block, is_training)
        )
        if not is_cast:
            left += [
                f"layers that are quantised ({kind}): --dtype lists them in a 16-bit type"
                for kind in kinds
            ]
        if model.experts:
            left.append(f"{model.experts} routed experts: they need grouped matmuls")
        if role == "gather_rows" and model.latent_dim:
            left.append("projections of latent attention: every rank has their whole input")
        return left + (list(model.notes) if role == "sum" else [])
    if model.latent_dim:
        return [*left, f"latent attention: its keys have {model.latent_dim} columns"]
    if model.has_sinks:
        return [*left, "attention with sinks: the kernels have none"]
    if model.has_alibi:
        return [*left, "attention with linear biases (ALiBi): the kernels have none"]
    if model.has_chunks:
        left.append("layers that attend within chunks: the kernels have no chunks")
    left += [
        f"layers with heads of {attention.head_dim} columns: the kernels take {MOST_HEAD_DIM}"
        for attention in model.attentions
        if attention.head_dim > MOST_HEAD_DIM
    ]
    if role == "prompt":
        if model.has_soft_cap:
            return [*left, "attention with capped logits: the kernels for prompts have no cap"]
        windows = dict.fromkeys(
            attention.window for attention in model.attentions if attention.window
        )
        left += [
            f"layers with a window of {window}: the kernels for prompts have none"
            for window in windows
        ]
    return left


def _require_split(model: Model, tp: int) -> None:
    counts = [("num_attention_heads", attention.heads) for attention in model.attentions]
    counts += [("input size", block.inputs) for block in model.blocks]
    for name, count in counts:
        if count % tp:
            raise UsageError(
                f"{name} {count} of the model does not split over {tp} ranks",
                "try another --tp or --gpus",
            )
    for attention in model.attentions:
        if attention.kv_heads % tp and tp % attention.kv_heads:
            raise UsageError(
                f"num_key_value_heads {attention.kv_heads} of the model neither split over {tp} "
                "ranks nor divide them",
                "try another --tp or --gpus",
            )
