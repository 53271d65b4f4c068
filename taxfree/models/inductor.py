"""A pass of torch.compile: a matmul and the collective beside it become one operation.

The pass runs on Inductor's graphs after autograd, forward and backward. It serves the groups that
were enabled, whoever wrote the collectives: DTensor, or the model itself. The matmul + all-reduce
of a layer that was enabled may take along what follows it, which is the same on all ranks. Of what
follows other collectives nothing says so: it may be a rank's own.

The tuning table decides, for sizes that are known: the operation with all that follows, with bias
and residual, or alone is called where a variant of ours serves it. Where the library is to run, its
nodes stay as they are, and what a layer called becomes them: Inductor fuses what stands beside
them, and a call costs nothing more. Sizes that are not known are decided at each call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

import taxfree._runtime.ops  # noqa: F401  registers the operations
from taxfree._runtime.collectives import all_find_differing
from taxfree._runtime.runtime import Runtime, most_saved, runtime_of, table_digest
from taxfree.errors import NoRecord, UsageError
from taxfree.models import norms, report, rows

_aten, _c10d, _ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.taxfree
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_runtimes: dict[str, Runtime] = {}  # that were enabled, by their groups' names
_NOT_FASTER = "library: no variant of ours is faster"
_WEIGHT_VIEWS = (*_VIEWS, _aten.permute.default, _aten.t.default, _aten.transpose.int)


def enable(runtime: Runtime) -> None:
    """Let code that is compiled until a runtime is closed run the operations on its group."""
    _runtimes[runtime.group_name] = runtime
    install()


def _groups() -> set[str]:
    """The groups whose enabled runtimes are not closed; another may have such a name by now."""
    return {name for name, runtime in _runtimes.items() if not runtime.is_closed}


def install() -> None:
    """Let Inductor run the pass, behind those of others."""
    installed: Any = config.post_grad_custom_post_pass
    if installed is None:
        config.post_grad_custom_post_pass = _PASS
    elif installed is not _PASS:
        others = installed if isinstance(installed, (list, tuple)) else [installed]
        config.post_grad_custom_post_pass = [
            *(each for each in others if each is not _PASS), _PASS
        ]  # fmt: skip


class _FusionPass(CustomGraphPass):
    """Rewrites all collectives of the enabled groups that stand beside a matmul."""

    def __call__(self, graph: Graph) -> None:
        groups = _groups()
        found = [
            (wait, wait.args[0])
            for wait in graph.nodes
            if wait.target is _c10d.wait_tensor.default
            and wait.args[0].target in _FUSIONS
            and wait.args[0].args[-1] in groups
        ]
        uneven = {group for group in groups if _is_uneven(group, found)}
        for wait, collective in found:
            name = f"compiled {_name(collective)}"
            if collective.args[-1] in uneven:
                report.count_compiled(name, "library: the sizes of matmuls differ between ranks")
            else:
                report.count_compiled(name, _FUSIONS[collective.target](graph, wait, collective))
        for node in list(graph.nodes):
            if node.target is _ops.layer_matmul_all_reduce.default and node.args[-1] in groups:
                _decide_layer(graph, node)
        ours = [each for each in graph.nodes if getattr(each.target, "namespace", "") == "taxfree"]
        for node in ours:
            node.target = getattr(node.target.overloadpacket, "compiled", node.target)
        _keep_order(graph, ours)
        graph.lint()

    def uuid(self) -> Any:
        """The key of Inductor's cache: a graph from it must be what the table of now decides."""
        folder = Path(__file__).parent
        names = "inductor.py", "norms.py", "rows.py", "../_runtime/dispatch.py"
        files = (*names, "../_runtime/library.json")
        tables = [(name, table_digest(name)) for name in sorted(_groups())]
        return get_hash_for_files(tuple(str(folder / name) for name in files), repr(tables))


_PASS = _FusionPass()


def _is_uneven(group: str, found: Sequence[tuple[Node, Node]]) -> bool:
    """Whether matmuls beside a group's collectives have other sizes on other ranks.

    Ranks that compile such a graph wait for each other. One that has its code from a cache does not
    come: what that calls is compared when it is planned.
    """
    sizes: list[Any] = []
    beside: list[Node | None]
    for wait, collective in found:
        if collective.args[-1] != group:
            continue
        if collective.target is _c10d.all_gather_into_tensor.default:
            beside = [each.node for each in _consumers(_joined(wait)[0])[0]]
        else:
            beside = [_producer(cast("Any", collective.args[0]), "sum")[0]]
            if collective.target is _c10d.reduce_scatter_tensor.default:
                beside = [_producer(_uncut(cast("Any", collective.args[0]))[0], "sum")[0]]
        matmuls: list[Node] = [node for node in beside if node is not None]
        sizes += [
            [tuple(map(str, _value(each).shape)) for each in node.all_input_nodes]
            for node in matmuls
        ]
    fabric = _runtimes[group]._fabric
    # less than the others wait in their kernels, if they have their code already
    return bool(sizes) and all_find_differing(fabric.group, repr(sizes), fabric.pool.timeout_s / 3)


