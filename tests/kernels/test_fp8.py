"""fp8 operands: the formats, and each variant that multiplies them, for each kind of scale."""

from __future__ import annotations

import pytest
import torch

from taxfree_kernels.errors import PlanError
from taxfree_kernels.fp8 import (
    DTYPES,
    LEAST_SCALE,
    converted,
    dequantised,
    product,
    quantised,
    quantised_weight,
    silu_and_mul,
)
from taxfree_kernels.quantise import silu_and_mul_quantise
from taxfree_kernels.variant import KV_SCALES, SCALES, problem_class
from taxfree_kernels.vendor import multiplies_fp8, scaled_mm
from tests.kernels.contract import (
    ALL_REDUCE,
    DECODE,
    GATHER,
    NORMALISING,
    PROMPTS,
    SCATTER,
    case,
    complaints,
    unsupported_reasons,
)
from tests.ranks import gather_dims, on_every_fabric, served_names

FN, FNUZ = DTYPES
TMA = {"TMA": True}
#: variants whose kernels multiply 16-bit factors alone
OF_16_BITS = {
    ALL_REDUCE: (),
    SCATTER: (),
    GATHER: ("pull", "push_two_kernel"),
}
FP8 = [
    (op, name)
    for op, others in OF_16_BITS.items()
    if op != GATHER
    for name in served_names(op)
    if name not in others
]
GATHERED = [name for name in served_names(GATHER) if name not in OF_16_BITS[GATHER]]


def operands(scales, m=5, n=300, k=260):
    torch.manual_seed(0)
    return torch.randn(m, k), torch.randn(k, n)


class TestQuantisation:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scales", SCALES)
    def test_errors_are_those_of_three_bits(self, scales, dtype):
        x, weight = operands(scales)
        for given, quantise in ((x, quantised), (weight, quantised_weight)):
            values, scale = quantise(given, scales, dtype=dtype)
            assert values.dtype == dtype
            error = (dequantised(values, scale) - given.double()).abs()
            # half of the last place, or of the least number
            allowed = given.abs() / 16 + float(scale.max()) * torch.finfo(dtype).smallest_normal
            assert bool((error <= allowed).all())

    def test_scales_have_the_shapes_of_their_format(self):
        x, weight = operands("block")
        shapes = {
            "tensor": ((1,), (1,)),
            "channel": ((5, 1), (1, 300)),
            "block": ((5, 3), (3, 3)),
        }
        for scales, (of_x, of_weight) in shapes.items():
            assert quantised(x, scales)[1].shape == of_x
            values, scale = quantised_weight(weight, scales)
            assert scale.shape == of_weight
            assert values.stride(0) == 1  # k is contiguous

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zeros_have_a_scale_and_stay_zero(self, dtype):
        values, scale = quantised(torch.zeros(2, 130), "block", dtype=dtype)
        assert bool((scale == LEAST_SCALE).all())
        assert bool((values.float() == 0).all())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_static_scale_clamps_what_is_larger(self, dtype):
        x = torch.tensor([[1.0, 1e6, -1e6, 0.5]])
        values, scale = quantised(x, "tensor", torch.tensor([1.0]), dtype)
        most = torch.finfo(dtype).max
        assert values.float().tolist() == [[1.0, most, -most, 0.5]]
        assert scale.item() == 1

    def test_a_nan_stays_in_its_element(self):
        x = torch.ones(2, 4)
        x[0, 1] = float("nan")
        values, scale = quantised(x, "channel")
        assert values.float().isnan().tolist() == [[False, True, False, False], [False] * 4]
        assert bool((scale == torch.tensor(1 / 448)).all())

    def test_an_infinity_is_nan_with_an_infinite_scale(self):
        x = torch.ones(1, 4)
        x[0, 1] = float("inf")
        values, scale = quantised(x, "channel")
        assert scale.item() == float("inf")
        assert values.float().isnan().tolist() == [[False, True, False, False]]


def test_a_gate_multiplies_before_it_is_quantised():
    x = torch.randn(3, 8)
    wanted = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    assert torch.allclose(silu_and_mul(x), wanted)
    with pytest.raises(PlanError, match="no gate for each"):
        silu_and_mul_quantise(x[:, :7], "channel")


