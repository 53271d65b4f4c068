"""First calls while a caller routes allocations to its own memory: nothing of ours stays there.

Inductor does so before it captures a graph, and refuses to go on if anything but outputs stays.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from taxfree._runtime.runtime import Runtime
from taxfree.settings import Settings
from taxfree_kernels.variant import is_library, resized
from tests.models.loading import parallel_model
from tests.ranks import Ranks, require
from tests.taxfree.runtime_tasks import problem_of, record_of, runtime_of, tensors_of
from tests.taxfree.test_runtime_calls import joined, method_of
from tests.taxfree.test_sizes import CASES, ROWS_FIELD, called

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("fabric", ["cuda"], indirect=True),
]

SIZES = (1, 16)
#: operation -> a variant with scratch memory or counters, which all problems of CASES have
OURS = {
    "all_gather_matmul": "push",
    "matmul_all_reduce": "push_two_shot_lamport",
    "matmul_reduce_scatter": "push",
    "flash_decode": "persistent",
    "attention": "flash",
    "embedding_all_to_all": "push",
}
SHAPE = {"n": 256, "k": 768}  # of matmuls
PROMPT, NEW_TOKENS = 8, 12
WIDTH, INSIDE = 512, 1024  # of Transformers' model


def run(ranks: Ranks, task: Callable[..., Any], **arguments: Any) -> list[Any]:
    return ranks.run(ranks.few, f"{__name__}:{task.__name__}", **arguments)


# -- what runs on the ranks --------------------------------------------------------------------


def problems_of(op: str, fields: dict[str, Any]) -> list[Any]:
    problem = problem_of(op, **({} if op in ROWS_FIELD else SHAPE) | fields)
    return [resized(problem, **{ROWS_FIELD.get(op, "m"): size}) for size in SIZES]


def opened(fabric: Any, problems: list[Any], variant: str | None) -> Any:
    """A runtime that has no scratch memory yet."""
    fabric = copy.copy(fabric)
    for kind in ("workspace", "library_memory"):
        fabric.__dict__.pop(kind, None)
    return runtime_of(fabric, *(record_of(fabric, each, variant) for each in problems if variant))


def have_vendors_workspaces(device: torch.device) -> None:
    """Let the vendor's library allocate what it keeps for this thread and stream."""
    for dtype in (torch.float16, torch.bfloat16):
        ones = torch.ones(64, 64, dtype=dtype, device=device)
        torch.addmm(ones[0], ones, ones, out=ones @ ones)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """PyTorch ends the process if a pool is freed while another one is in use."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def staying_in(pool: Any) -> dict[int, int]:
    """Address and size of all that is allocated in a memory pool."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            is_allocated = block["state"] == "active_allocated"
            if is_allocated and tuple(segment["segment_pool_id"]) == tuple(pool.id):
                found[address] = block["size"]
            address += block["size"]
    return found


def call_in_a_pool(fabric: Any, op: str, fields: dict[str, Any], variant: str | None) -> Any:
    """Whether first calls in a pool are right, and sizes of what stays there but for outputs."""
    problems = problems_of(op, fields)
    rt = opened(fabric, problems, variant)
    given = [tensors_of(fabric, problem) for problem in problems]
    have_vendors_workspaces(fabric.device)
    pool, outs = torch.cuda.MemPool(), []
    with no_collection():
        for problem, (inputs, _) in zip(problems, given, strict=True):
            with torch.cuda.use_mem_pool(pool):
                outs.append(called(rt, op, problem, inputs))
    rt.check()
    right = [torch.equal(out, expected) for out, (_, expected) in zip(outs, given, strict=True)]
    ran = {rt.choice(problem).variant for problem in problems}
    staying = staying_in(pool)
    for out in outs:
        staying.pop(out.untyped_storage().data_ptr(), None)
    return right, ran, list(staying.values())


