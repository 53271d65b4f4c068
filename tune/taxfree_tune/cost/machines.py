"""Machines: the rates that formulas take, fitted to one GPU and carried over to others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from taxfree_kernels.hardware import KNOWN, Hardware
from taxfree_kernels.variant import Problem


@dataclass(frozen=True)
class Machine:
    """One kind of GPU in a fully connected node.

    Args:
        hardware: its limits.
        flops_per_s: of the vendor's matmul on large matrices of 16 bits.
        memory_bytes_per_s: of device memory.
        link_bytes_per_s: received by a rank from all peers through symmetric memory.
        copy_bytes_per_s: of a strided copy, bytes read plus bytes written.
        collective_bytes_per_s: all-gather rate of the collective library; on registered buffers it
            reaches the link's rate.
        summed_bytes_per_s: its rate of adding, per peer, on top of the link's time.
        latency_us, registered_latency_us: of a collective with almost no data.
        step_us: added for each step of its ring, if buffers are not registered.
        matmul_start_us, attention_start_us, kernel_start_us: ramp-up plus ramp-down of the vendor's
            matmul, of attention, and of any other kernel.
        split_us: extra time of the vendor's matmul when it splits K.
        gap_us: from one kernel to the next in a graph.
        host_call_us: host time per call.
        host_kernel_us: plus per kernel of ours.
        host_op_us: plus per PyTorch op.
        host_collective_us: plus per call of the collective library.
    """

    hardware: Hardware
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float
    collective_bytes_per_s: float
    summed_bytes_per_s: float
    latency_us: float
    registered_latency_us: float
    step_us: float
    matmul_start_us: float
    split_us: float
    attention_start_us: float
    kernel_start_us: float
    gap_us: float
    host_call_us: float
    host_kernel_us: float
    host_op_us: float
    host_collective_us: float

    def rate_of(self, problem: Problem) -> float:
        """Flops per second of a problem's matmul: of fp8 factors twice as many in data sheets."""
        return self.flops_per_s * (1 + getattr(problem, "is_fp8", False))


H200 = Machine(
    hardware=KNOWN["h200"],
    # measured: the peaks in the result files, and re-layout copies in place
    flops_per_s=770e12,
    memory_bytes_per_s=4.63e12,
    link_bytes_per_s=355e9,
    copy_bytes_per_s=1.9e12,
    # fitted
    collective_bytes_per_s=150e9,
    summed_bytes_per_s=328e9,
    latency_us=6.66,
    registered_latency_us=6.93,
    step_us=0.943,
    matmul_start_us=4.0,
    split_us=3.78,
    attention_start_us=7.07,
    kernel_start_us=1.42,
    host_call_us=6.28,
    host_kernel_us=12.8,
    host_op_us=10.4,
    host_collective_us=38.5,
    # assumed: without a profile, rows cannot separate it from the start times above
    gap_us=1.0,
)


@dataclass(frozen=True)
class DataSheet:
    """Peak rates as the vendor states them: dense 16-bit, memory, and links into one GPU."""

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


SHEETS = {
    "h200": DataSheet(989e12, 4.8e12, 450e9),
    "mi300x": DataSheet(1307e12, 5.3e12, 448e9),
    "mi325x": DataSheet(1307e12, 6.0e12, 448e9),
    "mi350x": DataSheet(2307e12, 8.0e12, 538e9),
}


def _scaled(name: str) -> Machine:
    """A machine that reaches H200's fractions of its own data sheet, with H200's overheads."""
    hardware, sheet, measured = KNOWN[name], SHEETS[name], SHEETS["h200"]
    flops = sheet.flops_per_s / measured.flops_per_s
    memory = sheet.memory_bytes_per_s / measured.memory_bytes_per_s
    link = sheet.link_bytes_per_s / measured.link_bytes_per_s
    return dataclasses.replace(
        H200,
        hardware=hardware,
        flops_per_s=H200.flops_per_s * flops,
        memory_bytes_per_s=H200.memory_bytes_per_s * memory,
        link_bytes_per_s=H200.link_bytes_per_s * link,
        collective_bytes_per_s=H200.collective_bytes_per_s * link,
        summed_bytes_per_s=H200.summed_bytes_per_s * link,
        copy_bytes_per_s=H200.copy_bytes_per_s * memory,
    )


MACHINES = {
    "h200": H200,
    "mi300x": _scaled("mi300x"),
    "mi325x": _scaled("mi325x"),
}