class TestConversion:
    def test_every_e4m3fn_has_an_equal(self):
        every = torch.arange(256, dtype=torch.uint8).view(16, 16).view(FN)
        scale = torch.full((16, 1), 0.3)
        values, doubled = converted(every, scale, FNUZ)
        ours, theirs = dequantised(values, doubled), dequantised(every, scale)
        assert bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())
        assert int(ours.isnan().sum()) == 2
        back, halved = converted(values, doubled, FN)
        assert torch.equal(halved, scale)
        assert torch.equal(dequantised(back, halved).nan_to_num(), theirs.nan_to_num())

    def test_the_largest_of_fnuz_has_none(self):
        most = torch.tensor([[240.0]]).to(FNUZ)
        with pytest.raises(PlanError, match="as large as none"):
            converted(most, torch.ones(1), FN)

    def test_the_same_kind_is_left_alone(self):
        values, scale = quantised(torch.ones(1, 1), "tensor")
        assert converted(values, scale, FN) == (values, scale)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x_dtype": "fp8"}, "scales is 'none'"),
        ({"scales": "block"}, "scales is 'block'"),
        ({"x_dtype": "int8"}, "x_dtype is 'int8'"),
        ({"x_dtype": "fp8", "scales": "tensor", "weight_layout": "kn"}, "k is contiguous"),
        (
            {"x_dtype": "fp8", "scales": "block", "fast_accumulation": True},
            "before they are scaled",
        ),
        ({"fast_accumulation": True}, "before they are scaled"),
    ],
)
def test_problems_that_no_format_has_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        problem_class(ALL_REDUCE)(16, 32, 64, **fields)


def test_shards_of_columns_that_begin_within_a_block_are_refused(ranks):
    fields = {"m": 8, "n": 300, "k": 64, "x_dtype": "fp8", "scales": "block", "scatter_dim": 1}
    found = unsupported_reasons(ranks, 2, SCATTER, fields)
    assert "within a block" in found["push"]
    assert "within a block" in found["push_lamport"]
    assert found["one_shot"] is None


@on_every_fabric
@pytest.mark.dealt("scales")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("op", "variant"), FP8)
def test_every_variant_is_exact_on_integers_and_no_less_accurate(ranks, op, variant, scales):
    few = 96 if variant == "overlap" else 37  # copies are of whole 16 elements
    sizes = [{"m": 17, "n": few, "k": 33}, {"m": 3, "n": 144, "k": 272}]
    sizes[1] |= {"bias": True} if op == ALL_REDUCE else {"m": 33, "n": 256, "scatter_dim": 1}
    kind = {"x_dtype": "fp8", "scales": scales, "dtype": "bfloat16"}
    cases = [
        case(op, variant, padded=number == 0, **kind | size) for number, size in enumerate(sizes)
    ]
    assert complaints(ranks, ranks.few, cases) == []


FAST = [
    (ALL_REDUCE, "baseline", {}),
    (ALL_REDUCE, "push", {"rms_norm": True}),
    (ALL_REDUCE, "push_two_shot_lamport_specialized", {}),
    (SCATTER, "push_lamport", {}),
    (ALL_REDUCE, "overlap", {}),
    (SCATTER, "overlap", {}),
    (GATHER, "push", {"gather_dim": 0}),
    (GATHER, "push_tma", {"gather_dim": 1}),
    (GATHER, "overlap", {"gather_dim": 0}),
    (GATHER, "one_shot", {"gather_dim": 0}),
]


@on_every_fabric
@pytest.mark.parametrize(("op", "variant", "fields"), FAST)
def test_fast_accumulation_is_right_where_sums_are_short(ranks, op, variant, fields):
    kind = {"x_dtype": "fp8", "scales": "channel", "fast_accumulation": True}
    size = {"m": 17, "n": 144, "k": 48}
    assert complaints(ranks, 2, [case(op, variant, **size | kind | fields)]) == []


def rounded_down(sums, bits):
    """Towards zero, to so many bits."""
    mantissa, exponent = torch.frexp(sums)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


@pytest.mark.parametrize(("k", "most"), [(1024, 0.001), (14336, 0.013)])
def test_fast_accumulation_loses_no_more_than_documented(k, most):
    """Of sums that keep 14 bits after each 32 products, as Hopper's matrix instructions do."""
    torch.manual_seed(0)
    x = quantised(torch.randn(8, k), "channel")[0].double()
    weight = quantised_weight(torch.randn(k, 64), "channel")[0].double()
    fast, promoted, step, largest = torch.zeros(4, 8, 64, dtype=torch.float64)
    for begin in range(0, k, 32):
        part = x[:, begin : begin + 32] @ weight[begin : begin + 32]
        fast, step = rounded_down(fast + part, 14), rounded_down(step + part, 14)
        largest = torch.maximum(largest, fast.abs())
        if begin % 128 == 96:  # as without it
            promoted, step = promoted + step, torch.zeros_like(step)
    exact = x @ weight
    assert bool(((fast - exact).abs() <= k / 32 * 2**-13 * largest).all())
    of_fast, of_promoted = (
        float((sums - exact).norm() / exact.norm()) for sums in (fast, promoted)
    )
    assert of_promoted < 0.0002
    assert of_promoted < of_fast < most