def _keep_order(graph: Graph, ours: list[Node]) -> None:
    """Let each operation follow the one before it, as ranks may schedule the rest differently."""
    behind = {each: OrderedSet([before]) for before, each in itertools.pairwise(ours)}
    preserve_node_ordering(graph, behind)


def _fuse_all_reduce(graph: Graph, wait: Node, collective: Node) -> str:
    """mm + all-reduce."""
    summed, op, group = cast("Any", collective.args)
    matmul, reason = _producer(summed, op)
    if matmul is None:
        return reason
    arguments = (*matmul.args, None, None, group)
    if _library_runs(_ops.matmul_all_reduce.default, arguments):
        return _NOT_FASTER
    with graph.inserting_before(wait):
        total = _call(graph, _ops.matmul_all_reduce.default, *arguments)
        result = _reshaped(graph, total, _value(wait).shape)
    _replace(wait, result)
    return "matmul_all_reduce"


def _fuse_reduce_scatter(graph: Graph, wait: Node, collective: Node) -> str:
    """mm + reduce-scatter of rows.

    Those of another dimension than the first come first in the matmul. The copy of its input takes
    the place of one of its result. It keeps the input's dimensions, not a matrix's two, so that
    Inductor writes it where the input is computed.
    """
    summed, op, world_size, group = cast("Any", collective.args)
    whole, dim = _uncut(summed)
    matmul, reason = _producer(whole, op)
    if matmul is None:
        return reason
    x, weight = cast("list[Node]", matmul.args)
    extra = 2 * (_bytes(x) - _bytes(whole) + _bytes(wait)) if dim else 0
    if _library_runs(_ops.matmul_reduce_scatter.default, (x, weight, 0, group), max(0, extra)):
        return _NOT_FASTER
    *sizes, _ = _value(whole).shape
    order = [dim, *(other for other in range(len(sizes) + 1) if other != dim)]
    back = [order.index(index) for index in range(len(order))]
    with graph.inserting_before(wait):
        if dim:
            x = _reshaped(graph, x, (*sizes, _value(x).shape[-1]))
            x = _call(graph, _aten.permute.default, x, order)
            x = _flat(graph, _call(graph, _aten.clone.default, x))
        shard = _call(graph, _ops.matmul_reduce_scatter.default, x, weight, 0, group)
        if dim:
            sizes[dim] //= world_size
            moved = [*(sizes[index] for index in order[:-1]), _value(shard).shape[-1]]
            shard = _reshaped(graph, shard, moved)
            shard = _call(graph, _aten.permute.default, shard, back)
        result = _reshaped(graph, shard, _value(wait).shape)
    _replace(wait, result)
    return "matmul_reduce_scatter"


def _fuse_all_gather(graph: Graph, wait: Node, collective: Node) -> str:
    """All-gather of rows + each mm and addmm of them; whatever else uses the rows has them, too.

    Rows of another dimension than the first are moved in the results: what follows reads them so.
    """
    shard, world_size, group = cast("Any", collective.args)
    whole, dim = _joined(wait)
    matmuls, others = _consumers(whole)

    def placed(rows_of_ranks: Node, like: Node) -> Node:
        if dim:
            lead, columns = _value(shard).shape[:-1], _value(rows_of_ranks).shape[-1]
            apart = _reshaped(graph, rows_of_ranks, (world_size, *lead, columns))
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(lead) + 2)]
            rows_of_ranks = _call(graph, _aten.permute.default, apart, order)
        return _reshaped(graph, rows_of_ranks, _value(like).shape)

    if len(matmuls) == 1 and not others:
        (only,) = matmuls
        operation, called = _ops.all_gather_matmul.default, (only.weight, only.bias, 0, None, group)
        if _library_runs(operation, (shard, *called)):
            return _NOT_FASTER
        with graph.inserting_before(only.node):
            fused = _call(graph, operation, _flat(graph, shard), *called)
            result = placed(fused, only.node)
        _replace(only.node, result)
        return "all_gather_matmul"
    for each in list(matmuls):  # what is called at the gather needs its weights there
        if not all(_moved_before(wait, one) for one in (each.weight, each.bias) if one):
            matmuls.remove(each)
            others.append("a weight is computed behind the gather")
    if not matmuls:
        return f"library: {', '.join(sorted(set(others)))}"
    weights, biases = [each.weight for each in matmuls], [each.bias for each in matmuls]
    copied = 2 * _bytes(wait) if others else 0  # rows that are given back
    joint = shard, weights, biases, True, group
    if _library_runs(_ops.all_gather_matmuls.default, joint, copied):
        return _NOT_FASTER
    with graph.inserting_before(wait):
        flat = _flat(graph, shard)
        fused = _call(
            graph, _ops.all_gather_matmuls.default, flat, weights, biases, bool(others), group
        )
        parts = [_call(graph, operator.getitem, fused, at) for at in range(len(fused.meta["val"]))]
        results = {
            each: placed(part, each)
            for each, part in zip([*(each.node for each in matmuls), whole], parts, strict=False)
        }
    for old, new in results.items():
        _replace(old, new)
    return f"all_gather_matmul for {rows.described(len(matmuls), bool(others))}"


