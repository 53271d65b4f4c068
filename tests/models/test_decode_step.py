"""A decode step of whole models: the tokens of Transformers, and logits near those of float64."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import taxfree
from benchmarks.decode_step import reference, sharded, whole_model
from taxfree._runtime.runtime import runtimes
from taxfree.errors import UsageError
from taxfree.models import decode, report
from taxfree.models.decoders import decoder_of
from taxfree_kernels.decode_step.decoder import Cache, weights_of
from taxfree_kernels.decode_step.twin import TwinStep
from taxfree_kernels.fp8 import dequantised, quantised, quantised_weight
from tests.models.loading import parallel_model
from tests.ranks import Ranks, on_every_fabric
from tests.sample import Sample

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[models]'"
)

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
#: case -> model, and what its config has besides
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"rope_parameters": LLAMA3}),
    "tied Llama": ("Llama", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "Qwen2": ("Qwen2", {}),
    "Mistral": ("Mistral", {"sliding_window": 6, "vocab_size": 127}),  # odd, for two ranks
}
#: what the kernel serves, of one sequence
OF_KERNEL = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
MODELS["large Qwen3"] = "Qwen3", OF_KERNEL
BATCH, PROMPT, NEW_TOKENS = 2, 8, 8
TIE = 0.05  # standard deviations of the logits: what rounding in bfloat16 moves them by


def made(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights."""
    name, options = MODELS[case]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def prompts(batch: int = BATCH) -> torch.Tensor:
    return torch.arange(batch * PROMPT).view(batch, PROMPT) * 7 % 123 + 5


def static_cache(model: Any, prompt: list[tuple[torch.Tensor, torch.Tensor]], room: int) -> Any:
    """A StaticCache that has taken keys and values."""
    held = transformers.StaticCache(config=model.config, max_cache_len=room)
    for at, (keys, values) in enumerate(prompt):
        held.update(keys, values, at)
    return held


@torch.no_grad()
def generated(
    model: Any, first: torch.Tensor, everyone: Any = lambda part: [part], is_static: bool = False
) -> Any:
    """Tokens that a model's step chooses, its logits and those of float64, by new token.

    Args:
        first: the tokens that the prompts are followed by.
        everyone: from this rank's part to those of all ranks.
        is_static: whether the step uses a cache of Transformers.
    """
    ids, room = prompts(len(first)).to(model.device), PROMPT + NEW_TOKENS
    held = model(ids, return_dict=False)[1]
    if is_static:
        static = static_cache(model, [(each.keys, each.values) for each in held.layers], room)
        step, length = taxfree.decode_step(model, cache=static), PROMPT
        assert [each.data_ptr() for each in step.cache.keys] == [
            each.keys.data_ptr() for each in static.layers
        ]
    else:
        step = taxfree.decode_step(model, len(first), room)
        length = step.take(held)
    tokens = [first.to(model.device)]
    positions = torch.full_like(tokens[0], length, dtype=torch.int32)
    rows = []
    for _ in range(NEW_TOKENS - 1):
        parts = everyone((step.decoder, step.cache))
        exact = reference(parts, tokens[-1].cpu(), positions.cpu())[0]
        tokens.append(step(tokens[-1], positions))
        positions += 1
        rows.append((step.logits.cpu(), exact))
    return torch.stack(tokens, 1).cpu(), rows


def check(model: Any, tokens: torch.Tensor, rows: Any, wanted: torch.Tensor) -> None:
    """Tokens are those of `generate`, but for ties, and logits are near those of float64."""
    dtype = model.dtype
    errors = [float((logits - exact).norm() / exact.norm()) for logits, exact in rows]
    assert max(errors) < (1e-5 if dtype.itemsize > 2 else 4e-2)
    for sequence, (ours, theirs) in enumerate(zip(tokens, wanted, strict=True)):
        differing = (ours != theirs).nonzero()
        if len(differing):  # what follows a tie has another past
            exact = rows[int(differing[0]) - 1][1][sequence]
            gap = (exact[theirs] - exact[ours])[int(differing[0])] / exact.std()
            assert dtype.itemsize == 2, f"token {int(differing[0])} differs"
            assert abs(float(gap)) < TIE


