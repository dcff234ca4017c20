"""Run a language model that does not fit into memory, straight from its checkpoint.

The checkpoint is sharded safetensors, as transformers writes it: nothing is converted, and no second copy is made. The
program makes one with random weights, computes what the model says while all of it is in memory, and then allows
itself less memory than the weights take (RLIMIT_DATA) and computes the same again, from the checkpoint.

    python examples/big_model_inference.py
    python examples/big_model_inference.py --layers 40 --width 2048    # 8 GiB

On a machine with a GPU, weights go straight to it: ``--device cuda``.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # what the first forward pass of Accelerate's hooks imports; not to be counted as memory
from accelerate import cpu_offload, init_empty_weights
from transformers import LlamaConfig, LlamaForCausalLM

from fastensor_accelerate import CheckpointMapping


def configuration(layers: int, width: int) -> LlamaConfig:
    heads = width // 64
    return LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=1000,
    )  # fmt: skip


def write_checkpoint(config: LlamaConfig, folder: Path) -> None:
    """As anybody would: Fastensor has no part in it."""
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


@torch.no_grad()
def greedy(model: LlamaForCausalLM, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Go on with the likeliest token, several times. Each takes a forward pass."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(dim=-1)], dim=1)
    return tokens


def limit_memory(nbytes: int) -> None:
    """Allow this process so much more memory than it has now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, used + nbytes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--tokens", type=int, default=4, help="how many to generate")
    parser.add_argument("--memory", type=float, default=0.5, help="of the size of the weights")
    parser.add_argument("--read-ahead", type=int, default=64, metavar="MIB", help="how much is read ahead")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    config = configuration(options.layers, options.width)
    prompt = torch.arange(8).reshape(1, -1).to(options.device)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        write_checkpoint(config, Path(folder))
        expected = greedy(LlamaForCausalLM.from_pretrained(folder).eval().to(options.device), prompt, options.tokens)

        with init_empty_weights():
            model = LlamaForCausalLM(config).eval()
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        if options.device.type == "cpu":
            limit_memory(int(options.memory * nbytes))
        # transformers writes no checksums, so there is nothing to verify. Fastensor's own files have them.
        with CheckpointMapping(
            folder, model, device=options.device, read_ahead_bytes=options.read_ahead << 20, verify=False
        ) as weights:
            cpu_offload(model, options.device, state_dict=weights)
            started = time.perf_counter()
            found = greedy(model, prompt, options.tokens)
            seconds = (time.perf_counter() - started) / options.tokens
    if not torch.equal(found, expected):
        raise SystemExit(f"expected the tokens {expected.tolist()}, found {found.tolist()}")
    print(
        f"{nbytes / 2**20:.0f} MiB of weights, {options.memory:.0%} of that for data: the same tokens as in memory, "
        f"{seconds:.2f} s for each."
    )


if __name__ == "__main__":
    main()
