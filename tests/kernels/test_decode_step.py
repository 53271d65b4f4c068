"""A decode step without a GPU: where weights, keys and values lie; the kernel in simulation."""

from __future__ import annotations

import json

import pytest

from tests.check.cross_compile.conftest import run_python
from tests.rooms import ROOT

SHAPE = (2, 3, 40, 64)  # batch, KV heads, capacity, head_dim of a cache
SIZES = {
    "q": (384, 128), "k": (192, 128), "v": (192, 128), "o": (128, 384),
    "gate": (256, 128), "up": (256, 128), "down": (128, 256), "head": (64, 128),
}  # fmt: skip


def decoder_and_cache(order):
    """A decoder of one layer and its cache, in one block of memory, in this order."""
    import torch

    from taxfree_kernels.decode_step.decoder import Cache, Decoder, Layer

    shapes = {**SIZES, "keys": SHAPE, "values": SHAPE}
    block = torch.zeros(sum(torch.Size(each).numel() for each in shapes.values()) + 128)
    block = block.to(torch.bfloat16)
    at = -block.data_ptr() // 2 % 128
    found = {}
    for name in order:
        count = torch.Size(shapes[name]).numel()
        found[name] = block[at : at + count].view(shapes[name])
        at += count
    norm = torch.zeros(128, dtype=torch.bfloat16)
    head, keys, values = (found.pop(each) for each in ("head", "keys", "values"))
    layer = Layer(input_norm=norm, post_norm=norm, **found)
    decoder = Decoder((layer,), head, norm, head, torch.zeros(32), 64, 1e-6)
    return decoder, Cache((keys,), (values,))


@pytest.mark.parametrize("hidden", [64, 256, 1024, 3584, 5120, 8192])
@pytest.mark.parametrize("sources", [1, 2, 4, 16])
def test_of_a_residual_whole_slabs_are_written(hidden, sources):
    """Products read them whole, beside zeros of weights: zero times NaN would be NaN."""
    from taxfree_kernels.decode_step.chunks import slabs_in
    from taxfree_kernels.decode_step.sums import staged_elements, width_of

    width = width_of(hidden, sources)
    assert slabs_in(hidden, 1) * 1024 <= staged_elements(hidden, 0, 0, width)


class TestLines:
    @pytest.mark.parametrize("last", ["keys", "values", "head", "down"])
    def test_reach_every_row_of_every_matrix(self, last):
        """TMA loads zeros from lines behind the last: heads of a cache begin at lines as well."""
        from taxfree_kernels.decode_step.tape import Lines

        names = [*SIZES, "keys", "values"]
        decoder, cache = decoder_and_cache([each for each in names if each != last] + [last])
        lines = Lines.of(decoder, cache)
        matrices = [vars(decoder.layers[0])[each] for each in SIZES if each != "head"]
        matrices += [decoder.head, *cache.keys[0].flatten(0, 1), *cache.values[0].flatten(0, 1)]
        for each in matrices:
            line, rest = divmod(each.data_ptr() - lines.origin.address, lines.size)
            assert rest == 0
            assert 0 <= line < lines.count

    @pytest.mark.parametrize("apart", [0, 3 << 40], ids=["together", "apart"])
    def test_descriptors_place_every_matrix(self, apart, monkeypatch):
        """Also where the cache lies further from the weights than int32 lines reach."""
        import torch

        from taxfree_kernels.decode_step import tape
        from taxfree_kernels.decode_step.decoder import weights_of

        decoder, cache = decoder_and_cache([*SIZES, "keys", "values"])
        address = torch.Tensor.data_ptr
        monkeypatch.setattr(
            torch.Tensor,
            "data_ptr",
            lambda self: address(self) + apart * (self.shape[1:] == SHAPE[1:]),
        )
        lines = tape.Lines.of(decoder, cache)
        assert (lines.spans > 1) == (apart > 0)
        (layer,) = decoder.layers
        columns = [*weights_of(layer), *cache.keys, *cache.values]
        head = lines.table[1, 0], decoder.head
        for line, each in (*zip(lines.table[0], columns, strict=False), head):
            box, shape, strides = lines.rows(
                lambda origin, shape, strides, box, layout: (box, shape, strides),
                [each], [4, 1, 64], lambda box: None,
            )  # fmt: skip
            assert len(box) == len(shape) == len(strides) == (5 if apart else 4)
            assert all(0 < 2 * stride < 1 << 40 for stride in strides)
            mask = (1 << tape.SPAN_BITS.value) - 1
            place = [line >> tape.SPAN_BITS.value, line & mask] if apart else [line]
            assert all(0 <= at < size < 1 << 31 for at, size in zip(place, shape, strict=False))
            offset = sum(int(at) * size for at, size in zip(place, strides, strict=False))
            assert lines.origin.address + 2 * offset == each.data_ptr()

    def test_addresses_that_tma_cannot_reach_are_refused(self):
        from dataclasses import replace

        import torch

        from taxfree_kernels.decode_step.tape import Lines
        from taxfree_kernels.errors import PlanError

        decoder, cache = decoder_and_cache([*SIZES, "keys", "values"])
        shifted = torch.zeros(64 * 128 + 64, dtype=torch.bfloat16)
        first = -shifted.data_ptr() // 2 % 8 + 4
        head = shifted[first : first + 64 * 128].view(64, 128)
        with pytest.raises(PlanError, match="no multiples of 16 bytes"):
            Lines.of(replace(decoder, head=head), cache)