def wanted(model: Any, batch: int = BATCH) -> torch.Tensor:
    ids = prompts(batch).to(model.device)
    found: torch.Tensor = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return found[:, PROMPT:].cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MODELS)
def test_tokens_are_those_of_generate(case: str, dtype: torch.dtype) -> None:
    model = made(case, dtype)
    tokens = wanted(model)
    check(model, *generated(model, tokens[:, 0]), tokens)


@pytest.mark.parametrize("case", ["Llama", "Qwen3"])
def test_a_static_cache_is_used_in_place(case: str) -> None:
    model = made(case)
    tokens = wanted(model)
    check(model, *generated(model, tokens[:, 0], is_static=True), tokens)


def test_a_report_without_problems_has_no_table_of_them() -> None:
    shown = str(report.Report({"layer 1": {"library: float32": 2}}, {})).splitlines()
    assert [line.split()[0] for line in shown] == ["layer", "layer"]


def test_the_report_says_what_ran() -> None:
    report.clear()
    step = taxfree.decode_step(made("Llama"), 1, 8)
    for _ in range(2):
        step(torch.tensor([3]), torch.tensor([0], dtype=torch.int32))
    assert taxfree.report().layers == {"decode_step": {"operations: float32": 2}}


def test_weights_are_read_where_they_are() -> None:
    for case in MODELS:
        model = made(case)
        decoder = decoder_of(model)
        held = {parameter.data_ptr() for parameter in model.parameters()}
        tensors = [each for each in vars(decoder).values() if isinstance(each, torch.Tensor)]
        for layer in decoder.layers:
            tensors += [each for each in vars(layer).values() if isinstance(each, torch.Tensor)]
        rotary = model.model.rotary_emb.inv_freq.data_ptr()
        assert {each.data_ptr() for each in tensors} == held | {rotary}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_of_the_largest_logits_is_chosen(dtype: torch.dtype) -> None:
    big = float("inf")
    logits = torch.tensor(
        [
            [-3.0, 1.5, 1.5, -0.0],
            [-0.0, 0.0, -1.0, -big],
            [-1.5, -2.0, -1.0, -1.0],
            [-big, -big, -big, -big],
            [1.0, big, float("nan"), big],
        ],
        dtype=dtype,
    )
    parts = [decode.best_of(part, 2 * rank) for rank, part in enumerate(logits.split(2, dim=1))]
    for best, columns in (
        (decode.best_of(logits, 0), 4),
        (parts[0], 2),
        (torch.maximum(*parts), 4),
    ):
        assert torch.equal(~best & 0x7FFFFFFF, logits[:, :columns].argmax(dim=1))


def compile_parts(step: Any) -> None:
    """As on GPUs, but for the backend."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        step._parts = tuple(map(decode._compiled, step._parts))


def test_more_steps_are_compiled_than_dynamo_keeps_versions() -> None:
    for batch in range(2, 12):
        step = taxfree.decode_step(made("Llama"), batch, 8)
        compile_parts(step)
        tokens, positions = torch.arange(batch), torch.arange(batch).int() % 8
        plain = taxfree.decode_step(made("Llama"), batch, 8)
        assert torch.equal(step(tokens, positions), plain(tokens, positions))


def test_sequences_may_stand_at_different_positions() -> None:
    step = taxfree.decode_step(made("Mistral"), BATCH, 16)
    for tensor in (*step.cache.keys, *step.cache.values):
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    tokens, positions = torch.tensor([3, 4]), torch.tensor([2, 15], dtype=torch.int32)
    exact = reference([(step.decoder, step.cache)], tokens, positions)[0]
    assert step(tokens, positions).tolist() == exact.argmax(-1).tolist()
    torch.testing.assert_close(step.logits, exact.float())


def paged(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a step whose cache has pages, in any order, and of float64."""
    page_size, pages, model = 4, 3, made("Qwen3", dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH * pages, page_size, 2, 16)
    keys, values = (
        tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)) for _ in range(2)
    )
    table = torch.randperm(BATCH * pages, generator=generator).view(BATCH, pages).int()
    step = taxfree.decode_step(model, cache=Cache(keys, values, table))
    assert (step.batch, step.capacity) == (BATCH, pages * page_size)
    dense = Cache(*(
        tuple(each[table.long()].flatten(1, 2).transpose(1, 2) for each in held)
        for held in (keys, values)
    ))  # fmt: skip
    tokens, positions = torch.tensor([3, 4]), torch.tensor([2, 11], dtype=torch.int32)
    exact = reference([(step.decoder, dense)], tokens, positions)[0]
    for _ in range(2):  # the second reads what the first has written
        step(tokens, positions)
    with pytest.raises(UsageError, match="the step has pages"):
        step.take(transformers.DynamicCache())
    return step.logits.double(), exact


