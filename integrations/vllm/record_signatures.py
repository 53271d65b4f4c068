"""Records what the plugin uses of vLLM: signatures, fields and attributes, read from its sources.

    python integrations/vllm/record_signatures.py FOLDER > integrations/vllm/signatures.json

FOLDER holds the package ``vllm``, of a checkout or of an installation. Nothing of it is imported.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

#: module -> functions and methods that the plugin calls, overrides, or is called by
FUNCTIONS = {
    "vllm.config.vllm": ["get_current_vllm_config"],
    "vllm.compilation.passes.inductor_pass": [
        "InductorPass.uuid", "InductorPass.hash_dict", "InductorPass.is_applicable_for_range",
    ],
    "vllm.compilation.passes.pass_manager": ["PostGradPassManager.add"],
    "vllm.distributed.parallel_state": ["GroupCoordinator.all_reduce", "get_tp_group"],
    "vllm.ir.ops.layernorm": ["fused_add_rms_norm"],
    "vllm.logger": ["init_logger"],
    "vllm.model_executor.custom_op": ["PluggableLayer.register_oot"],
    "vllm.model_executor.layers.linear": [
        "RowParallelLinear.__init__", "RowParallelLinear.forward", "UnquantizedLinearMethod.apply",
    ],
    "vllm.plugins": ["load_general_plugins"],
}  # fmt: skip
#: module -> class -> what the plugin reads of it
ATTRIBUTES = {
    "vllm.config.compilation": {
        "CompilationConfig": ["inductor_compile_config", "mode"],
        "CompilationMode": ["NONE", "VLLM_COMPILE"],
    },
    "vllm.config.parallel": {"ParallelConfig": ["prefill_context_parallel_size", "use_ubatching"]},
    "vllm.config.scheduler": {"SchedulerConfig": ["max_num_batched_tokens"]},
    "vllm.config.vllm": {
        "VllmConfig": ["compilation_config", "parallel_config", "scheduler_config"]
    },
    "vllm.distributed.parallel_state": {
        "GroupCoordinator": ["device_group", "rank_in_group", "unique_name"]
    },
    "vllm.model_executor.layers.linear": {
        "LinearBase": ["params_dtype", "quant_method", "return_bias", "skip_bias_add"],
        "RowParallelLinear": [
            "bias",
            "input_is_parallel",
            "input_size_per_partition",
            "output_size_per_partition",
            "reduce_results",
            "tp_size",
        ],
    },
    "vllm.platforms.interface": {"Platform": ["pass_key"]},
}
#: module -> names that the plugin imports from it
IMPORTS = {
    "vllm.config": ["CompilationMode", "VllmConfig", "get_current_vllm_config"],
    "vllm.envs": ["VLLM_BATCH_INVARIANT"],
    "vllm.ir": ["ops"],
    "vllm.ir.ops": ["fused_add_rms_norm"],
    "vllm.platforms": ["current_platform"],
}
#: module -> constants
CONSTANTS = {"vllm.plugins": ["DEFAULT_PLUGINS_GROUP"]}


def parsed(folder: Path, module: str) -> ast.Module:
    """The tree of a module."""
    path = folder / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def found(tree: ast.Module | ast.ClassDef, name: str) -> Any:
    """A class or function of a module or class, by its dotted name."""
    first, _, rest = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == first:
            return found(node, rest) if rest and isinstance(node, ast.ClassDef) else node
    raise SystemExit(f"error: no {name}; the plugin must be changed")


def signature(function: ast.FunctionDef) -> str:
    """The parameters with their defaults, without types."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for star in (arguments.vararg, arguments.kwarg):
        if star is not None:
            star.annotation = None
    return f"({ast.unparse(arguments)})"


def attributes(node: ast.ClassDef) -> set[str]:
    """The fields, properties and attributes of a class that its own code defines."""
    names: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Call(
                func=ast.Attribute(attr="register_parameter"), args=[ast.Constant(value=name), *_]
            ):
                names.add(str(name))
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.FunctionDef(name=name, decorator_list=[ast.Name(id="property"), *_]):
                names.add(name)
    return names


def bound(tree: ast.Module) -> set[str]:
    """The names that a module imports or declares."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=imported):
                names.update(alias.asname or alias.name for alias in imported)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def present(wanted: list[str], there: set[str], where: str) -> list[str]:
    """The wanted names, all of which must be there."""
    missing = sorted(set(wanted) - there)
    if missing:
        raise SystemExit(f"error: {where} has no {', '.join(missing)}; the plugin must be changed")
    return wanted


def constant(tree: ast.Module, name: str) -> Any:
    """The value of a constant of a module."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return ast.literal_eval(value)
    raise SystemExit(f"error: no {name}")


def version(folder: Path) -> tuple[str, str]:
    """The version and the commit, of an installation or of a checkout."""
    file = folder / "vllm" / "_version.py"
    if file.exists():
        names: dict[str, Any] = {}
        exec(file.read_text(encoding="utf-8"), names)
        return names["__version__"], str(names.get("__commit_id__"))
    git = ["git", "-C", str(folder)]
    described = [["describe", "--tags"], ["rev-parse", "HEAD"]]
    first, second = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
        for command in described
    )
    return first, second


def recorded(folder: Path) -> dict[str, Any]:
    """Everything, as JSON."""
    release, commit = version(folder)
    return {
        "source": "written by integrations/vllm/record_signatures.py",
        "version": release,
        "commit": commit,
        "functions": {
            f"{module}:{name}": signature(found(parsed(folder, module), name))
            for module, names in FUNCTIONS.items()
            for name in names
        },
        "attributes": {
            f"{module}:{name}": present(
                wanted, attributes(found(parsed(folder, module), name)), f"{module}:{name}"
            )
            for module, classes in ATTRIBUTES.items()
            for name, wanted in classes.items()
        },
        "imports": {
            module: present(names, bound(parsed(folder, module)), module)
            for module, names in IMPORTS.items()
        },
        "constants": {
            f"{module}:{name}": constant(parsed(folder, module), name)
            for module, names in CONSTANTS.items()
            for name in names
        },
    }


if __name__ == "__main__":
    print(json.dumps(recorded(Path(sys.argv[1])), indent=1))
