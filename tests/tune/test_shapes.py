"""From what a user types to problems."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taxfree.errors import UsageError
from taxfree.problems import field_specs, format_problem
from taxfree_kernels.variant import problem_class
from taxfree_tune.shapes import (
    ShapeRequest,
    choose,
    expand,
    known_models,
    left_out,
    named_sets,
    operations,
    parse_counts,
    parse_paths,
)
from taxfree_tune.shapes.models import PATHS

OP = "all_gather_matmul"
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def problems(*shapes, **request):
    return expand(OP, ShapeRequest(shapes, **request))


def sizes(*shapes, **request):
    return [(each.m, each.n, each.k) for each in problems(*shapes, **request)]


def _compressed(weights, activations):
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | weights,
        "input_activations": number | activations,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


BLOCKS_OF_128 = (
    {"strategy": "block", "block_structure": [128, 128]},
    {
        "strategy": "group",
        "group_size": 128,
    },
)
FP8_CHECKPOINTS = [
    ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor"),
    (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "block",
    ),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "channel"),
    (_compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), "channel"),
    (_compressed({"strategy": "tensor"}, {"strategy": "tensor"}), "tensor"),
    (_compressed(*BLOCKS_OF_128), "block"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor"),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "channel"),
]
OTHER_CHECKPOINTS = [
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8, blocks of 64x64"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
    (
        _compressed({"strategy": "channel", "type": "int"}, {"strategy": "token"}),
        "weights int8 per channel",
    ),
    (_compressed({"strategy": "channel"}, {"strategy": "tensor"}), "activations float8 per tensor"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 schemes"),
    ({"quant_method": "awq", "bits": 4}, "quantised (awq)"),
]


class TestShape:
    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            ("m=16 n=3584 k=8192", [(16, 3584, 8192)]),
            ("  K=8192   n=3584 M=16 ", [(16, 3584, 8192)]),
            ("m=1,16 n=8 k=4,2", [(1, 8, 4), (1, 8, 2), (16, 8, 4), (16, 8, 2)]),
            ("16x3584x8192", [(16, 3584, 8192)]),
            ("1,16,64x3584x8192", [(1, 3584, 8192), (16, 3584, 8192), (64, 3584, 8192)]),
            ("1,1x2x3", [(1, 2, 3)]),
            ("demo", [(16, 64, 64), (32, 64, 128), (13, 40, 72)]),
        ],
    )
    def test_names_problems(self, shape, expected):
        assert sizes(shape) == expected

    def test_may_say_every_field(self):
        (problem,) = problems(
            "m=16 n=64 k=64 gather_dim=0 dtype=bf16 world_size=4 weight_layout=nk bias=true "
            "x_dtype=fp8 scales=channel fast_accumulation=true"
        )
        assert asdict(problem) == {
            "m": 16,
            "n": 64,
            "k": 64,
            "gather_dim": 0,
            "dtype": "bfloat16",
            "world_size": 4,
            "weight_layout": "nk",
            "bias": True,
            "x_dtype": "fp8",
            "scales": "channel",
            "fast_accumulation": True,
        }

    @pytest.mark.parametrize(
        ("word", "dtype"),
        [
            ("fp16", "float16"),
            ("float16", "float16"),
            ("bf16", "bfloat16"),
            ("bfloat16", "bfloat16"),
        ],
    )
    def test_takes_either_name_of_a_dtype(self, word, dtype):
        assert problems(f"1x2x4 dtype={word}")[0].dtype == dtype
        assert problems("1x2x4", dtype=word)[0].dtype == dtype

    def test_stands_over_the_options(self):
        (problem,) = problems("1x2x4 dtype=bf16 world_size=2", dtype="fp16", world_sizes=(4,))
        assert (problem.dtype, problem.world_size) == ("bfloat16", 2)

    def test_is_combined_with_each_world_size(self):
        assert [each.world_size for each in problems("1x2x8", world_sizes=(2, 4, 8))] == [2, 4, 8]

    def test_is_taken_once(self):
        assert sizes("1,2x2x4", "m=2,1 n=2 k=4") == [(1, 2, 4), (2, 2, 4)]

    @pytest.mark.parametrize(
        ("shape", "quoted"),
        [
            ("1x2x3x4", "'1x2x3x4'"),
            ("ax2x3", "'ax2x3'"),
            ("1xx3", "n=''"),
            ("m=1_0 n=2 k=4", "m='1_0'"),
            ("m=٣ n=2 k=4", "m='٣'"),
            ("m=2147483648 n=2 k=4", "m='2147483648'"),
            ("m=" + "9" * 5000 + " n=2 k=4", "m='999"),
            ("m=1 n=2 k=4 dtype=", "dtype=''"),
            ("m=1 n=2 k=4 bias=maybe", "bias='maybe'"),
            ("m=1 n=2 k=4 world_size=0", "world_size is 0"),
            ("paper large", "'large'"),
            ("m=1 n=2 k=4 paper", "'paper'"),
            ("paper m=x", "m='x'"),
            ("\0.yaml", "\\x00.yaml"),
            ("m={0} n={0} k={0}".format(",".join(map(str, range(1, 200)))), "7880599 problems"),
        ],
    )
    def test_that_makes_no_sense_is_quoted_with_a_hint(self, shape, quoted):
        with pytest.raises(UsageError) as caught:
            problems(shape)
        assert quoted in caught.value.message
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 250
        assert caught.value.hint

    def test_none_at_all_is_an_error(self):
        with pytest.raises(UsageError, match="no shapes"):
            problems()

    def test_of_an_unknown_operation_is_an_error(self):
        with pytest.raises(UsageError, match="no operation 'convolution'"):
            expand("convolution", ShapeRequest(("1x2x3",)))


class TestNamedSets:
    def test_paper_is_the_papers(self):
        found = problems("paper", world_sizes=(8,))
        assert [each.m for each in found] == [2**power for power in range(11)]
        fixed = {(p.n, p.k, p.gather_dim, p.dtype, p.world_size, p.bias) for p in found}
        assert fixed == {(3584, 8192, 1, "float16", 8, False)}

    def test_can_be_varied(self):
        found = problems("paper m=16 gather_dim=0,1 dtype=bf16")
        assert [(each.m, each.gather_dim, each.dtype) for each in found] == [
            (16, 0, "bfloat16"),
            (16, 1, "bfloat16"),
        ]

    def test_large_gathers_rows(self):
        found = problems("large")
        assert {each.gather_dim for each in found} == {0}
        assert {(each.n, each.k) for each in found} == {(3584, 8192), (11008, 4096)}

    @pytest.mark.parametrize("name", named_sets(OP))
    @pytest.mark.parametrize("world_size", [1, 2, 4, 8])
    def test_are_legal_on_every_world_size(self, name, world_size):
        assert problems(name, world_sizes=(world_size,))


class TestFile:
    @pytest.fixture
    def file(self, tmp_path):
        def write(text):
            path = tmp_path / "my shapes.yaml"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            return str(path)

        return write

    def test_a_field_that_is_there_twice_is_refused(self, file):
        with pytest.raises(UsageError, match="has a key twice"):
            problems(file("- {m: 1, n: 2, k: 8, m: 4}"))

    def test_begins_with_a_byte_order_mark_or_not(self, file):
        found = problems(file(b"\xef\xbb\xbf- 3x2x8"))
        assert [problem.m for problem in found] == [3]

    def test_holds_shapes_as_text_or_mappings(self, file):
        text = """
            - m=1,2 n=2 k=4
            - 3x2x4
            - {m: [4, 5], n: 2, k: 4, bias: true, dtype: bf16}
            - demo
        """
        found = problems(file(text))
        assert [each.m for each in found] == [1, 2, 3, 4, 5, 16, 32, 13]
        assert [each.bias for each in found] == [False] * 3 + [True] * 2 + [False] * 3

    def test_of_a_run_names_operations_and_counts_calls(self, file):
        path = file("""
            - {op: matmul_all_reduce, m: 7, n: 2, k: 4, calls: 5000000000}
            - {m: 6, n: 2, k: 4}
            - {op: all_gather_matmul, m: 5, n: 2, k: 4, world_size: 2, calls: 9}
            - {op: matmul_all_reduce, m: 4, n: 2, k: 4, calls: 1}
        """)

        def taken(of, **request):
            return [each.m for each in expand(of, ShapeRequest([path], **request))]

        assert taken("matmul_all_reduce") == [7, 6, 4]  # what names no operation is of this one
        assert taken("matmul_all_reduce", op=OP) == [7, 4]
        assert taken(OP, op=OP) == [6, 5]
        assert [each.world_size for each in problems(path, world_sizes=(4,))] == [4, 2]
        named = operations(ShapeRequest(["1x2x4", path]), "flash_decode")
        assert named == ["flash_decode", "matmul_all_reduce", OP]
        with pytest.raises(UsageError, match="none of the shapes is of flash_decode"):
            taken("flash_decode", op=OP)

    @pytest.mark.parametrize(
        "text",
        [
            "- {op: , m: 1, n: 2, k: 4}",
            "- {op: all_gather_matmul}",
            "- {calls: 1}",
            "- {m: 1, n: 2, k: 4, calls: -1}",
            "- {m: 1, n: 2, k: 4, calls: 1.5}",
            "- {m: 1, n: 2, k: 4, calls: [1, 2]}",
            "- op=all_gather_matmul m=1 n=2 k=4",
            "[]",
            "- ''",
            "- [1, 2]",
            "- {m: [[1]], n: 2, k: 3}",
            "- {? {a: 1}: 2}",
            "- m=1",
            "- other.yaml",
            "a: b: c",
            "\t",
            "&a [*a]",
            b"\xff\xfe\x00",
            b"\x80",
        ],
    )
    def test_that_makes_no_sense_is_an_error(self, file, text):
        with pytest.raises(UsageError) as caught:
            problems(file(text))
        assert "\n" not in caught.value.message


class TestModel:
    @pytest.fixture
    def config(self, tmp_path):
        def write(document):
            path = tmp_path / "config.json"
            path.write_text(document if isinstance(document, str) else json.dumps(document))
            return path

        return write

    def test_gives_its_column_parallel_matmuls(self, config):
        found = problems(model=config(LLAMA_70B), tp=8)
        joint, single = {1280, 7168}, {1024, 128, 3584, 16032}
        assert {(each.n, each.k) for each in found} == {(n, 8192) for n in joint | single}
        assert {(each.gather_dim, each.world_size) for each in found} == {(0, 8)}

    def test_gives_its_row_parallel_matmuls_to_be_reduced(self, config):
        request = ShapeRequest(model=config(LLAMA_70B), tp=8)
        found = expand("matmul_all_reduce", request)
        assert {(each.n, each.k) for each in found} == {(8192, 1024), (8192, 3584)}

    def test_is_split_over_each_world_size_without_tp(self, config):
        request = ShapeRequest(["model m=1"], config(LLAMA_70B), world_sizes=(4, 8))
        found = expand("matmul_reduce_scatter", request)
        assert [(each.k, each.world_size) for each in found] == [
            (2048, 4),
            (7168, 4),
            (1024, 8),
            (3584, 8),
        ]

    def test_shares_kv_heads_among_more_ranks(self, config):
        model = config(LLAMA_70B | {"num_key_value_heads": 2})
        assert (8 + 2) * 128 in {each.n for each in problems(model=model, tp=8)}

    def test_may_be_the_folder_of_the_config(self, config):
        assert problems(model=config(LLAMA_70B).parent, tp=8)

    def test_may_have_a_head_dim_of_its_own(self, config):
        model = config(LLAMA_70B | {"head_dim": 64})
        assert {640, 7168} < {each.n for each in problems(model=model, tp=8)}
        reduced = expand("matmul_all_reduce", ShapeRequest(model=model, tp=8))
        assert {each.k for each in reduced} == {512, 3584}

    def test_has_its_own_dtype_unless_one_is_asked_for(self, config):
        model = config(LLAMA_70B | {"torch_dtype": "bfloat16"})
        assert {each.dtype for each in problems(model=model, tp=8)} == {"bfloat16"}
        assert {each.dtype for each in problems(model=model, tp=8, dtype="fp16")} == {"float16"}

    @pytest.mark.parametrize(
        "document",
        [
            {"torch_dtype": "bfloat16"},
            {"text_config": LLAMA_70B | {"dtype": "bfloat16"}, "dtype": "float32"},
            {"text_config": LLAMA_70B | {"dtype": None, "torch_dtype": "bfloat16"}},
        ],
    )
    def test_may_be_multimodal(self, config, document):
        vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1}
        whole = {"model_type": "llava", "vision_config": vision, "text_config": LLAMA_70B}
        request = ShapeRequest(model=config(whole | document), tp=8)
        found = expand("matmul_all_reduce", request)
        assert {(each.dtype, each.k) for each in found} == {("bfloat16", 1024), ("bfloat16", 3584)}
        assert left_out(request) == [("matmul_all_reduce", "the vision part")]

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
            ({"torch_dtype": "float8_e4m3fn"}, "of float8_e4m3fn"),
            ({"torch_dtype": "float32"}, "of float32"),
        ],
    )
    def test_of_another_type_is_listed_in_a_16_bit_type_only_if_asked(self, config, fields, reason):
        model = config(LLAMA_70B | {"torch_dtype": "bfloat16"} | fields)
        request = ShapeRequest(model=model, tp=8)
        with pytest.raises(UsageError) as caught:
            expand("matmul_all_reduce", request)
        assert reason in caught.value.message
        ((_, why),) = left_out(request)
        assert reason in why
        cast = replace(request, dtype="bf16")
        assert {each.dtype for each in expand("matmul_all_reduce", cast)} == {"bfloat16"}
        assert left_out(cast) == []

    @pytest.mark.parametrize(("said", "scales"), FP8_CHECKPOINTS)
    def test_of_fp8_is_listed_as_its_scales_are(self, config, said, scales):
        model = config(LLAMA_70B | {"torch_dtype": "bfloat16", "quantization_config": said})
        request = ShapeRequest(["model m=1"], model, tp=2)
        found = expand("matmul_all_reduce", request)
        assert {(each.dtype, each.x_dtype, each.scales) for each in found} == {
            ("bfloat16", "fp8", scales)
        }
        assert {each.k for each in found} == {4096, 14336}
        assert left_out(request) == []
        assert left_out(replace(request, op="all_gather_matmul")) == []
        gathered = expand("all_gather_matmul", request)
        of_layers = {each.n: each.scales for each in gathered if each.x_dtype == "fp8"}
        # queries, keys or values, and both; the same of the feed-forward layers
        assert of_layers == dict.fromkeys((4096, 512, 5120, 14336, 28672), scales)
        assert {each.n for each in gathered if each.x_dtype == "same"} == {64128}  # the head
        scattered = expand("matmul_reduce_scatter", request)
        assert {each.scales for each in scattered} == {scales}
        cast = expand("matmul_all_reduce", replace(request, dtype="bf16"))
        assert {each.x_dtype for each in cast} == {"same"}

    @pytest.mark.parametrize(("said", "named"), OTHER_CHECKPOINTS)
    def test_of_formats_that_are_not_served_is_named(self, config, said, named):
        model = config(LLAMA_70B | {"torch_dtype": "bfloat16", "quantization_config": said})
        with pytest.raises(UsageError) as caught:
            expand("matmul_all_reduce", ShapeRequest(model=model, tp=2))
        assert named in caught.value.message

    def test_of_blocks_that_do_not_split_is_an_error(self, config):
        said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        odd = LLAMA_70B | {"intermediate_size": 28672 + 64}
        model = config(odd | {"torch_dtype": "bfloat16", "quantization_config": said})
        with pytest.raises(UsageError, match="blocks of 128 over 2 ranks"):
            expand("matmul_all_reduce", ShapeRequest(model=model, tp=2))

    def test_may_have_layers_that_are_not_quantised(self, config):
        quantisation = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        }
        model = config(LLAMA_70B | {"quantization_config": quantisation})
        found = expand("matmul_all_reduce", ShapeRequest(["model m=1"], model, tp=8))
        assert {each.k for each in found} == {1024}

    @pytest.mark.parametrize(
        ("document", "quoted"),
        [
            ({"model_type": "t5"}, "t5 is no decoder"),
            (LLAMA_70B | {"num_key_value_heads": 3}, "heads in key and value"),
            (
                LLAMA_70B
                | {"hidden_size": 8256, "num_attention_heads": 96, "num_key_value_heads": 12},
                "12 of the model",
            ),
            (LLAMA_70B | {"hidden_size": 0}, "Transformers does not build it"),
            (LLAMA_70B | {"hidden_size": True}, "hidden_size"),
            (LLAMA_70B | {"head_dim": "128"}, "head_dim"),
            (LLAMA_70B | {"intermediate_size": 28673}, "28673"),
            (LLAMA_70B | {"intermediate_size": 2**31 - 8}, "n="),
        ],
    )
    def test_that_makes_no_sense_is_an_error(self, config, document, quoted):
        with pytest.raises(UsageError) as caught:
            problems(model=config(document), tp=8 if quoted != "n=" else 1)
        assert quoted in caught.value.message

    def test_is_of_all_operations(self, config):
        paths = parse_paths("tp,sequence,attention")
        request = ShapeRequest(model=config(LLAMA_70B), tp=8, paths=paths)
        ops = operations(request, OP)
        assert ops == [
            OP, "attention", "flash_decode", "matmul_all_reduce", "matmul_reduce_scatter",
        ]  # fmt: skip
        assert all(expand(op, request) for op in ops)
        assert left_out(request) == []

    def test_sums_unless_another_path_is_asked_for(self, config):
        request = ShapeRequest(model=config(LLAMA_70B), tp=8)
        assert operations(request, OP) == ["matmul_all_reduce"]
        assert operations(replace(request, op="attention"), OP) == ["attention"]
        paths = parse_paths("sequence")
        assert operations(replace(request, paths=paths), OP) == [OP, "matmul_reduce_scatter"]
        with pytest.raises(UsageError, match="'tq' is no path of a model"):
            parse_paths("tp,tq")

    def test_sums_with_what_follows_them_and_in_the_backward(self, config):
        request = ShapeRequest(["model m=1"], config(LLAMA_70B), tp=8)
        (*sums,) = expand("matmul_all_reduce", request)
        assert [(each.k, each.residual, each.rms_norm) for each in sums] == [
            (k, *followed)
            for k in (1024, 3584)
            for followed in ((False, False), (True, False), (True, True))
        ]
        backward = expand("matmul_all_reduce", replace(request, is_training=True))[len(sums) :]
        assert {each.weight_layout for each in backward} == {"kn"}
        gradients = [(k, False) for k in (1024, 128, 3584, 16032)]
        assert [(each.k, each.residual) for each in backward] == [
            *gradients, (1024, True), (128, True), (3584, True),  # which are added up
        ]  # fmt: skip

    def test_fields_decide_which_operations_a_shape_is_of(self, config):
        shapes = ("model m=1", "model batch=1 kv_len_per_rank=64")
        request = ShapeRequest(shapes, model=config(LLAMA_70B), tp=8)
        ops = operations(request, OP)
        assert sorted(ops) == ["flash_decode", "matmul_all_reduce"]
        assert {each.m for each in expand("matmul_all_reduce", request)} == {1}
        decoded = expand("flash_decode", request)
        assert [(each.kv_len_per_rank, each.page_size) for each in decoded] == [(64, 0), (64, 16)]

    def test_a_field_of_no_operation_is_an_error(self, config):
        request = ShapeRequest(["model q=1"], model=config(LLAMA_70B), tp=8)
        with pytest.raises(UsageError, match="no field 'q'"):
            expand(operations(request, OP)[0], request)

    def test_projections_may_have_a_bias(self, config):
        qwen = ShapeRequest(["model m=1"], model=config(LLAMA_70B | {"model_type": "qwen2"}), tp=8)
        assert {each.n: each.bias for each in expand(OP, qwen)} == {
            1280: False, 7168: False, 1024: True, 128: True, 3584: False, 16032: False,
        }  # fmt: skip
        assert not any(each.bias for each in expand("matmul_all_reduce", qwen))
        both = ShapeRequest(["model m=1"], model=config(LLAMA_70B | {"attention_bias": True}), tp=8)
        assert [each.bias for each in expand("matmul_all_reduce", both)] == [True] * 3 + [False] * 3
        assert expand("matmul_reduce_scatter", both)  # which adds none

    @pytest.mark.parametrize(
        ("fields", "windows"),
        [
            ({"sliding_window": None}, [0]),
            ({"sliding_window": 512, "model_type": "mistral"}, [512]),
            ({"sliding_window": 512, "model_type": "qwen2"}, [0]),
            (
                {"sliding_window": 512, "model_type": "gemma3_text", "num_hidden_layers": 6},
                [0, 512],
            ),
            ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, [512]),
        ],
    )
    def test_attention_may_have_windows(self, config, fields, windows):
        shapes = ("model batch=1 kv_len_per_rank=64 page_size=0",)
        request = ShapeRequest(shapes, model=config(LLAMA_70B | fields), tp=8)
        assert [each.window for each in expand("flash_decode", request)] == windows
        prompts = ShapeRequest(model=request.model, tp=8, paths=("attention",))
        assert ("attention" in operations(prompts, OP)) == (0 in windows)
        assert [op for op, _ in left_out(prompts)] == ["attention"] * any(windows)

    def test_of_experts_has_its_dense_layers_and_says_what_is_left_out(self, config):
        experts = {"num_experts": 128, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
        model = config(LLAMA_70B | experts)
        request = ShapeRequest(["model m=1"], model, tp=8, paths=parse_paths("tp,sequence"))
        assert {each.n for each in expand(OP, request)} == {1280, 1024, 128, 16032}
        assert {each.k for each in expand("matmul_all_reduce", request)} == {1024}
        assert left_out(request) == [
            (op, "128 routed experts: they need grouped matmuls")
            for op in (OP, "matmul_all_reduce", "matmul_reduce_scatter")
        ]

    def test_of_latent_attention_has_its_output_projection_and_mlps(self):
        request = ShapeRequest(["model m=1"], model="deepseek-v3", tp=8, dtype="bf16")
        found = expand(OP, request)
        assert [(each.n, each.k) for each in found[:2]] == [(4608, 7168), (512, 7168)]
        reduced = dict.fromkeys((each.n, each.k) for each in expand("matmul_all_reduce", request))
        assert [*reduced] == [(7168, 2048), (7168, 2304), (7168, 256)]
        everything = replace(request, shapes=(), paths=parse_paths("tp,attention"))
        assert "flash_decode" not in operations(everything, OP)
        assert ("flash_decode", "latent attention: its keys have 576 columns") in left_out(
            everything
        )
        with pytest.raises(UsageError, match="flash_decode serves no layer of the model"):
            expand("flash_decode", everything)


class TestKnownModels:
    def test_are_more_than_twenty_each_with_its_repositories(self):
        assert len(known_models()) > 20
        for name, repositories in known_models().items():
            assert repositories, name
            assert name == name.lower()

    @pytest.mark.parametrize("name", known_models())
    def test_have_problems_on_two_gpus(self, name):
        dtype = "bf16" if name == "deepseek-v3" else None  # its weights are fp8
        request = ShapeRequest(model=name, world_sizes=(2,), dtype=dtype, paths=tuple(PATHS))
        ops = operations(request, OP)
        assert {OP, "matmul_all_reduce", "matmul_reduce_scatter"} <= set(ops)
        for op in ops:
            assert {each.dtype for each in expand(op, request)} == {"bfloat16"}

    def test_are_found_by_repository_in_any_case(self, tmp_path):
        by_name = problems(model="llama-3.1-70b", tp=8)
        assert {(1280, 8192), (7168, 8192)} < {(each.n, each.k) for each in by_name}
        assert problems(model="meta-llama/Llama-3.1-70B-Instruct", tp=8) == by_name
        assert problems(model="META-LLAMA/llama-3.1-70b", tp=8) == by_name

    def test_a_file_of_that_name_comes_first(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "phi-4").mkdir()
        with pytest.raises(UsageError, match="cannot be read"):
            problems(model="phi-4", tp=8)


class TestChoose:
    def recorded(self, **fields):
        (problem,) = problems("16x64x64", world_sizes=(2,))
        return asdict(problem) | fields

    def chosen(self, *recorded, **request):
        return choose(OP, ShapeRequest(world_sizes=(2,), **request), lambda: recorded)

    def test_takes_what_was_asked_for(self):
        choice = choose(OP, ShapeRequest(("1x2x4",)), lambda: pytest.fail("nobody asked"))
        assert [each.m for each in choice.problems] == [1]
        assert choice.note == ""

    def test_else_what_the_database_holds_and_says_so(self):
        choice = self.chosen(self.recorded(), self.recorded(m=32))
        assert [each.m for each in choice.problems] == [16, 32]
        assert "2 that the database holds" in choice.note

    def test_of_the_asked_world_sizes_and_dtype(self):
        others = self.recorded(world_size=8), self.recorded(dtype="bfloat16")
        choice = self.chosen(*others, self.recorded(m=1), dtype="fp16")
        assert [each.m for each in choice.problems] == [1]

    def test_takes_no_recorded_problem_for_a_tp_without_a_model(self):
        with pytest.raises(UsageError, match="--tp says how a model is split"):
            self.chosen(self.recorded(), tp=2)

    def test_else_the_papers_and_says_so(self):
        choice = self.chosen()
        assert len(choice.problems) == 11
        assert "taking 'paper'" in choice.note

    def test_leaves_out_records_of_another_time(self):
        assert len(self.chosen(self.recorded(new_field=1)).problems) == 11


class TestWritten:
    def test_leaves_out_defaults(self):
        (problem,) = problems("16x64x64 gather_dim=0", world_sizes=(2,))
        text = format_problem(OP, asdict(problem))
        assert text == "m=16 n=64 k=64 gather_dim=0 dtype=float16 world_size=2"
        assert problems(text) == [problem]

    def test_says_a_default_that_stands_for_another_field(self):
        (problem,) = expand("flash_decode", ShapeRequest(["2x64x8x2x128"]))
        assert "head_dim=128 kv_len_per_rank=64 v_head_dim=128 dtype" in format_problem(
            "flash_decode", asdict(problem)
        )

    def test_shows_what_it_does_not_know(self):
        assert format_problem(OP, {"m": 1, "z": 2}) == "m=1 z=2"
        assert format_problem("unknown", {"b": 1, "a": 2}) == "a=2 b=1"


def test_counts_are_lists_of_positive_integers():
    assert parse_counts("8") == (8,)
    assert parse_counts("2,4,8,4") == (2, 4, 8)
    for text in ("", "0", "2,", "x", "-1", "1.5", "²"):
        with pytest.raises(UsageError, match="GPUs"):
            parse_counts(text)


# -- fuzz: whatever is typed, only UsageError comes out --

FIELDS = [f"{name}=" for name in field_specs(problem_class(OP))]
VALUES = ["0", "1", "16", "-1", "3584", "99999999999", "fp16", "bf16", "true", ",", "x", "="]
ODDITIES = ["paper", "demo", "model", ".yaml", " ", "\0", "\n", "²", "é", "\udc80"]
WORDS = st.sampled_from(FIELDS + VALUES + ODDITIES)
SHAPES = st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=12).map("".join))


@settings(max_examples=400, deadline=None)
@given(st.lists(SHAPES, max_size=3))
@example(["m=1 n=1 k=1" + " bias=1" * 3])
def test_only_usage_errors_escape_the_parser(shapes):
    with suppress(UsageError):
        assert all(isinstance(each, problem_class(OP)) for each in problems(*shapes))


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=60), SHAPES.map(os.fsencode)))
def test_only_usage_errors_escape_a_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(b"- " + content)
    with suppress(UsageError):
        problems(str(path))


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.dictionaries(st.sampled_from([*LLAMA_70B, "text_config"]), inner),
        max_leaves=8,
    )
)
def test_only_usage_errors_escape_a_config(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(document))
    with suppress(UsageError):
        problems(model=path, tp=2)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*LLAMA_70B, "head_dim"][1:]),
        st.one_of(st.integers(-1, 9), st.sampled_from([64, 96, 2**31, 10**20, 0.5, None, "8", []])),
        min_size=1,
        max_size=3,
    )
)
def test_only_usage_errors_escape_a_config_of_a_model(tmp_path_factory, fields):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(LLAMA_70B | fields))
    request = ShapeRequest(model=path, tp=2, paths=tuple(PATHS), is_training=True)
    with suppress(UsageError):
        for op in operations(request, OP):
            expand(op, request)


def test_fields_are_those_of_the_problem():
    specs = field_specs(problem_class(OP))
    assert [name for name, spec in specs.items() if spec.required] == ["m", "n", "k"]
    assert (specs["bias"].kind, specs["bias"].default) == (bool, False)


def test_flash_decode_has_the_papers_sweep_and_the_heads_of_a_model(tmp_path):
    sweep = expand("flash_decode", ShapeRequest(["paper"], world_sizes=(8,)))
    assert [each.kv_len_per_rank for each in sweep] == [8192 << step for step in range(7)]
    assert {(each.batch, each.q_heads, each.kv_heads, each.head_dim) for each in sweep} == {
        (1, 96, 12, 128)
    }
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    found = expand("flash_decode", ShapeRequest(model=tmp_path, tp=4))
    assert {(each.q_heads, each.kv_heads, each.head_dim) for each in found} == {(64, 8, 128)}
    assert {each.world_size for each in found} == {4}


def test_strong_scaling_spreads_the_same_keys_over_more_ranks():
    found = expand("flash_decode", ShapeRequest(["strong batch=4"], world_sizes=(2, 3)))
    assert [(each.world_size, each.kv_len_per_rank, each.batch) for each in found] == [
        (2, 65536, 4),
        (2, 524288, 4),
        (3, 43691, 4),
        (3, 349526, 4),
    ]
    assert [text.split()[-1] for text in named_sets("flash_decode")["strong"]] == [
        f"world_size={ranks}" for ranks in (1, 2, 4, 8)
    ]