def test_a_cache_may_have_pages() -> None:
    torch.testing.assert_close(*paged(torch.float32), atol=1e-5, rtol=1e-5)


def test_a_cache_on_a_rank_may_have_pages(ranks: Ranks) -> None:
    (error,) = ranks.run(1, f"{__name__}:error_of_pages")
    assert error < 4e-2


def error_of_pages(fabric: Any) -> float:
    found, exact = paged(torch.bfloat16)
    return float((found - exact).norm() / exact.norm())


def test_a_step_compiles_and_its_layers_share_the_code(ranks: Ranks) -> None:
    ranks.run(1, f"{__name__}:compile_a_step", dtype=torch.bfloat16)  # with our attention
    compile_a_step(None, torch.float32)


def compile_a_step(_: Any, dtype: torch.dtype) -> None:
    step = taxfree.decode_step(made("Qwen3", dtype), BATCH, 16)
    tokens, positions = torch.tensor([3, 4]), torch.tensor([0, 0], dtype=torch.int32)
    torch.compiler.reset()
    compiled_before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        logits = step.run_operations(tokens, positions)
        compile_parts(step)
        torch.testing.assert_close(step.run_operations(tokens, positions), logits)
    assert counters["stats"]["unique_graphs"] == compiled_before + 2


@pytest.mark.parametrize("has_bias", [False, True])
def test_neighbours_in_memory_are_one_matmul(has_bias: bool) -> None:
    """As an engine holds q, k and v, and gate and up."""
    step = taxfree.decode_step(made("Qwen2" if has_bias else "Qwen3", torch.float32), BATCH, 16)
    tokens, positions = torch.tensor([3, 4]), torch.tensor([0, 0], dtype=torch.int32)

    def parted(layer: Any, *names: str) -> dict[str, torch.Tensor]:
        parts = [getattr(layer, each) for each in names]
        joint = torch.cat(parts).split([len(each) for each in parts])
        return dict(zip(names, joint, strict=True))

    layers = []
    for layer in step.decoder.layers:
        changed = parted(layer, "q", "k", "v") | parted(layer, "gate", "up")
        if has_bias:
            changed |= parted(layer, "q_bias", "k_bias", "v_bias")
        layers.append(replace(layer, **changed))
    joint = taxfree.decode_step(replace(step.decoder, layers=tuple(layers)), BATCH, 16)
    found, matmuls = [], []
    for each in (step, joint):
        with (
            torch.no_grad(),
            mock.patch.object(decode, "linear", side_effect=decode.linear) as called,
        ):
            found.append(each.run_operations(tokens, positions))
        matmuls.append(called.call_count)
    torch.testing.assert_close(found[1], found[0])
    assert matmuls == [7 * len(layers) + 1, 4 * len(layers) + 1]


@pytest.mark.parametrize(
    ("of_library", "times", "chosen"),
    [
        ((), [(27.8, 20.7), (23.2, 13.5), (21.7, 13.6)], "residual"),
        ((), [(28.8, 20.7), (26.0, 18.6), (25.0, 18.5)], "norm"),
        (("norm", "residual"), [(21.7, 13.6)], "nothing"),
        (("norm", "residual", "nothing"), [], "nothing"),
    ],
)
def test_a_sum_takes_along_what_saves_the_most(
    of_library: tuple[str, ...], times: Any, chosen: str
) -> None:
    step = taxfree.decode_step(made("Qwen3", torch.bfloat16), BATCH, 16)
    asked = iter(("norm", "residual", "nothing"))
    step._runtime = mock.Mock(
        _runs_library=lambda *_: next(asked) in of_library,
        _measured_us=mock.Mock(side_effect=times),
    )
    assert step._taken_along("down") == chosen