class TestModel:
    def test_what_the_kernel_does_not_serve_is_said(self):
        from dataclasses import replace

        import torch

        from taxfree_kernels.decode_step.tape import model_of
        from taxfree_kernels.errors import PlanError

        decoder, cache = decoder_and_cache([*SIZES, "keys", "values"])
        (layer,) = decoder.layers
        assert model_of(decoder, cache, 1).QKV_ROWS == 768
        biased = replace(layer, q_bias=torch.zeros(384))
        for changed, batch, why in (
            (decoder, 17, "17 sequences"),
            (replace(decoder, head_dim=48), 1, "heads of 48 elements"),
            (replace(decoder, head=decoder.head[:60]), 1, "60 rows of the head"),
            (replace(decoder, layers=(layer, biased)), 1, "with and without biases"),
            (replace(decoder, head=decoder.head.half()), 1, "different dtypes"),
        ):
            with pytest.raises(PlanError, match=why):
                model_of(changed, cache, batch)
        table = torch.zeros(2, 4, dtype=torch.int32)
        for page, rows, why in (
            (24, table, "pages of 24 keys"),
            (8, table, "pages of 8 keys"),
            (16, table.long(), "not int32"),
            (16, torch.zeros(4, 2, dtype=torch.int32).t(), "rows of neighbours"),
        ):
            pages = torch.zeros(9, page, 3, 64, dtype=torch.bfloat16)
            with pytest.raises(PlanError, match=why):
                model_of(
                    decoder, replace(cache, keys=(pages,), values=(pages,), block_table=rows), 2
                )

    @pytest.mark.parametrize("world", [1, 2, 4, 8])
    def test_the_first_config_fits_shared_memory(self, world):
        from taxfree_kernels.decode_step.step import seed_config
        from taxfree_kernels.decode_step.tape import CHUNK_K, CHUNK_ROWS, model_of
        from taxfree_kernels.hardware import KNOWN

        model = model_of(*decoder_and_cache([*SIZES, "keys", "values"]), 1)
        room = KNOWN["h100"].shared_memory
        for hidden, wide in ((4096, 14336), (3584, 18944), (8192, 28672)):
            large = model._replace(HIDDEN=hidden, INTERMEDIATE=wide // world)
            stages = seed_config(large, room, world)["STAGES"]
            assert 4 <= stages <= room // (2 * CHUNK_ROWS * CHUNK_K)

    @pytest.mark.parametrize("batch", [2, 8, 16])
    @pytest.mark.parametrize("world", [1, 2, 4, 8])
    def test_the_first_config_of_several_sequences_has_a_ring(self, world, batch):
        from taxfree_kernels.decode_step.step import seed_config
        from taxfree_kernels.decode_step.tape import model_of
        from taxfree_kernels.hardware import KNOWN

        model = model_of(*decoder_and_cache([*SIZES, "keys", "values"]), batch)
        model = model._replace(HIDDEN=4096, INTERMEDIATE=14336 // world, HEADS=32, KV_HEADS=8)
        assert seed_config(model, KNOWN["h100"].shared_memory, world)["STAGES"] >= 9


class TestSimulated:
    """The kernel's source on a CPU: of layers with biases, norms of q and k, and odd sizes."""

    @pytest.mark.dealt("case")
    @pytest.mark.parametrize(
        "case",
        [(1, 2, 0, 0, "none"), (1, 2, 16, 70, "none"), (3, 1, 256, 0, "none"),
         (11, 2, 64, 70, "none"), (1, 2, 16, 70, "heads")],
        ids=str,
    )  # fmt: skip
    def test_phases_are_near_float64_and_nothing_is_left_behind(self, case):
        self.check(case, of_tokens=0.02)

    @pytest.mark.dealt("case")
    @pytest.mark.parametrize(
        "case",
        [(1, 2, 16, 70, "channel"), (1, 2, 0, 0, "block"), (3, 2, 0, 0, "channel"),
         (11, 1, 64, 70, "block")],
        ids=str,
    )  # fmt: skip
    def test_phases_in_fp8_are_near_float64_and_nothing_is_left_behind(self, case):
        self.check(case, of_tokens=0.2)

    @staticmethod
    def check(case, of_tokens):
        script = str(ROOT / "tests" / "kernels" / "simulate.py")
        worst = json.loads(run_python(script, *map(str, case), PYTHONUNBUFFERED="1"))
        clean = {name: worst.pop(name) for name in ("counters", "changed", "words")}
        assert not any(clean.values()), clean
        assert len(worst) == 7
        assert worst.pop("tokens") < of_tokens, worst
        assert max(worst.values()) < 1, worst
