"""vLLM under tensor parallelism, on taxfree.

pip install --no-deps ./integrations/vllm     # the plugin, beside vLLM and taxfree
TAXFREE_VLLM=1 python examples/vllm_generate.py MODEL 2
"""

import os
import sys

import taxfree_vllm
from vllm import LLM, SamplingParams

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # workers run `report` by it

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    llm = LLM(
        sys.argv[1],
        tensor_parallel_size=int(sys.argv[2]),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    prompts = [{"prompt_token_ids": list(range(5, 13))}, {"prompt_token_ids": list(range(30, 45))}]
    greedy = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    for request in llm.generate(prompts, greedy):
        print("tokens", *request.outputs[0].token_ids)
    print(llm.collective_rpc(taxfree_vllm.report)[0])
