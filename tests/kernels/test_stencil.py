"""The stencil: what it refuses, and that results do not depend on how the domain is cut."""

from __future__ import annotations

import pytest
import torch

from taxfree.errors import UsageError
from taxfree_kernels.errors import PlanError
from taxfree_kernels.stencil.launches import shared_sides
from taxfree_kernels.stencil.operation import make_inputs, reference, relaxed
from taxfree_kernels.stencil.problem import Stencil
from taxfree_kernels.variant import variants
from tests.kernels.contract import complaints
from tests.kernels.tasks import Case
from tests.taxfree.runtime_tasks import runtime_of

HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 7}, "rows is 7, no multiple of the 2 ranks"),
        ({"columns": 7, "across": 2}, "columns is 7, no multiple of the 2 ranks"),
        ({"across": 3}, "2 ranks are no multiple of across=3"),
        ({"columns": 2}, "a domain without inner points"),
        ({"depth": 2}, "a domain without inner points"),
        ({"steps": 0}, "steps is 0"),
        ({"norm_every": -1}, "norm_every is -1"),
        ({"dtype": "float16"}, "dtype float16 is not one of float32"),
    ],
)
def test_impossible_dimensions_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        Stencil(**{"rows": 8, "columns": 8, "world_size": 2} | fields)


@pytest.mark.parametrize(("across", "most"), [(1, 591), (2, 418)])
def test_halos_that_fit_no_slot_of_words_are_left_to_others(across, most):
    def reason(face):
        parts = Stencil(2 * face, across * face, face, across=across, world_size=2 * across)
        return variants("stencil")["persistent"].unsupported_reason(parts, None)

    assert reason(most) is None
    assert "larger than a slot" in reason(most + 1)


def test_a_step_is_the_mean_of_neighbours_and_edges_stay():
    u = torch.arange(12.0).view(3, 4) ** 2
    after = relaxed(u)
    assert after[1, 1] == (u[0, 1] + u[2, 1] + u[1, 0] + u[1, 2]) / 4
    assert torch.equal(after[0], u[0])
    assert torch.equal(after[:, -1], u[:, -1])


def test_the_reference_of_norms_is_of_the_whole_domain():
    problem = Stencil(6, 5, steps=2, norm_every=1, world_size=2)
    first, second = (reference(problem, rank, 1, HOST) for rank in range(2))
    assert torch.equal(first[-2:], second[-2:])
    whole = torch.cat([make_inputs(problem, rank, 1, HOST)[0] for rank in range(2)]).double()
    change = relaxed(whole) - whole
    torch.testing.assert_close(first[-2], change.square().sum())


@pytest.mark.parametrize("across", [1, 2, 4])
def test_neighbours_share_sides_the_same_way(across):
    problem = Stencil(12, 8, depth=3, across=across, world_size=4)
    sides = {rank: shared_sides(problem, rank) for rank in range(4)}
    for rank, shared in sides.items():
        for side in shared:
            back = [other for other in sides[side.rank] if other.rank == rank]
            assert [other.points for other in back] == [side.opposite]


def refused(fabric):
    """Messages of calls whose arguments do not fit together."""
    rt, found = runtime_of(fabric), []
    u = torch.zeros(4, 6)
    for given, options in [
        (u[0], {}),
        (u.double(), {}),
        (u[:, :, None], {}),
        (u, {"across": 0}),
        (u, {"steps": 0}),
        (u, {"norm_every": -1}),
        (u, {"norm_every": 1, "out": torch.empty(4, 6)}),
        (u[:0], {}),
    ]:
        try:
            rt.stencil(given, **{"steps": 1} | options)
        except UsageError as error:
            found.append(error.message)
        else:
            found.append("")
    return found


def test_calls_that_do_not_fit_are_refused_on_each_rank(ranks):
    for found in ranks.run(2, f"{__name__}:refused"):
        assert all(found), found
        assert "float32" in found[1]
        assert "norms" in found[6]


def cut(fabric):
    """The parts of one domain after some steps, and the norms, for two ways to cut it."""
    whole = torch.randn(12, 10, 4, generator=torch.Generator().manual_seed(1))
    rt, found = runtime_of(fabric), []
    for dim, across in ((0, 1), (1, 2)):
        u, norms = rt.stencil(whole.chunk(2, dim)[fabric.rank].contiguous(), 5, 2, across)
        found.append((u.tolist(), norms.tolist()))
    return found


def test_results_have_the_same_bits_however_the_domain_is_cut(ranks):
    found = ranks.run(2, f"{__name__}:cut")
    by_rows, by_columns = zip(*found, strict=True)
    rows, columns = ([torch.tensor(u) for u, _ in way] for way in (by_rows, by_columns))
    assert torch.equal(torch.cat(rows), torch.cat(columns, 1))
    assert len({tuple(norms) for way in (by_rows, by_columns) for _, norms in way}) == 1


@pytest.mark.parametrize("variant", ["persistent", "pushed"])
def test_tiles_at_sides_may_be_of_several_blocks_and_reach_beyond_the_part(ranks, variant):
    """Of several rows; what is sent of them has programs of its own in pushed steps."""
    plane = {"rows": 32, "columns": 7, "steps": 3}
    volume = {"rows": 9, "columns": 6, "depth": 9, "steps": 3, "across": 2}
    cases = [
        Case(variant, fields, tile | {"BLOCK_0": 4, "BLOCKS": 2}, op="stencil")
        for fields, tile in (
            (plane, {"BLOCK_1": 16, "BLOCK_2": 1}),
            (volume, {"BLOCK_1": 16, "BLOCK_2": 8}),
        )
    ]
    assert complaints(ranks, 2, cases) == []