def _joined(wait: Node) -> tuple[Node, int]:
    """The rows that a gather is for, and the dimension in which ranks' shards stand in them.

    DTensor gathers in the first dimension, then cuts and joins in another one. If all before that
    are of size 1, all values stay in their places, and it is as good as the first.
    """
    split: Any = next(iter(wait.users), None)
    if len(wait.users) != 1 or split.target is not _aten.split.Tensor or split.args[2:] != ():
        return wait, 0
    parts = list(split.users)
    whole: Any = next((user for part in parts for user in part.users), wait)
    is_alone = all(list(part.users) == [whole] for part in parts)
    if not is_alone or whole.target is not _aten.cat.default or list(whole.args[0]) != parts:
        return wait, 0
    shard: Any = wait.args[0].args[0]  # type: ignore[union-attr]
    is_in_order = [part.args[1] for part in parts] == list(range(len(split.meta["val"])))
    if not is_in_order or split.args[1] != _value(shard).shape[0]:
        return wait, 0
    dim = whole.args[1] if len(whole.args) > 1 else 0
    is_first = all(before == 1 for before in _value(shard).shape[:dim])
    return whole, 0 if is_first else dim


class _Matmul(NamedTuple):
    """A matmul of gathered rows: node = rows @ weight (+ bias)."""

    node: Node
    weight: Node
    bias: Node | None


def _consumers(wait: Node) -> tuple[list[_Matmul], list[str]]:
    """The matmuls of gathered rows, in their order, and the reasons why other users are none."""
    matmuls, others, rows_of_a = [], [], [wait]
    for a in rows_of_a:
        for user in a.users:
            if user.target in _VIEWS and _value(user).shape[-1:] == _value(wait).shape[-1:]:
                rows_of_a.append(user)
                continue
            matmul, reason = _matmul_of(a, user)
            if matmul is None:
                others.append(reason)
            else:
                matmuls.append(matmul)
    return sorted(matmuls, key=lambda each: each.node), others


def _matmul_of(a: Node, node: Node) -> tuple[_Matmul | None, str]:
    """The matmul of gathered rows that a node is; or None, and the reason why it is not fused."""
    weight: Any
    bias: Any
    if node.target is _aten.mm.default:
        bias, (left, weight) = None, node.args
    elif node.target is _aten.addmm.default and not node.kwargs:
        bias, left, weight = node.args
    else:
        return None, f"{_name(node)} follows"
    if left is not a or weight is a or (bias is not None and _value(bias).dim() != 1):
        return None, "the gathered rows are not on the left of the matmul"
    reason = rows.unsupported_reason(_value(a), _value(weight))
    return (_Matmul(node, weight, bias), "") if reason is None else (None, reason)


def _moved_before(point: Node, node: Node) -> bool:
    """Move a view of something before a point, if it is behind; whether it is before it now."""
    if node < point:
        return True
    if node.target not in _WEIGHT_VIEWS or not _moved_before(point, node.all_input_nodes[0]):
        return False
    point.prepend(node)
    return True


_FUSIONS: dict[Any, Callable[[Graph, Node, Node], str]] = {
    _c10d.all_gather_into_tensor.default: _fuse_all_gather,
    _c10d.all_reduce.default: _fuse_all_reduce,
    _c10d.reduce_scatter_tensor.default: _fuse_reduce_scatter,
}


