"""A model of Transformers generates by taxfree.decode_step, and as it does alone.

torchrun --nproc-per-node 2 examples/decode.py MODEL     # without GPUs: TRITON_INTERPRET=1
python examples/decode.py MODEL                          # on one GPU, or none
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import taxfree

if len(sys.argv) != 2:
    sys.exit(__doc__)

NEW_TOKENS = 16

options: dict[str, Any] = {}
if "WORLD_SIZE" in os.environ:
    options["distributed_config"] = DistributedConfig(tp_plan="auto")
elif torch.cuda.is_available():
    options["device_map"] = "cuda"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, **options)
if not dist.is_initialized():  # the kernel wants a group, also of one rank
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
prompt = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], device=model.device)
batch, length = prompt.shape


def advance() -> None:
    """One token more of each sequence."""
    tokens.copy_(step(tokens, positions))
    positions.add_(1)


with torch.no_grad():
    logits, cache = model(prompt, return_dict=False)[:2]
    tokens = logits[:, -1].argmax(-1)
    chosen = [tokens.clone()]
    step = taxfree.decode_step(model, batch, capacity=length + NEW_TOKENS)
    positions = torch.full_like(tokens, step.take(cache), dtype=torch.int32)
    run = advance
    for _ in range(NEW_TOKENS - 1):
        run()
        chosen.append(tokens.clone())
        if run is advance and torch.cuda.is_available():  # the first call planned and compiled
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                advance()
            run = graph.replay
    ours = torch.stack(chosen, dim=1)
    everything = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    theirs = everything[:, length:]
    scores = model(everything).logits.float()[:, length - 1 : -1]

if dist.get_rank() == 0:
    for i in range(batch):
        print(f"step      {ours[i].tolist()}\ngenerate  {theirs[i].tolist()}")
        for first in (ours[i] != theirs[i]).nonzero()[:1, 0].tolist():
            logits = scores[i, first]
            gap = (logits[theirs[i, first]] - logits[ours[i, first]]) / logits.std()
            print(f"token {first} differs: the two logits are {gap:.4f} standard deviations apart")
    print(taxfree.report())
dist.destroy_process_group()
