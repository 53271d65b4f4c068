"""A program that runs one of Iris' `ops` as it is, from where Iris and tritonBLAS are installed."""

import sys
from importlib.machinery import PathFinder
from types import ModuleType

import iris
import torch

# Of tritonBLAS its device functions: the package itself looks for libraries of GPUs.
for name in ("tritonblas", "tritonblas.kernels"):
    package = ModuleType(name)
    _, _, inner = name.partition(".")
    found = PathFinder.find_spec("tritonblas")
    assert found is not None
    assert found.submodule_search_locations is not None
    package.__path__ = [f"{folder}/{inner}" for folder in found.submodule_search_locations]
    sys.modules[name] = package

from iris import ops  # noqa: E402

M, N, K, BLOCK = 32, 32, 32, 16


def drawn(rank: int, *shape: int) -> torch.Tensor:
    """Small whole numbers of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, shape, generator=generator).float()


def main() -> None:
    """Two calls of `ops.all_gather_matmul`, or of `ops.matmul_all_reduce` of a variant."""
    name = sys.argv[1]
    shmem = iris.iris()
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    config = ops.FusedConfig(BLOCK, BLOCK, BLOCK, num_sms=2, allow_tf32=False)
    out, shard = shmem.zeros((M, N), dtype=torch.float32), shmem.zeros((M, K), dtype=torch.float32)
    shard.copy_(drawn(rank, M, K))
    shmem.barrier()
    for _ in range(2):
        if name == "all_gather_matmul":
            weight = drawn(world, world * K, N)
            ops.all_gather_matmul(shmem, out, shard, weight, config=config)
            expected = torch.cat([drawn(peer, M, K) for peer in range(world)], 1) @ weight
        else:
            config.all_reduce_variant = name
            weight = drawn(world, K, N)
            ops.matmul_all_reduce(shmem, out, shard, weight, config=config)
            expected = sum(drawn(peer, M, K) for peer in range(world)) @ weight
        assert torch.equal(out, expected)