def _producer(summed: Any, op: Any) -> tuple[Node | None, str]:
    """The mm whose rows are summed, or None and the reason why it is not fused."""
    if op != "sum":
        return None, f"library: reduces by {op}"
    columns = _value(summed).shape[-1:]
    node = summed
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]
    if node.target is not _aten.mm.default:
        return None, f"library: {_name(node)} precedes"
    if len(node.users) != 1:
        return None, f"library: {len(node.users)} users of the matmul"
    if _value(node).shape[-1:] != columns:
        return None, "library: the rows of the matmul are cut"
    reason = rows.unsupported_reason(*(_value(each) for each in node.args))
    return (node, "") if reason is None else (None, f"library: {reason}")


def _uncut(summed: Node) -> tuple[Node, int]:
    """The sum whose parts a reduce-scatter gets one below the other, and in which dimension.

    DTensor cuts rows of another dimension than the first. If all before it are of size 1, all
    values stay in their places, and the dimension is as good as the first.
    """
    if summed.target is not _aten.cat.default or summed.args[1:] not in ((), (0,)):
        return summed, 0
    parts = cast("list[Node]", summed.args[0])
    cut: Any = parts[0].args[0]
    if getattr(cut, "target", None) is not _aten.split.Tensor:
        return summed, 0
    whole, size, *dims = cut.args
    indices = [(index,) for index in range(len(cut.meta["val"]))]
    is_in_order = list(cut.users) == parts and [part.args[1:] for part in parts] == indices
    is_alone = all(len(node.users) == 1 for node in (whole, summed, *parts))
    if not (is_in_order and is_alone and isinstance(size, int)):
        return summed, 0
    dim = dims[0] if dims else 0
    is_first = all(before == 1 for before in _value(whole).shape[:dim])
    return whole, 0 if is_first else dim