def compile_at_once(fabric: Any, op: str, fields: dict[str, Any], variant: str | None) -> Any:
    """Whether calls are right whose first ones Inductor makes, before it captures them."""
    problems = problems_of(op, fields)
    rt = opened(fabric, problems, variant)
    torch.compiler.reset()
    right = []
    for problem in problems:
        compiled = None
        for seed in range(4):
            inputs, expected = tensors_of(fabric, problem, seed)
            name, arguments, options = method_of(op, problem, inputs)
            compiled = compiled or into_graphs(getattr(rt, name))
            torch.compiler.cudagraph_mark_step_begin()
            right.append(torch.equal(joined(compiled(*arguments, **options)), expected))
    rt.check()
    return right, {rt.choice(problem).variant for problem in problems}


def into_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, as Inductor compiles it into graphs."""

    def model(*arguments: Any, **options: Any) -> Any:
        return method(*arguments, **options)

    return torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=False)


def capture_at_once(fabric: Any, op: str, fields: dict[str, Any]) -> list[bool]:
    """Graphs in one private pool, whose calls had no plan; eager calls and graphs take turns."""
    problems = problems_of(op, fields)
    rt = opened(fabric, problems, OURS[op])
    library = Runtime.on_fabric(fabric, [], Settings(disable=True))
    have_vendors_workspaces(fabric.device)
    pool, captured = torch.cuda.graph_pool_handle(), []
    for problem in problems:
        inputs, expected = tensors_of(fabric, problem)
        called(library, op, problem, inputs)  # which opens communicators, and loads kernels
        torch.cuda.synchronize()
        name, arguments, options = method_of(op, problem, inputs)
        graph = torch.cuda.CUDAGraph()
        with (
            no_collection(),
            warnings.catch_warnings(action="ignore"),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            result = getattr(rt, name)(*arguments, **options)
        captured.append((graph, result, problem, inputs, expected))
    right = []
    for graph, result, problem, inputs, expected in captured * 3:
        graph.replay()
        right.append(torch.equal(joined(result), expected))
        right.append(torch.equal(called(rt, op, problem, inputs), expected))
    rt.check()
    return right


def generate(fabric: Any, folder: str, variant: str | None) -> Any:
    """Of each batch and cache the largest gap of a token, what ran, and the kinds of choices.

    A token's gap is how far its logit is below the largest one of the same model in one process,
    in standard deviations of the logits.
    """
    import transformers

    import taxfree.hf
    from taxfree.models import report

    world = fabric.world_size
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=INSIDE, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(3)
    alone = transformers.LlamaForCausalLM(config).bfloat16().eval()
    alone.generation_config.pad_token_id, alone.generation_config.eos_token_id = 0, None
    if fabric.rank == 0:
        alone.save_pretrained(folder)
    torch.distributed.barrier()
    alone = alone.to(fabric.device)
    sizes = {"n": WIDTH, "weight_layout": "nk", "dtype": "bfloat16"}
    problems = [
        problem_of("matmul_all_reduce", **sizes | followed, k=k // world, m=m)
        for followed in ({}, {"residual": True}, {"residual": True, "rms_norm": True})
        for k in (WIDTH, INSIDE)
        for m in (*SIZES, *(PROMPT * size for size in SIZES))
    ]
    rt = opened(fabric, problems, variant)
    taxfree.hf.enable()
    report.clear()
    torch.compiler.reset()
    model = parallel_model(fabric, folder, torch.bfloat16)
    gaps = {}
    for batch in SIZES:
        for cache in ("static", "dynamic"):  # first calls are those of the compiled model
            ids = torch.arange(batch * PROMPT, device=fabric.device).view(batch, PROMPT) % 256
            with torch.no_grad():
                # Without a mask the first token, whose number is that of padding, is masked.
                tokens = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                    do_sample=False, cache_implementation=cache,
                )  # fmt: skip
                logits = alone(tokens[:, :-1]).logits[:, PROMPT - 1 :].float()
            chosen = logits.gather(2, tokens[:, PROMPT:, None])[..., 0]
            gaps[batch, cache] = float(((logits.amax(2) - chosen) / logits.std(2)).max())
    rt.check()
    ran = {each for layer in taxfree.report().layers.values() for each in layer}
    return gaps, ran, {kind for kinds in rt.stats().values() for kind in kinds}


def compile_a_parallel_model(fabric: Any) -> list[float]:
    """Relative errors of PyTorch's parallel model, compiled into graphs, by numbers of rows."""
    from torch.distributed.tensor.parallel import parallelize_module

    import taxfree
    from tests.models import llama
    from tests.models.meshes import new_mesh

    torch.manual_seed(0)
    model = llama.Llama().bfloat16().to(fabric.device).eval()
    mesh, plan = new_mesh(fabric.device.type), llama.plan(is_sequence_parallel=False)
    library = parallelize_module(copy.deepcopy(model), mesh, plan)
    ours = parallelize_module(model, mesh, plan)
    torch.compiler.reset()
    errors = []
    with taxfree.enable(mesh, ours) as rt, torch.no_grad():
        compiled = torch.compile(ours, mode="reduce-overhead", dynamic=False)
        for batch in SIZES:
            for call in range(4):
                shape, device = (batch, 1), fabric.device
                generator = torch.Generator(device).manual_seed(call)
                tokens = torch.randint(llama.VOCABULARY, shape, generator=generator, device=device)
                torch.compiler.cudagraph_mark_step_begin()
                found, wanted = compiled(tokens).float(), library(tokens).float()
                errors.append(float((found - wanted).norm() / wanted.norm()))
        rt.check()
    return errors


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize(("op", "fields"), CASES)
class TestFirstCalls:
    def test_leave_nothing_in_a_pool_but_their_output(
        self, ranks: Ranks, op: str, fields: dict[str, Any], is_tuned: bool
    ) -> None:
        variant = OURS[op] if is_tuned else None
        found = run(ranks, call_in_a_pool, op=op, fields=fields, variant=variant)
        for right, ran, staying in found:
            assert all(right)
            assert staying == []
            assert ran == {variant} if is_tuned else all(is_library(op, each) for each in ran)

    def test_may_be_those_of_inductor_before_it_captures(
        self, ranks: Ranks, op: str, fields: dict[str, Any], is_tuned: bool
    ) -> None:
        require(2, "cuda")  # gloo cannot be captured
        variant = OURS[op] if is_tuned else None
        for right, ran in run(ranks, compile_at_once, op=op, fields=fields, variant=variant):
            assert all(right)
            assert ran == {variant} if is_tuned else all(is_library(op, each) for each in ran)


