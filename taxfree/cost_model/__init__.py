"""The only cost model: predicts the time of each variant from a machine's rates.

A call is a sequence of pieces, each a kernel or one call of the collective library. Times are in
microseconds, sizes in bytes, for one rank of W::

    matmul      = start + max(2 ceil(M, 64) N K / flops, its bytes / memory) + split
    collective  = latency + steps of a ring * step + received / rate
    rate of sums: 1 / rate = 1 / link + 1 / ((W - 1) summed)
    copy        = start + 2 * bytes / copy
    exchange    = signal + max(received / link, (blocks of a sender - 1) * round_trip)
    tiles       = waves * tile, at least the problem's bytes / memory
    waves       = ceil(programs / compute units)
    tile        = max(2 BM BN K' / (flops / compute units), (BM + BN) K' item / loads)
    pulled      = signal + received * ceil(N / BN) / pull
    barrier     = start + signal
    engine copy = engine + received / link; announced ones of a stream take turns

The vendor's matmul splits K where its tiles (of 128 x 64) fill less than half of the compute units,
and then adds the parts: `split`, else 0. A tile is bound by the load bandwidth of its compute unit,
mostly from the L2 cache, which differs between loads by threads (cp.async) and by TMA. A sender has
one block in flight at a time (Little's law), and its signal waits for the last. K' is K / SPLIT_K.
``gather.py``, ``sums.py`` and ``decode.py`` define the pieces of each variant, and

    t_graph = the pieces + gap * (pieces - 1)
    t_eager = max(t_graph, host)

where the host takes a fixed time per call, plus a cost for each thing it does: launching a kernel
of ours, calling a PyTorch op or the collective library, making a stream wait for another. Skew,
power and noise are not modelled. The rates of H200 are fitted to measured rows
(benchmarks/model_error.py, which also reports the model's error). Other machines are assumed to
reach the same fractions of their data sheets, with the same overheads: they are not measured.
"""

from taxfree.cost_model.machines import H200, MACHINES, Machine, machine, machine_like
from taxfree.cost_model.model import (
    Modelled,
    Times,
    bounds_of,
    modelled,
    modelled_variants,
    times,
)
from taxfree.cost_model.pieces import exchange_us, matmul_us, tiles_us, vendor_us

__all__ = [
    "H200",
    "MACHINES",
    "Machine",
    "Modelled",
    "Times",
    "bounds_of",
    "exchange_us",
    "machine",
    "machine_like",
    "matmul_us",
    "modelled",
    "modelled_variants",
    "tiles_us",
    "times",
    "vendor_us",
]
