"""Several turns on one cache: a turn feeds its new words only, the packed keys and values of the rest stay.

python examples/chat.py "My cat is called Pixel." "What could Pixel eat?"
"""

import sys
import warnings

import torch
import transformers
from real_models import load
from transformers import TextStreamer

from torch_kvq import IsoQuantCache

TURNS = ["Tell me about the sea in two sentences.", "And about the mountains?", "Which of the two is older?"]


def main(turns: list[str]) -> None:
    warnings.filterwarnings("ignore", ".*past_key_values.*", FutureWarning)  # renamed `cache` in newer transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load("smollm2-135m")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    cache = IsoQuantCache(window_len=32)  # short, so that even this chat has something to pack
    ids = torch.empty(1, 0, dtype=torch.long)
    for turn in turns:
        print(f"\n> {turn}")
        words = f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.cat([ids, tokenizer(words, return_tensors="pt").input_ids], 1)
        # generate() takes the whole conversation and skips what the cache already holds.
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=100,
            do_sample=False,
            streamer=streamer,
        )
        print(f"  [{cache.get_seq_length()} tokens in {cache.nbytes:,} bytes]")
    print(f"\n{cache.report()}\n\n{cache.stats}")


if __name__ == "__main__":
    main(sys.argv[1:] or TURNS)
