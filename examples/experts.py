"""Three axes on one model: bits of the weights, a packed KV cache, experts that are not all resident.

python examples/experts.py --total 900MB --context 4096 --bits 4

The model is SmolLM2 re-packed as a Mixtral, every expert a copy of the original MLP behind a random router: its routing is
real, its text that of SmolLM2. It is saved once and then loaded without its experts.
"""

import argparse
import pathlib
import sys
import tempfile
import warnings

import torch
import transformers
from real_models import load
from real_texts import texts

from torch_kvq import IsoQuantCache, fit, load_with_expert_offload, plan_bits
from torch_kvq.experts import Gate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
from repackaged import as_mixtral

PROMPT_LEN = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", default="500MB", help="memory for everything")
    parser.add_argument("--context", type=int, default=4096, help="tokens to make room for")
    parser.add_argument("--bits", type=int, default=4, choices=[2, 3, 4, 8], help="of routed experts, which the gate may raise")
    parser.add_argument("--max-delta-nll", type=float, default=0.05, help="what the gate allows, nats a token")
    parser.add_argument("--max-error", type=float, default=0.3, help="what the gate allows, of a layer's output")
    parser.add_argument("--new-tokens", type=int, default=40)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*past_key_values.*", FutureWarning)  # renamed `cache` in newer transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    dense, tokenizer = load("smollm2-135m", dtype=torch.bfloat16)
    ids = tokenizer(texts()["reference"], return_tensors="pt").input_ids[:, : 2 * PROMPT_LEN]
    with tempfile.TemporaryDirectory() as folder:
        as_mixtral(dense).save_pretrained(folder)
        del dense
        config = transformers.AutoConfig.from_pretrained(folder)
        plan = fit(config, args.total, args.context, bits={"routed": args.bits}, reserve="50MB")
        if not plan.fits:
            raise SystemExit("--total is too small for this model")

        model = load_with_expert_offload(folder, plan.budget, dtype=torch.bfloat16)
        print("\nexact experts, read from the checkpoint as they are routed to")
        prompt = ids[:, :PROMPT_LEN]
        exact = generate(model, prompt, args.new_tokens)
        print(tokenizer.decode(exact), summary(model), sep="\n")

        print(f"\nexperts at {args.bits} bits, if the gate lets them")
        bits = plan_bits(model, [ids[:, PROMPT_LEN:]], base={"routed": args.bits})
        gate = Gate(max_error=args.max_error, max_delta_nll=args.max_delta_nll)
        bits.apply(plan.budget, gate=gate, roles=("routed",))  # dense layers too, where torchao is installed
        packed = generate(model, prompt, args.new_tokens)
        print(tokenizer.decode(packed), summary(model), sep="\n")


def generate(model, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """New token ids, with keys and values packed, too."""
    cache = IsoQuantCache()
    model.expert_offload.reset_stats()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=new_tokens, do_sample=False
    )
    print(f"cache: {cache.nbytes:,} bytes for {cache.get_seq_length()} tokens")
    return out[0, prompt.shape[1] :]


def summary(model) -> str:
    """First line of the handle's report, the names of its columns and the last line; it has one line a layer."""
    lines = str(model.expert_offload.report()).splitlines()
    return "\n".join([lines[0], next(line for line in lines if "hit rate" in line), lines[-1]])


if __name__ == "__main__":
    main()
