"""The tables of a decode step: where weights, keys and values lie, without a GPU."""

from __future__ import annotations

import pytest

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
