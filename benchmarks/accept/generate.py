"""Tokens of a Transformers model under tensor parallelism, by its own layers and on taxfree.

    torchrun --nproc-per-node 2 -m benchmarks.accept.generate --layers 2

Both models have the same random weights. Rank 0 prints one JSON document: for each batch and cache
the median microseconds of a token, their range, whether the tokens are the same, and what the
layers ran. A token that differs is allowed where the library's two best logits are as close as
rounding makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import taxfree.hf

PROMPT, NEW_TOKENS = 64, 32
ROUNDS = 9  # of both models, whose order changes
TIE = 0.05  # standard deviations of the logits: what rounding in bfloat16 moves them by


def _saved(folder: Path, layers: int, hidden: int) -> None:
    """Save a model of Llama's shape with random weights."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers, num_attention_heads=hidden // 128, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).bfloat16()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    model.save_pretrained(folder)


def _loaded(folder: Path) -> Any:
    parallel = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=parallel
    )
    return model.eval()


def _prompts(model: Any, batch: int) -> torch.Tensor:
    return torch.arange(batch * PROMPT, device=model.device).view(batch, PROMPT) * 7 % 31991 + 5


def _generated(model: Any, ids: torch.Tensor, cache: str) -> tuple[torch.Tensor, float]:
    """Tokens, and microseconds of one of them."""
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    _synchronize()
    begin = time.perf_counter()
    tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    _synchronize()
    return tokens[:, PROMPT:], 1e6 * (time.perf_counter() - begin) / NEW_TOKENS


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def _differing(model: Any, ids: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far from a tie the first differing token of any sequence is, in standard deviations."""
    gaps = [torch.zeros((), device=ids.device)]
    for row in (ours != theirs).any(dim=1).nonzero().flatten().tolist():
        token = int((ours[row] != theirs[row]).nonzero()[0])
        with torch.no_grad():
            logits = model(torch.cat((ids[row], theirs[row, :token]))[None]).logits[0, -1].float()
        gaps.append((logits[theirs[row, token]] - logits[ours[row, token]]) / logits.std())
    return float(torch.stack(gaps).max())  # NaN if one is


def main() -> None:
    """Run the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--hidden", type=int, default=4096)
    made.add_argument("--batches", default="1,16")
    made.add_argument("--caches", default="dynamic,static")
    options = made.parse_args()
    warnings.filterwarnings("ignore")
    backend, rank = ("gloo", 0), int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        backend = ("nccl", rank)
        torch.cuda.set_device(rank)
    dist.init_process_group(backend[0])
    folder = Path(tempfile.gettempdir(), f"taxfree-accept-{os.environ['MASTER_PORT']}")
    if dist.get_rank() == 0:
        _saved(folder, options.layers, options.hidden)
    dist.barrier()
    models = {"library": _loaded(folder)}

    taxfree.hf.enable()
    models["taxfree"] = _loaded(folder)
    rows = []
    for cache in options.caches.split(","):
        for batch in map(int, options.batches.split(",")):
            row: dict[str, Any] = {"cache": cache, "batch": batch}
            ids, tokens = _prompts(models["library"], batch), {}
            times: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(1 + ROUNDS):  # the first one compiles
                for name in sorted(models, reverse=turn % 2 > 0):
                    tokens[name], us = _generated(models[name], ids, cache)
                    times[name].append(us)
            for name in models:
                row[f"{name}_us"] = statistics.median(times[name][1:])
                row[f"{name}_range_us"] = [min(times[name][1:]), max(times[name][1:])]
            row["largest_gap"] = _differing(
                models["library"], ids, tokens["taxfree"], tokens["library"]
            )
            row["is_same"] = row["largest_gap"] <= TIE
            rows.append(row)
    if dist.get_rank() == 0:
        report = taxfree.report()
        print(
            json.dumps({"rows": rows, "layers": report.layers, "problems": report.problems}),
            flush=True,
        )
    dist.barrier()
    os._exit(0)  # captured collectives make NCCL's own teardown slow


if __name__ == "__main__":
    main()
