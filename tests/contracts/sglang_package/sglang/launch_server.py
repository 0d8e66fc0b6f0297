"""Takes the documented options and no others, reads the model's config from its folder, and serves random
weights."""

import argparse
import signal
import sys

from tests.contracts.sglang_like import SglangLike
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from braid.models.causal_lm import CausalLM

VALUES = {
    str: ("model-path", "tokenizer-path", "dtype", "load-format", "host", "attention-backend"),
    int: (
        "context-length", "max-running-requests", "max-prefill-tokens", "chunked-prefill-size", "tp-size", "pp-size",
        "decode-log-interval", "random-seed", "cuda-graph-max-bs", "torch-compile-max-bs", "port",
    ),
    float: ("mem-fraction-static",),
}  # fmt: skip
FLAGS = (
    "enable-deterministic-inference",
    "trust-remote-code",
    "disable-cuda-graph",
    "disable-radix-cache",
    "enable-torch-compile",
    "enable-memory-saver",
    "enable-weights-cpu-backup",
)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for kind, names in VALUES.items():
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model_path, max_position_embeddings=args.context_length)
    model = AutoModelForCausalLM.from_config(config)
    decode = AutoTokenizer.from_pretrained(args.tokenizer_path).decode
    with SglangLike(CausalLM(model), decode, port=args.port, max_running=args.max_running_requests):
        sys.stderr.write("The server is fired up and ready to roll!\n")
        signal.pause()


if __name__ == "__main__":
    main()