def differences_of_sums(fabric: Any) -> list[float]:
    """How far logits of one model on two ranks are apart, by what sums take along."""
    from tests.kernels.simulate import SIZES

    part = sharded(whole_model(SIZES, 1, torch.bfloat16, fabric.device), 2)[fabric.rank]
    step = taxfree.decode_step(part, 2, 8, group=fabric.group)
    tokens, positions = torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int32)
    found = []
    for taken in ("norm", "residual", "nothing"):
        step._taken = {"o": taken, "down": taken}
        found.append(step.run_operations(tokens, positions))
    return [float((each - found[0]).norm() / found[0].norm()) for each in found]


def test_sums_are_the_same_whatever_they_take_along(ranks: Ranks) -> None:
    for errors in ranks.run(2, f"{__name__}:differences_of_sums"):
        assert max(errors) < 0.02


# -- fp8 -----------------------------------------------------------------------------------------


def in_fp8(model: Any, scales: str) -> Any:
    """A model whose projections are Transformers' layers in fp8, with its weights quantised."""
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
    from transformers.integrations.finegrained_fp8 import FP8Linear

    for name, linear in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        values, scale = quantised_weight(linear.weight.detach().float().t(), scales)
        sizes = linear.in_features, linear.out_features
        if scales == "block":
            layer: Any = FP8Linear(*sizes, block_size=(128, 128))
            layer.weight_scale_inv.data = scale.t().contiguous()
        else:
            layer = CompressedTensorsFP8Linear(*sizes)
            layer.weight_scale.data = scale
        layer.weight.data = values.t()
        model.set_submodule(name, layer.requires_grad_(False))
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def errors_in_fp8(fabric: Any, scales: str, batch: int) -> list[float]:
    """Errors of a step's logits, by operations and by what runs, and of one product."""
    model = in_fp8(made("large Qwen3", torch.bfloat16), scales)
    step = taxfree.decode_step(model, batch, 8)
    held = {each.data_ptr() for each in model.parameters()}
    (layer, *_) = step.decoder.layers
    assert {each.data_ptr() for each in (*weights_of(layer), *layer.scales)} <= held
    tokens = torch.arange(batch) + 3
    positions = torch.zeros(batch, dtype=torch.int32)
    exact = reference([(step.decoder, step.cache)], tokens, positions)[0]
    step(tokens, positions)
    found = [step.logits, step.run_operations(tokens, positions)]
    x = torch.randn(batch, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = dequantised(*quantised(x, scales)) @ dequantised(layer.q.t(), layer.scales[0].t())
    pairs = [*((each, exact) for each in found)]
    pairs.append((step._product(step._inputs(x), (layer.q, layer.scales[0])), wanted))
    return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_weights_in_fp8_are_multiplied_where_they_are(ranks: Ranks, scales: str) -> None:
    (errors,) = ranks.run(1, f"{__name__}:errors_in_fp8", scales=scales, batch=BATCH)
    assert max(errors[:2]) < 0.15  # inputs are quantised
    assert errors[2] < 0.005


def errors_on_ranks(fabric: Any, scales: str) -> list[float]:
    """Errors of logits on the rank's part of a model in fp8, by operations and by the twin."""
    from tests.kernels.simulate import SIZES_IN_FP8 as sizes

    parts = sharded(whole_model(sizes, 1, torch.bfloat16, fabric.device), 2, scales)
    step = taxfree.decode_step(parts[fabric.rank], 2, 8, group=fabric.group)
    tokens, positions = torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int32)
    exact = reference([(part, step.cache) for part in parts], tokens, positions)[0]
    step(tokens, positions)
    twin = TwinStep(parts[fabric.rank], step.cache, 2, fabric, {"DOWN_PARTS": 2}, rows=16)
    twin(tokens, positions)
    own = exact.chunk(2, 1)[fabric.rank]
    pairs = (step.logits, exact), (twin.logits, own)
    return [float((found - wanted).norm() / wanted.norm()) for found, wanted in pairs]


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_sums_of_ranks_have_the_weights_scales(ranks: Ranks, scales: str) -> None:
    for errors in ranks.run(2, f"{__name__}:errors_on_ranks", scales=scales):
        assert max(errors) < 0.06


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_size": None}, "scales of tensors, not of blocks of 128 x 128"),
        ({"activation_scale": torch.ones(1)}, "has a static scale"),
    ],
    ids=str,
)
def test_other_scales_are_refused(change: dict[str, Any], sentence: str) -> None:
    model = in_fp8(made("large Qwen3", torch.bfloat16), "block")
    for name, value in change.items():
        module = model.model.layers[1].mlp.up_proj
        module.__dict__.update({name: value})
        module._parameters.pop(name, None)
    with pytest.raises(UsageError, match=sentence):
        taxfree.decode_step(model, 1, 8)


