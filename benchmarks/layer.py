"""Times the operations of a model's layer one after another, on a rank alone.

    python -m benchmarks.layer --rows 1,16,64,256,1024

``benchmarks.alone`` repeats one operation. An engine never does, so what one kernel leaves to the
next, in caches or by an early launch, may differ. Here a call is a layer of a Llama 70B: the
gather before QKV, the sum behind the attention, the gather before gate and up, and the sum behind
down, without what lies between them. One rank of --ranks plays all of them as it does there. For
each operation all candidates are timed, repeated, and the layer is timed with

 - `vendor`: the vendor's matmuls of the same local shapes;
 - `searched`: each operation's fastest candidate of those that a search would try;
 - `all`: its fastest candidate that needs no promise;
 - `promised`: its fastest candidate, where weights are promised to be static.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import alone, layer_ranks
from benchmarks.commands import exit_code, parser, positive, positives
from benchmarks.emulate_ranks import TIMEOUT_S, PeersAre
from taxfree import devices
from taxfree.measuring import environment
from taxfree.measuring.groups import deadline_s
from taxfree.measuring.results import machine_name, write
from taxfree.workers.group import WorkerGroup
from taxfree_kernels.all_gather_matmul.problem import AllGatherMatmul
from taxfree_kernels.fabric.layout import arena_bytes
from taxfree_kernels.matmul_all_reduce.problem import MatmulAllReduce
from taxfree_kernels.variant import op_of

ROWS = (1, 16, 64, 256, 1024)


def problems(
    m: int, ranks: int, hidden: int = 8192, qkv: int = 10240, intermediate: int = 28672
) -> list[Any]:
    """The operations of a layer on one rank, in order.

    Args:
        m: rows.
        ranks: over which the columns of QKV, heads, and intermediate columns are split.
        hidden, qkv, intermediate: columns, of all ranks; heads have `hidden`.
    """
    common: dict[str, Any] = {"m": m, "dtype": "bfloat16", "world_size": ranks}
    gather = common | {"k": hidden, "gather_dim": 1}
    return [
        AllGatherMatmul(n=qkv // ranks, **gather),
        MatmulAllReduce(n=hidden, k=hidden // ranks, **common),
        AllGatherMatmul(n=2 * intermediate // ranks, **gather),
        MatmulAllReduce(n=hidden, k=intermediate // ranks, **common),
    ]


def measure(
    layers: Sequence[Sequence[Any]],
    fabric: str,
    repetitions: int,
    choose: alone.Choose = alone.seed_candidates,
    peers: PeersAre = "absent",
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Time layers, each with all its choices, on one rank.

    Args:
        layers: the problems of each.

    Yields:
        After each layer, the environment's record and the layer's rows.
    """
    arena = max(arena_bytes(each.slot_bytes) for layer in layers for each in layer)
    heap = arena_bytes(layers[0][0].world_size * arena)
    with WorkerGroup(1, fabric, heap, TIMEOUT_S) as group:
        machine = environment.record(fabric, group.hardware)
        for layer in layers:
            found = group.call(
                layer_ranks.time_layer, deadline_s(group.hardware),
                problems=[(op_of(each), dataclasses.asdict(each)) for each in layer],
                candidates=[choose(each, group.hardware) for each in layer],
                arena_bytes=arena, repetitions=repetitions, peers=peers,
            )[0]  # fmt: skip
            yield machine, [{"m": layer[0].m, "peers": peers, **row} for row in found]


def main() -> int:
    """Run the command line; returns the exit code."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=positive, default=8, help="ranks, of which one is played")
    made.add_argument("--rows", type=positives, default=ROWS, help="of the activations")
    made.add_argument("--repetitions", type=positive, default=12, help="of a chain of layers")
    alone.add_choices(made)
    options = made.parse_args()
    return exit_code(lambda: _write(options))


def _write(options: argparse.Namespace) -> None:
    fabric = devices.fabric_for(options.fabric)
    devices.require(fabric, 1)
    layers = [problems(m, options.ranks) for m in options.rows]
    choose = alone.chooser(options)
    rows: list[dict[str, Any]] = []
    for peers in options.peers:
        for machine, found in measure(layers, fabric, options.repetitions, choose, peers):
            rows += found
            for row in found:
                _print(row)
            if options.out or fabric != "host":
                gpu = machine_name(machine["hardware"]["gpu"])
                document = {"schema": 1, "environment": machine, "rows": rows}
                path = options.out or alone.FOLDER / f"{gpu}-layer.json"
                write(path, json.dumps(document, indent=1) + "\n")


def _print(row: dict[str, Any]) -> None:
    parts = ", ".join(f"{each['variant']} {each['median_us']:.1f}" for each in row["operations"])
    layer = f"{row['m']:5} rows, peers {row['peers']}, {row['choice']:8} {row['median_us']:8.1f} us"
    print(f"{layer} alone; repeated: {parts}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