@pytest.mark.parametrize(("op", "fields"), CASES)
def test_graphs_of_a_private_pool_keep_what_they_need(
    ranks: Ranks, op: str, fields: dict[str, Any]
) -> None:
    require(2, "cuda")
    assert all(all(right) for right in run(ranks, capture_at_once, op=op, fields=fields))


@pytest.mark.parametrize("variant", [None, "push_two_shot_lamport"])
def test_transformers_generate_with_both_caches(
    ranks: Ranks, tmp_path: Path, variant: str | None
) -> None:
    pytest.importorskip("transformers", reason="pip install '.[models]'")
    require(2, "cuda")
    for gaps, ran, kinds in ranks.run(
        2, f"{__name__}:generate", folder=str(tmp_path), variant=variant
    ):
        assert set(gaps) == {(batch, cache) for batch in SIZES for cache in ("static", "dynamic")}
        assert max(gaps.values()) < 0.2
        assert "matmul_all_reduce" in ran
        assert ("exact" in kinds) == (variant is not None)


def test_a_parallel_model_of_pytorch_is_compiled_into_graphs(ranks: Ranks) -> None:
    require(2, "cuda")
    for errors in ranks.run(2, f"{__name__}:compile_a_parallel_model"):
        assert len(errors) == 4 * len(SIZES)
        assert max(errors) < 0.05