@on_every_fabric
@pytest.mark.dealt("scales")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("variant", GATHERED)
def test_every_gather_carries_rows_and_their_scales(ranks, variant, scales):
    """Of both shardings; rows share tiles, or each tile has those of one rank."""
    kind = {"x_dtype": "fp8", "scales": scales, "dtype": "bfloat16", "n": 144}
    sizes = [
        {"m": 21, "k": 304, "gather_dim": 0, "bias": True},
        {"m": 32, "k": 144, "gather_dim": 0},
        {"m": 5, "k": 256 if scales == "block" else 96, "gather_dim": 1, "bias": True},
    ]
    cases = [
        case(GATHER, variant, **kind | size)
        for size in sizes
        if size["gather_dim"] in gather_dims(variant)
    ]
    assert complaints(ranks, 2, cases) == []


@on_every_fabric
@pytest.mark.dealt("scales")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("push", {"SWAP_AB": True, "SPLIT_K": 2, "CHUNKS": 2}),
        ("push_tma", {"SWAP_AB": True, "SPLIT_K": 2, "K_PARTS": 2}),
    ],
)
def test_every_way_to_gather_scales_alike(ranks, variant, config, scales):
    kind = {"x_dtype": "fp8", "scales": scales, "m": 33, "n": 144}
    sizes = [{"k": 528, "gather_dim": 0}, {"k": 512, "gather_dim": 1}]
    whole = {name: 1 if name == "K_PARTS" else value for name, value in config.items()}
    cases = [
        case(GATHER, variant, each, **kind | size)
        for each, size in zip((config, whole), sizes, strict=True)
    ]
    assert complaints(ranks, 2, cases) == []


@on_every_fabric
@pytest.mark.dealt("scales")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("variant", "config"),
    [
        ("push", {"TMA": True, "SWAP_AB": True, "SPLIT_K": 2}),
        ("push_two_shot", {"TMA": True}),
        ("push_two_shot_lamport", {"SWAP_AB": True}),
    ],
)
def test_every_way_to_multiply_scales_alike(ranks, variant, config, scales):
    """With all that may follow: addends, and the norm of columns whose scales are alike."""
    size = {"m": 17, "n": 160, "k": 272}
    kind = {"x_dtype": "fp8", "scales": scales, "residual": True}
    cases = [
        case(ALL_REDUCE, variant, config, **kind, **size, rms_norm=normed)
        for normed in (False, True)
    ]
    assert complaints(ranks, ranks.few, cases) == []


@on_every_fabric
@pytest.mark.parametrize("fields", [{}, {"scales": "channel"}, {"scales": "block"}])
def test_partial_sums_may_travel_in_fp8(ranks, fields):
    """Of all kinds of factors, in ragged tiles; with all that may follow."""
    kind = {"fp8_wire": True, "dtype": "bfloat16", "residual": True, "m": 33, "n": 144, "k": 272}
    kind |= fields | ({"x_dtype": "fp8"} if fields else {})
    configs = [{}, {"TMA": True, "SIGNALS": 2}, {"SWAP_AB": True, "SPLIT_K": 2, "PIECES": 2}]
    cases = [case(ALL_REDUCE, "push_two_shot", config, **kind) for config in configs]
    cases.append(case(ALL_REDUCE, "push_two_shot", **kind, rms_norm=True))
    cases.append(case(ALL_REDUCE, "push_two_shot", **kind, rms_norm=True, out_scales="channel"))
    del kind["residual"]
    of_blocks = {"n": 128 * ranks.few} if fields.get("scales") == "block" else {}
    cases += [case(SCATTER, "push", config, **kind) for config in configs]
    cases += [
        case(SCATTER, "push", config, **kind | of_blocks, scatter_dim=1) for config in configs
    ]
    assert complaints(ranks, ranks.few, cases) == []


@on_every_fabric
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_wire_of_fp8_errs_no_more_than_documented(ranks, dtype):
    """Bit for bit as in torch: also rows of zeros, of wide ranges, NaN and infinite elements."""
    for found in ranks.run(ranks.few, "tests.kernels.tasks:over_fp8_wire", dtype=dtype):
        assert found == []


