"""A pass of torch.compile: a matmul and the collective beside it become one operation.

The pass runs on Inductor's graphs after autograd, forward and backward. It serves the groups that
were enabled, whoever wrote the collectives: DTensor, or the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from taxfree.models import report, rows

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


def enable(group_name: str) -> None:
    """Let code that is compiled from now on run the operations on a group."""
    _PASS.groups.add(group_name)
    installed: Any = config.post_grad_custom_post_pass
    if installed is None:
        config.post_grad_custom_post_pass = _PASS
    elif installed is not _PASS:
        others = installed if isinstance(installed, (list, tuple)) else [installed]
        config.post_grad_custom_post_pass = [
            *(each for each in others if each is not _PASS), _PASS
        ]  # fmt: skip


class _FusionPass(CustomGraphPass):
    """Rewrites all collectives of the enabled groups that stand beside a matmul.

    Args:
        groups: names of process groups.
    """

    def __init__(self) -> None:
        self.groups: set[str] = set()

    def __call__(self, graph: Graph) -> None:
        for wait in list(graph.nodes):
            if wait.target is not _c10d.wait_tensor.default:
                continue
            collective = wait.args[0]
            fuse = _FUSIONS.get(collective.target)
            if fuse is None or collective.args[-1] not in self.groups:
                continue
            name = f"compiled {collective.target.__name__.partition('.')[0]}"
            report.count(name, fuse(graph, wait, collective))
        graph.lint()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, str(Path(rows.__file__))), repr(sorted(self.groups)))


_PASS = _FusionPass()


def _fuse_all_reduce(graph: Graph, wait: Node, collective: Node) -> str:
    """mm + all-reduce, with the bias and the residual that are added behind."""
    summed, op, group = collective.args
    matmul, reason = _producer(summed, op)
    if matmul is None:
        return reason
    x, weight = matmul.args
    last, bias, residual = _added_behind(wait)
    with graph.inserting_before(last):
        if residual is not None:
            residual = _reshaped(graph, residual, _value(matmul).shape)
        fused = _call(
            graph, torch.ops.taxfree.matmul_all_reduce.default, x, weight, bias, residual, group
        )
        result = _reshaped(graph, fused, _value(last).shape)
    _replace(last, result)
    return "matmul_all_reduce"


def _fuse_reduce_scatter(graph: Graph, wait: Node, collective: Node) -> str:
    """mm + reduce-scatter of rows."""
    summed, op, _, group = collective.args
    matmul, reason = _producer(summed, op)
    if matmul is None:
        return reason
    x, weight = matmul.args
    with graph.inserting_before(wait):
        fused = _call(graph, torch.ops.taxfree.matmul_reduce_scatter.default, x, weight, 0, group)
        result = _reshaped(graph, fused, _value(wait).shape)
    _replace(wait, result)
    return "matmul_reduce_scatter"


def _fuse_all_gather(graph: Graph, wait: Node, collective: Node) -> str:
    """All-gather of rows + mm or addmm, if nothing else uses the gathered rows."""
    shard, _, group = collective.args
    gathered = wait
    while len(gathered.users) == 1:
        (user,) = gathered.users
        if user.target not in _VIEWS or _value(user).shape[-1] != _value(wait).shape[-1]:
            break
        gathered = user
    if len(gathered.users) != 1:
        return f"library: {len(gathered.users)} users of the gathered rows"
    (matmul,) = gathered.users
    if matmul.target is _aten.mm.default:
        bias, (a, weight) = None, matmul.args
    elif matmul.target is _aten.addmm.default and not matmul.kwargs:
        bias, a, weight = matmul.args
    else:
        return f"library: {_name(matmul)} follows"
    if a is not gathered or (bias is not None and _value(bias).dim() != 1):
        return "library: the gathered rows are not on the left of the matmul"
    reason = rows.unserved(_value(a), _value(weight))
    if reason is not None:
        return f"library: {reason}"
    with graph.inserting_before(matmul):
        flat = _reshaped(graph, shard, (_value(shard).numel() // _value(a).shape[1], -1))
        fused = _call(
            graph, torch.ops.taxfree.all_gather_matmul.default, flat, weight, bias, 0, None, group
        )
    _replace(matmul, fused)
    return "all_gather_matmul"


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
    reason = rows.unserved(*(_value(each) for each in node.args))
    return (node, "") if reason is None else (None, f"library: {reason}")


def _added_behind(wait: Node) -> tuple[Node, Any, Any]:
    """The last node of a sum with a bias and a residual, in either order, and both if there."""
    last, bias, residual = wait, None, None
    for node in _only_users(wait):
        if node.target in _VIEWS and _value(node).shape[-1] == _value(wait).shape[-1]:
            last = node
            continue
        if node.target is not _aten.add.Tensor or node.kwargs:
            break
        (other,) = [each for each in node.args if each is not last] or [None]
        if not isinstance(other, Node) or _value(other).dtype != _value(wait).dtype:
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


def _value(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    """A new node, with the value that the op's fake makes."""
    node = graph.call_function(target, arguments)
    values = [each.meta["val"] if isinstance(each, Node) else each for each in arguments]
    tensor = next(each for each in values if isinstance(each, torch.Tensor))
    with tensor.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*values)
    return node


def _reshaped(graph: Graph, node: Any, shape: Any) -> Node:
    """The node itself, or its values in another shape."""
    if tuple(_value(node).shape) == tuple(shape):
        assert isinstance(node, Node)
        return node
    return _call(graph, _aten.reshape.default, node, list(shape))


def _replace(old: Node, new: Node) -> None:
    """Let users of a node use another; what nobody uses any more goes."""
    old.replace_all_uses_with(new)
    unused = [old]
    while unused:
        node = unused.pop()
        if node.op == "call_function" and not node.users:
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            unused += inputs