# -- refusals ------------------------------------------------------------------------------------


def with_layer_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(32)


def with_sinks(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))


def with_bias(model: Any) -> None:
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(64, 32)


def with_adapter(model: Any) -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model.model.layers[0].self_attn.q_proj = Adapted(32, 32, bias=False)


def with_partial_rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:2]


def with_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.0


def with_other_eps(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-3


def with_float8(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)


def with_another_shard(model: Any) -> None:
    linear = model.model.layers[0].self_attn.k_proj
    linear.weight = torch.nn.Parameter(linear.weight[:8])


def with_config(**changes: Any) -> Callable[[Any], None]:
    return lambda model: [setattr(model.config, *each) for each in changes.items()] and None


def with_rope_type(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(model.model.rotary_emb, "rope_type", name)


REFUSED: dict[str, Callable[[Any], None]] = {
    "it has experts": with_config(num_local_experts=8),
    "its attention is latent": with_config(kv_lora_rank=512),
    "its weights are quantised": with_config(quantization_config={"bits": 4}),
    "its logits have a soft cap": with_config(final_logit_softcapping=30.0),
    "its MLPs have gelu, not silu": with_config(hidden_act="gelu"),
    "it serves llama, mistral, qwen2, qwen3, not granite": with_config(model_type="granite"),
    "layers.1.input_layernorm is a LayerNorm, not an RMSNorm": with_layer_norm,
    "its attention has sinks": with_sinks,
    "mlp.down_proj has a bias, which a step does not add": with_bias,
    "self_attn.q_proj is a Adapted, not a torch.nn.Linear": with_adapter,
    "its rotary embedding is partial: 4 of 8 values of a head": with_partial_rotary,
    "its rotary embedding is dynamic": with_rope_type("dynamic"),
    "self_attn is scaled by 1.0": with_scale,
    "eps of model.norm is 0.001": with_other_eps,
    "up is torch.float8_e4m3fn": with_float8,
    "this rank's part of k is [8, 32], not [16, 32]": with_another_shard,
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_a_step_would_not_compute_is_refused(sentence: str) -> None:
    model = made("Llama")
    REFUSED[sentence](model)
    with pytest.raises(UsageError) as caught:
        taxfree.decode_step(model, 1, 8)
    assert caught.value.message.startswith("decode_step does not serve this model: ")
    assert sentence in caught.value.message


def test_heads_must_divide_over_the_ranks() -> None:
    with pytest.raises(UsageError, match="num_key_value_heads 2 do not divide over 4 ranks"):
        decoder_of(made("Llama"), 0, 4)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear has no config"):
        taxfree.decode_step(torch.nn.Linear(2, 2), 1, 8)


def test_arguments_are_checked() -> None:
    model = made("Mistral")
    with pytest.raises(UsageError, match="batch is 1, capacity 0"):
        taxfree.decode_step(model)
    step = taxfree.decode_step(model, BATCH, PROMPT - 1)
    with pytest.raises(UsageError, match="no logits before the first call"):
        _ = step.logits
    with pytest.raises(UsageError, match=r"tokens are torch.int64 \[1\], not torch.int64 \[2\]"):
        step(torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(UsageError, match="positions are "):
        step(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with torch.no_grad():
        held = model(prompts(), return_dict=False)[1]
    with pytest.raises(UsageError, match="2 sequences of 8 tokens does not fit into a cache of 2 "):
        step.take(held)
    with pytest.raises(UsageError, match="the cache has 2 layers of 2 heads of 8, "):
        taxfree.decode_step(made("Qwen3"), cache=step.cache)
    with pytest.raises(UsageError, match="the cache has a DynamicSlidingWindowLayer"):
        taxfree.decode_step(model, cache=held)


def test_a_static_cache_must_hold_all_tokens() -> None:
    model = made("Mistral")
    with pytest.raises(UsageError, match="the cache is empty"):
        taxfree.decode_step(model, cache=static_cache(model, [], 16))
    prompt = [(torch.zeros(BATCH, 2, PROMPT, 8),) * 2] * 2
    with pytest.raises(UsageError, match="dropped the first tokens"):
        taxfree.decode_step(model, cache=static_cache(model, prompt, 16))


# -- on ranks ------------------------------------------------------------------------------------


def parts_of(part: Any) -> list[Any]:
    """The parts of all ranks, on the CPU."""
    own, found = io.BytesIO(), [b""] * torch.distributed.get_world_size()
    torch.save(part, own)
    torch.distributed.all_gather_object(found, own.getvalue())
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": False}
    return [torch.load(io.BytesIO(each), **options) for each in found]


def generate(
    fabric: Any, case: str, folder: str, dtype: torch.dtype, batch: int = BATCH
) -> tuple[list[list[int]], set[str], set[str]]:
    """Checked tokens of a model on all ranks, the kinds of choices, and what steps ran."""
    from tests.models.records import records_of
    from tests.taxfree.runtime_tasks import runtime_of

    whole = loaded = made(case, dtype).to(fabric.device)
    is_tuned = fabric.name == "host" and fabric.world_size == 2
    runtime = runtime_of(fabric, *(records_of(fabric) if is_tuned else ()))
    if fabric.world_size > 1:
        if fabric.rank == 0:
            whole.save_pretrained(folder)
        torch.distributed.barrier()
        loaded = parallel_model(fabric, folder, dtype)
    report.clear()
    theirs = wanted(whole, batch)
    tokens, rows = generated(loaded, theirs[:, 0], parts_of)
    check(whole, tokens, rows, theirs)
    ran = {} if dtype == torch.float32 else runtime.stats()
    kinds = {kind for kinds in ran.values() for kind in kinds}
    return tokens.tolist(), kinds, set(taxfree.report().layers["decode_step"])


@on_every_fabric
@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_on_ranks(ranks: Ranks, sample: Sample, tmp_path: Path, world_size: int) -> None:
    for case, dtype in product(sample.one_of(list(MODELS)), (torch.float32, torch.bfloat16)):
        found = ranks.run(
            world_size, f"{__name__}:generate", case=case, folder=str(tmp_path), dtype=dtype
        )
        assert all(tokens == found[0][0] for tokens, *_ in found)
        if ranks.fabric == "host" and MODELS[case][1] is not OF_KERNEL:
            is_fused = world_size == 2 and dtype == torch.bfloat16
            assert all(kinds == ({"exact"} if is_fused else set()) for _, kinds, _ in found)


class StandIn:
    """In the place of the kernel: one token more than the last one."""

    logits = torch.ones(1, 128)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return tokens + 1


def stood_in(fabric: Any) -> tuple[list[int], bool]:
    step = taxfree.decode_step(made("Qwen3", torch.bfloat16), 1, 8)
    step._kernel = StandIn()
    tokens, positions = torch.tensor([3]), torch.tensor([0], dtype=torch.int32)
    found = [tokens]
    for _ in range(3):
        found.append(step(found[-1], positions))
    return [int(each) for each in found], step.logits is StandIn.logits


def made_after_a_close(fabric: Any) -> bool:
    tokens, positions = torch.tensor([3]), torch.tensor([0], dtype=torch.int32)
    taxfree.decode_step(made("Qwen3", torch.bfloat16), 1, 8)(tokens, positions)
    for runtime in runtimes():
        runtime.close()
    step = taxfree.decode_step(made("Qwen3", torch.bfloat16), 1, 8)
    return step(tokens, positions).shape == (1,)


def test_a_step_is_made_after_the_runtime_of_others_is_closed(ranks: Ranks) -> None:
    assert ranks.run(1, f"{__name__}:made_after_a_close") == [True]


def test_tokens_and_logits_are_the_kernels(ranks: Ranks) -> None:
    assert ranks.run(1, f"{__name__}:stood_in") == [([3, 4, 5, 6], True)]


def replayed(fabric: Any, case: str) -> list[list[int]]:
    """Tokens of eager steps, and of replays of a graph with one step."""
    step = taxfree.decode_step(made(case, torch.bfloat16).to(fabric.device), 1, NEW_TOKENS)
    tokens = torch.zeros(1, dtype=torch.int64, device=fabric.device)
    positions = torch.zeros(1, dtype=torch.int32, device=fabric.device)

    def advance() -> None:
        tokens.copy_(step(tokens, positions))
        positions.add_(1)

    def all_tokens(run: Callable[[], None]) -> list[int]:
        tokens.fill_(3)
        positions.zero_()
        return [run() or int(tokens) for _ in range(NEW_TOKENS)]

    eager, graph = all_tokens(advance), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    return [eager, all_tokens(graph.replay)]


@pytest.mark.gpu
@pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
@pytest.mark.parametrize("case", ["Qwen3", "large Qwen3"])
def test_a_captured_step_chooses_the_same_tokens(ranks: Ranks, case: str) -> None:
    ((eager, graph),) = ranks.run(1, f"{__name__}:replayed", case=case)
    assert eager == graph


@pytest.mark.gpu
@pytest.mark.parametrize("fabric", ["cuda"], indirect=True)
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_kernel_chooses_the_tokens(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    options = {"case": "large Qwen3", "folder": str(tmp_path), "dtype": torch.bfloat16}
    for _, _, ran in ranks.run(world_size, f"{__name__}:generate", **options, batch=1):
        assert ran == {"one kernel"}


def steps_of_bench(fabric: Any) -> Any:
    """Logits of a step of the bench's model, of the model itself, and of float64."""
    from taxfree_tune.benching import decoder as bench
    from tests.models.meshes import new_mesh
    from tests.tune.test_bench_model import MODEL

    mesh, rank = new_mesh(), fabric.rank
    model = bench.parallel_decoder(MODEL, mesh)
    bench.take_weights(model, bench.random_weights(model, rank, fabric.device, torch.float32))
    decoder = bench.for_step(model, rank)
    step = taxfree.decode_step(decoder, BATCH, PROMPT + 1, group=mesh.get_group())
    caches = zip(step.cache.keys, step.cache.values, strict=True)
    held = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in caches]
    rotary = bench.rotary_factors(PROMPT + 1, 8, fabric.device).float()
    with torch.no_grad():
        model(prompts().flatten() % MODEL.vocabulary, rotary[:PROMPT], 0, held)
        token, positions = torch.tensor([3, 4]), torch.full((BATCH,), PROMPT, dtype=torch.int32)
        exact = reference(parts_of((decoder, step.cache)), token, positions)[0]
        step(token, positions)
        other = model(token, rotary[PROMPT:], PROMPT, held)
    return step.logits.tolist(), other.tolist(), exact.tolist()


def test_a_decoder_may_be_of_another_model(ranks: Ranks) -> None:
    for ours, theirs, exact in ranks.run(2, f"{__name__}:steps_of_bench"):
        for logits in (ours, theirs):
            torch.testing.assert_close(torch.tensor(logits), torch.tensor(exact).float())