@on_every_fabric
@pytest.mark.dealt("out_scales")
@pytest.mark.parametrize("out_scales", SCALES)
@pytest.mark.parametrize("variant", NORMALISING)
def test_a_normalised_sum_is_quantised_for_the_next_layer(ranks, variant, out_scales):
    """Of both kinds of factors, in rows of one group, of two and a part, with all that is added."""
    kind = {"rms_norm": True, "residual": True, "out_scales": out_scales}
    fp8 = {"x_dtype": "fp8", "scales": "block", "bias": True}
    sizes = [{"m": 5, "n": 37, "k": 33, "dtype": "bfloat16"}, {"m": 17, "n": 296, "k": 40}]
    cases = [case(ALL_REDUCE, variant, **kind | size) for size in sizes]
    if variant not in OF_16_BITS[ALL_REDUCE]:
        cases.append(case(ALL_REDUCE, variant, **kind | fp8 | sizes[1]))
    assert complaints(ranks, ranks.few, cases) == []


@on_every_fabric
@pytest.mark.dealt("kv_scales")
@pytest.mark.parametrize("kv_scales", KV_SCALES)
@pytest.mark.parametrize("variant", served_names(DECODE))
def test_decode_attention_reads_a_cache_in_fp8(ranks, variant, kv_scales):
    """Dense, paged, with a soft cap and with a window; several sequences and heads."""
    kind = {"kv_scales": kv_scales, "q_heads": 6, "kv_heads": 2, "dtype": "bfloat16"}
    cases = [
        case(DECODE, variant, **kind),
        case(DECODE, variant, **kind, page_size=5, soft_cap=True, window=30),
    ]
    assert complaints(ranks, ranks.few, cases) == []


@on_every_fabric
@pytest.mark.dealt("kv_scales")
@pytest.mark.parametrize("kv_scales", KV_SCALES)
@pytest.mark.parametrize(("variant", "config"), [("baseline", {}), ("flash", {}), ("flash", TMA)])
def test_attention_reads_keys_and_values_in_fp8(ranks, variant, config, kv_scales):
    kind = {"kv_scales": kv_scales, "dtype": "bfloat16", "kv_heads": 2}
    cases = [case(PROMPTS, variant, config, **kind, causal=causal) for causal in (False, True)]
    cases.append(case(PROMPTS, variant, config, **kind, packed=True, batch=4))
    assert complaints(ranks, ranks.few, cases) == []


def test_what_is_quantised_is_a_normalised_sum():
    with pytest.raises(PlanError, match="out_scales is 'block'"):
        problem_class(ALL_REDUCE)(16, 32, 64, out_scales="block")


@on_every_fabric
def test_scales_are_float32_whatever_the_default_is(ranks):
    (found,) = ranks.run(1, "tests.kernels.tasks:scales_under_another_default")
    assert found == {torch.float32}


@on_every_fabric
def test_the_kernel_quantises_as_the_reference_does(ranks):
    """Bit for bit: rows of zeros, of a NaN, of an infinity, tiny ones, and those of padded rows.

    Also what is gated before.
    """
    found = ranks.run(1, "tests.kernels.tasks:quantised_otherwise")[0]
    assert found == []


@pytest.mark.parametrize(("m", "n", "k"), [(1, 300, 512), (6, 300, 260), (8, 64, 200)])
def test_the_library_gets_scales_of_blocks_in_columns_of_16_bytes(monkeypatch, m, n, k):
    def of_cublas(a, weight, a_scale, weight_scale, bias, out_dtype, use_fast_accum, out):
        assert len(a) % 4 == 0
        assert a_scale.stride() == (1, len(a))
        groups, columns = weight_scale.shape
        of_blocks = columns == 3 and groups % 4 == 0 and weight_scale.stride() == (1, groups)
        assert of_blocks or (columns == weight.shape[1] and weight_scale.is_contiguous())
        return out.copy_(product(a, a_scale, weight, weight_scale) + bias)

    monkeypatch.setattr(torch, "_scaled_mm", of_cublas)
    x, weight = operands("block", m, n, k)
    (a, a_scale), (b, b_scale) = quantised(x, "block"), quantised_weight(weight, "block")
    bias, out = torch.randn(b.shape[1]), torch.empty(m, b.shape[1])
    scaled_mm(out, a, b, bias, a_scale, b_scale, "block", is_fast=False)
    torch.testing.assert_close(out, product(a, a_scale, b, b_scale) + bias, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_a_library_that_takes_other_scales_than_it_is_given_is_not_used(monkeypatch, scales):
    def of_another(a, weight, a_scale, weight_scale, out, **others):
        return out.copy_(product(a, a_scale, weight, weight_scale.flip(1)))

    monkeypatch.setattr(torch, "_scaled_mm", of_another)
    kind = (FN, torch.bfloat16, False, False, torch.device("cpu"))
    assert not multiplies_fp8.__wrapped__(scales, 512, 0, *kind)
