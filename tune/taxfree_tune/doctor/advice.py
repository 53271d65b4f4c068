"""Next steps for the user."""

from __future__ import annotations

from collections.abc import Iterator

from taxfree_tune.doctor.report import MachineReport

# Pinned: Iris is installed from git, and its main branch moves.
IRIS_COMMIT = "03bd9d5d9ac64e856c9322f59f7abf7c09d10752"
_IRIS = f"pip install git+https://github.com/ROCm/iris.git@{IRIS_COMMIT}"


def advice(report: MachineReport) -> tuple[str, ...]:
    """Steps, the most pressing first."""
    return (*_repairs(report), *_warnings(report), *_next(report))


def _repairs(report: MachineReport) -> Iterator[str]:
    torch = report.software.loaded("torch")
    vendors = report.machine.vendors
    if "nvidia" in vendors and "CUDA" not in report.software.versions:
        yield "for the NVIDIA GPUs: pip install 'taxfree[cuda]', with a torch built for CUDA"
    elif "amd" in vendors and "ROCm" not in report.software.versions:
        yield "for the AMD GPUs: install a ROCm build of torch, which brings its own Triton"
    elif torch is None:
        yield "install torch: pip install 'taxfree[cpu]'"
    elif report.software.loaded("triton") is None:
        yield "install Triton: pip install 'triton>=3.6'"
    if len(_triton_distributions(report)) > 1:
        yield f"keep one Triton of these: {', '.join(_triton_distributions(report))}"
    if "amd" in vendors and report.software.iris.state != "present":
        namesake = "pip uninstall iris, then " if report.software.iris.state == "namesake" else ""
        yield f"for the AMD GPUs' links: {namesake}{_IRIS}"
    if _numpy_is_too_new(report):
        yield "for the host fabric with this Triton: pip install 'numpy<2.4'"


def _warnings(report: MachineReport) -> Iterator[str]:
    if report.machine.processes:
        yield "other processes use the GPUs: what is measured beside them is not to be trusted"
    if any(gpu.slowed_by for gpu in report.machine.gpus):
        yield "some GPUs are slowed down: compare times only at the same clocks"
    coherence = report.measured.coherence if report.measured else None
    if coherence is not None and coherence.stale_words:
        yield (
            "kernels see old contents of the symmetric heap (is it fine-grained memory?): fused "
            "kernels give wrong results; use the baseline, TAXFREE_DISABLE=1"
        )
    order = report.measured.order if report.measured else None
    if order is not None and not order.is_kept:
        yield "programs start out of order here: fused kernels may time out; use the baseline"


def _next(report: MachineReport) -> Iterator[str]:
    measured = report.measured
    if measured is None:
        yield "to try all of it without a GPU: taxfree doctor --fabric host"
    elif measured.interpreted:
        yield "to try it without a GPU, in a checkout: make demo"
        yield "taxfree tune --shapes demo --gpus 2 --fabric host"
    else:
        yield f"taxfree tune --shapes paper --gpus {measured.world_size}"


def _triton_distributions(report: MachineReport) -> tuple[str, ...]:
    return next(
        (package.installed for package in report.software.packages if package.name == "triton"), ()
    )


def _numpy_is_too_new(report: MachineReport) -> bool:
    triton, numpy = (report.software.loaded(name) or "" for name in ("triton", "numpy"))
    return triton.startswith(("3.4.", "3.5.", "3.6.")) and _version(numpy) >= (2, 4)


def _version(text: str) -> tuple[int, ...]:
    numbers = text.split(".")[:2]
    return tuple(map(int, numbers)) if all(map(str.isdigit, numbers)) else ()