class _Behind(NamedTuple):
    """What a sum may take along.

    Args:
        last: the last node of the sum with bias and residual.
        bias, residual: what is added up to there, or None.
        norm: the RMSNorm behind it, or None.
    """

    last: Node
    bias: Any
    residual: Any
    norm: norms.Norm | None = None

    def called(self, x: Any, weight: Any, group: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operation that computes all of it, and its arguments."""
        given = x, weight, self.bias, self.residual
        if self.norm is None:
            return _ops.matmul_all_reduce.default, (*given, group)
        operation = _ops.matmul_all_reduce_rms_norm.default
        return operation, (*given, self.norm.weight, self.norm.eps, group)


def _all_behind(value: Node, bias: Any, residual: Any) -> list[_Behind]:
    """What a sum may take along: most first, nothing last."""
    nothing = _Behind(value, bias, residual)
    last, bias, residual = _added_behind(value, bias, residual)
    norm = norms.norm_behind(last)
    found = [_Behind(last, bias, residual, norm)] if norm and norm.weight < value else []
    found += [_Behind(last, bias, residual)] if last is not value else []
    return [*found, nothing]


def _fastest(candidates: Sequence[_Behind], x: Any, weight: Any, group: Any) -> _Behind:
    """The one that saves the most time."""
    times = [_asked(Runtime._measured_us, *each.called(x, weight, group)) for each in candidates]
    return candidates[most_saved(times, candidates[0].norm is not None)]


def _decide_layer(graph: Graph, node: Node) -> None:
    """Let a layer's matmul + all-reduce add bias and residual behind it, and normalize the sum.

    It takes along what saves the most time. If a variant of ours serves nothing, the library's
    nodes take its place.
    """
    x, weight, bias, residual, group = cast("Any", node.args)
    candidates = _all_behind(node, bias, residual)
    while candidates and _library_runs(*candidates[0].called(x, weight, group)):
        del candidates[0]
    if not candidates:
        _leave_to_library(graph, node)
        return
    behind = _fastest(candidates, x, weight, group)
    if behind.last is node and behind.norm is None:
        return
    last, norm = behind.last, behind.norm
    with graph.inserting_before(node):
        if behind.residual is not None:
            shaped = _reshaped(graph, behind.residual, _value(node).shape)
            behind = behind._replace(residual=shaped)
        operation, arguments = behind.called(x, weight, group)
        fused = _call(graph, operation, *arguments)
        total = fused if norm is None else _call(graph, _aten.select.int, fused, 0, 1)
        results = {last: _reshaped(graph, total, _value(last).shape)}
        if norm is not None:
            normed = _call(graph, _aten.select.int, fused, 0, 0)
            results[norm.result] = _reshaped(graph, normed, _value(norm.result).shape)
    for old, new in results.items():
        _replace(old, new)
    taken = {"bias": behind.bias, "residual": behind.residual, "RMSNorm": norm}
    names = [name for name, each in taken.items() if each is not None]
    report.count_compiled("compiled matmul_all_reduce", f"with {', '.join(names)}")


# -- where the library runs --


def _library_runs(operation: Any, arguments: Sequence[Any], moved_bytes: int = 0) -> bool:
    """Whether the table has the library run an operation on nodes' values, all sizes known.

    Args:
        moved_bytes: that the operation has to save time for.
    """
    try:
        return bool(_asked(Runtime._runs_library, operation, arguments, moved_bytes=moved_bytes))
    except UsageError:  # no runtime is open any more, or the operation does not take such tensors
        return True
    except NoRecord:  # the call raises it
        return False


def _asked(
    question: Callable[..., Any], operation: Any, arguments: Sequence[Any], **options: Any
) -> Any:
    """What a group's runtime answers about an operation on nodes' values; None for symbols.

    Operations on the rows of a tensor see them as a matrix.
    """
    *values, group = map_arg(tuple(arguments), _matrix_or_row)
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    if any(map(_is_dynamic, tensors)):
        return None
    with tensors[0].fake_mode:  # type: ignore[attr-defined]
        return question(runtime_of(group), _named(operation), *values, **options)


def _is_dynamic(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _bytes(node: Node) -> int:
    """Of a node's value; 0 where sizes are not known, for which nothing is decided here."""
    value = _value(node)
    return 0 if _is_dynamic(value) else value.nbytes


def _matrix_or_row(node: Node) -> torch.Tensor:
    value = _value(node)
    return value if value.dim() <= 2 else value.reshape(-1, value.shape[-1])


def _leave_to_library(graph: Graph, node: Node) -> None:
    """Put the library's nodes in the place of a matmul + all-reduce that a layer called."""
    x, weight, bias, residual, group = node.args
    with graph.inserting_before(node):
        product = _call(graph, _aten.mm.default, x, weight)
        started = _call(graph, _c10d.all_reduce.default, product, "sum", group)
        total = _call(graph, _c10d.wait_tensor.default, started)
        for addend in (bias, residual):
            total = total if addend is None else _call(graph, _aten.add.Tensor, total, addend)
    report.count_compiled(f"compiled {_name(node)}", _NOT_FASTER)
    _replace(node, total)


def _added_behind(value: Node, bias: Any, residual: Any) -> tuple[Node, Any, Any]:
    """The last node of a sum with a bias and a residual, in either order, and both if there.

    Args:
        value: the sum, which what is added must precede.
        bias, residual: those that the sum has already, or None.
    """
    last = value
    for node in _only_users(value):
        if node.target in _VIEWS and _value(node).shape[-1] == _value(value).shape[-1]:
            last = node
            continue
        if node.target is not _aten.add.Tensor or node.kwargs:
            break
        (other,) = [each for each in node.args if each is not last] or [None]
        if not isinstance(other, Node) or not other < value:
            break
        if _value(other).dtype != _value(value).dtype:
            break
        if _value(node).shape != _value(last).shape:  # the sum is broadcast
            break
        if _value(other).shape == _value(node).shape[-1:] and bias is None:
            bias = other
        elif _value(other).shape == _value(node).shape and residual is None:
            residual = other
        else:
            break
        last = node
    return last, bias, residual


def _only_users(node: Node) -> Iterator[Node]:
    """The nodes behind one, as long as each has a single user."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node


def _flat(graph: Graph, node: Any) -> Node:
    """The values of a node as a matrix."""
    columns = _value(node).shape[-1]
    return _reshaped(graph, node, (_value(node).numel() // columns, columns))


def _value(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _name(node: Node) -> str:
    return _named(node.target)


def _named(target: Any) -> str:
    return str(getattr(target, "__name__", target)).partition(".")[0].removeprefix("layer_")


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = _fake(target, arguments)
    return node


def _fake(target: Any, arguments: Sequence[Any]) -> Any:
    """The value that an op has for nodes, without memory."""
    values: Any = map_arg(tuple(arguments), lambda each: each.meta["val"])
    tensor = next(each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    with tensor.fake_mode:  # type: ignore[attr-defined]
        return target(*values)


def _reshaped(graph: Graph, node: Any, shape: Any) -> Node:
    """The node itself, or its values in another shape."""
    if tuple(_value(node).shape) == tuple(shape):
        assert isinstance(node, Node)
        return node
    return _call(graph, _aten.reshape.default, node, list(shape))


def _replace(old: Node, new: Node) -> None:
    """Let the users of a node behind another use that one; what nobody uses any more goes."""
    old.replace_all_uses_with(new, lambda user: new < user)
    unused = {old}
    while unused:
        node = unused.pop()
        if node.op == "call_function" and not node.users:
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            unused.update(inputs)
