"""A model of Transformers under tensor parallelism, on taxfree.

torchrun --nproc-per-node 2 examples/generate.py MODEL     # without GPUs: TRITON_INTERPRET=1
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import taxfree.hf

if len(sys.argv) != 2:
    sys.exit(__doc__)

taxfree.hf.enable()
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto")
)
prompt = torch.tensor([[1, 2, 3, 4]], device=model.device)
tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
if dist.get_rank() == 0:
    print(tokens[0].tolist())
    print(taxfree.report())
dist.destroy_process_group()
