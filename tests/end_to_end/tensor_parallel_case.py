"""Run in a process of its own: tokens of the demo model over as many CPU devices as the first argument says."""

import json
import sys

from precast import LLM, SamplingParams
from precast.server import demo, environment

tensor, plan_dir, prompts = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
llm = LLM(
    str(demo.fetch(environment.cache_dir())),
    dtype="float32",
    mesh=f"tensor={tensor}",
    plan_dir=plan_dir,
    progress=False,
    slots=2,
    max_model_len=128,
    token_budget=34,
    kv_cache_memory=64 << 20,
)
greedy = [SamplingParams(temperature=0, max_tokens=24)] * len(prompts)
options = [
    {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.5, "top_p": 0.97, "presence_penalty": 0.5},
    {"min_p": 0.02, "logit_bias": {30: 2.0, 49151: -5.0}, "min_tokens": 8},
    {"top_k": 500, "frequency_penalty": 0.3},
]
seeded = [SamplingParams(seed=7 + i, max_tokens=16, logprobs=3, **one) for i, one in enumerate(options)]
results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
results += llm.generate([{"prompt_token_ids": ids} for ids in prompts[: len(seeded)]], seeded)
llm._engine.check_integrity()
assert llm._engine.stats().compiles_after_ready == 0
print(json.dumps([result.outputs[0].token_ids for result in results]))
