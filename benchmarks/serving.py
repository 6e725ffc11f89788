"""Tokens per second: a compiled torch step, hand-written JAX, and transformers' ``generate``.

The model is examples/train_llama's (4 layers of 512, 8 heads over 4 key heads, vocabulary 8192),
with a cache of 512 places. Both sides start from the same weights, and their greedy tokens must be
CPU torch's. A step takes a token in and gives the next one: model, sampling, and the writing of
cache and token are one program, whose state is updated in place (`serve/`). Sides take turns.

``--generate`` adds transformers', where it is installed, of a Llama of the same sizes with a static
cache: the time of a call less that of one for a prompt and a token.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ["NPROC"] = "64"
sys.path.append(str(Path(__file__).parents[1] / "examples" / "train_llama"))

import jax
import numpy as np
import torch
from history import record
from hlo import collective_traffic
from jax.sharding import PartitionSpec as P
from model import ModelConfig
from serve.jax_decoding import JaxDecoder
from serve.torch_decoding import Decoder, place

import xla_dtensor as xd

CONFIG = ModelConfig(dim=512, layers=4, heads=8, kv_heads=4, max_seq=512, vocab=8192)
PROMPT = 8
CHECKED = 8  # tokens that must be CPU torch's


class TorchSide:
    """The step as a user writes it, compiled."""

    def __init__(self, decoder: Decoder, prompt: torch.Tensor, devices: int) -> None:
        if devices == 1:
            decoder, tokens = decoder.to("xla"), prompt.to("xla")
        else:
            mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("tp",))
            place(decoder, mesh)
            tokens = xd.distribute_tensor(prompt, mesh, [xd.Replicate()])
        self.step = xd.compile(decoder.step)
        self.token = self.step(tokens)

    def value(self) -> np.ndarray:
        return whole(self.token).numpy()

    def run(self, count: int) -> None:
        for _ in range(count):
            self.token = self.step(self.token)
        jax.block_until_ready(self.token.jax_array)

    def program(self) -> Any:
        return self.step.compiled_programs()[-1]


class JaxSide:
    """The step written by hand, a call for each token."""

    def __init__(
        self, weights: dict[str, np.ndarray], prompt: torch.Tensor, devices: int, temperature: float
    ) -> None:
        self.jax = JaxDecoder(weights, CONFIG, len(prompt), temperature, devices)
        tokens = self.jax.put(prompt.numpy().astype(np.int32), P())
        self.state, self.token = self.jax.step(self.jax.params, self.jax.start(), tokens)

    def value(self) -> np.ndarray:
        return np.asarray(self.token)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.state, self.token = self.jax.step(self.jax.params, self.state, self.token)
        jax.block_until_ready(self.token)

    def program(self) -> Any:
        return self.jax.step.lower(self.jax.params, self.state, self.token).compile()


class JaxLoop(JaxSide):
    """All tokens in one call: a loop in the program, which can't stream or stop."""

    def run(self, count: int) -> None:
        self.state, self.token = self.jax.many(self.jax.params, self.state, self.token, count)
        jax.block_until_ready(self.token)


class Generate:
    """transformers' ``generate``, of a call with so many tokens less one of a prompt's alone."""

    def __init__(self, prompt: torch.Tensor, devices: int, temperature: float) -> None:
        import transformers
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        transformers.logging.set_verbosity_error()
        config = transformers.LlamaConfig(
            vocab_size=CONFIG.vocab,
            hidden_size=CONFIG.dim,
            intermediate_size=CONFIG.hidden,
            num_hidden_layers=CONFIG.layers,
            num_attention_heads=CONFIG.heads,
            num_key_value_heads=CONFIG.kv_heads,
            max_position_embeddings=CONFIG.max_seq,
            eos_token_id=None,
        )
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config).eval()
        reference = copy.deepcopy(model) if len(prompt) == 1 else None
        self.model = model.to("xla")
        if devices > 1:
            mesh = xd.init_device_mesh("xla", (devices,), mesh_dim_names=("tp",))
            plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=devices))
            apply_tensor_parallelism(model, mesh, plan)
        self.options: dict[str, Any] = {
            "cache_implementation": "static",
            "max_cache_len": CONFIG.max_seq,
            "do_sample": bool(temperature),
            "temperature": temperature or None,
            "pad_token_id": 0,
        }
        self.prompt = prompt.to("xla")
        found = self.tokens(CHECKED)
        if reference is not None and not temperature:
            wanted = reference.generate(
                prompt, max_new_tokens=CHECKED, do_sample=False, pad_token_id=0
            )
            if not torch.equal(found, wanted):
                raise SystemExit(f"generate: {found} is not CPU torch's {wanted}")

    def tokens(self, count: int) -> torch.Tensor:
        return whole(self.model.generate(self.prompt, max_new_tokens=count, **self.options))

    def run(self, count: int) -> None:
        self.tokens(count + 1)

    def seconds(self, count: int) -> float:
        with_them = seconds(lambda: self.run(count))
        return with_them - seconds(lambda: self.run(0))

    def program(self) -> Any:
        return self.model.xla_generation.decode.compiled_programs()[-1]


def whole(value: torch.Tensor) -> torch.Tensor:
    """On the CPU."""
    if isinstance(value, xd.XLAShardedTensor):
        value = value.full_tensor()
    return value.cpu()


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def sides_of(batch: int, devices: int, temperature: float, generate: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG, batch, temperature).eval()
    weights = {name: p.detach().numpy().copy() for name, p in decoder.model.named_parameters()}
    prompt = torch.randint(CONFIG.vocab, (batch, PROMPT))
    expected = copy.deepcopy(decoder)
    sides: dict[str, Any] = {
        "torch": TorchSide(decoder, prompt, devices),
        "jax": JaxSide(weights, prompt, devices, temperature),
        "jax loop": JaxLoop(weights, prompt, devices, temperature),
    }
    token = expected.step(prompt)
    for _ in range(CHECKED):
        for name, side in sides.items():
            if not temperature and not np.array_equal(side.value(), token.numpy()):
                raise SystemExit(f"{name}: its tokens are not CPU torch's")
            side.run(1)
        token = expected.step(token)
    if generate:
        sides["generate"] = Generate(prompt, devices, temperature)
    return sides


def measure(
    batch: int, devices: int, rounds: int, count: int, temperature: float, generate: bool
) -> dict[str, Any]:
    sides = sides_of(batch, devices, temperature, generate)
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side.run(count)
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            side, begin = sides[name], time.process_time()
            timed = getattr(side, "seconds", lambda n, side=side: seconds(lambda: side.run(n)))
            times[name].append(timed(count) / count)
            cpu[name].append((time.process_time() - begin) / count)
    result: dict[str, Any] = {}
    for name, side in sides.items():
        ratio = lambda kept, name=name: statistics.median(
            a / b for a, b in zip(kept[name], kept["jax"], strict=True)
        )
        result[name] = {
            "token_ms": 1000 * statistics.median(times[name]),
            "tokens_per_second": batch / statistics.median(times[name]),
            "ratio": ratio(times),
        }
        if name != "generate":  # whose CPU time has the prompts' too
            result[name]["ratio_cpu"] = ratio(cpu)
        if name != "jax loop":
            program = side.program()
            result[name]["collective_bytes"] = collective_traffic(program.as_text()).total_bytes
            result[name]["flops"] = program.cost_analysis()["flops"]
            result[name]["temp_bytes"] = program.memory_analysis().temp_size_in_bytes
    return result


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| devices, batch | side | ms a token | tokens a second | of JAX's time | of its CPU time "
        "| collectives, KiB | Mflops | temporaries, MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, sides in rows.items():
        for name, row in sides.items():
            share = f"{row['ratio_cpu']:.2f}" if "ratio_cpu" in row else ""
            of_program = ["", "", ""]
            if "flops" in row:
                of_program = [
                    f"{row['collective_bytes'] / 2**10:.1f}",
                    f"{row['flops'] / 1e6:.1f}",
                    f"{row['temp_bytes'] / 2**20:.1f}",
                ]
            cells = [
                *(case, name, f"{row['token_ms']:.2f}", f"{row['tokens_per_second']:.0f}"),
                *(f"{row['ratio']:.2f}", share, *of_program),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16, help="of a side, in a round")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample; 0 is greedy")
    parser.add_argument("--generate", action="store_true", help="transformers, too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="keep the figures in history/")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    places = CONFIG.max_seq - PROMPT - CHECKED - 1
    if (options.rounds + 1) * options.tokens > places:
        parser.error(f"the cache has {places} places for rounds + 1 times tokens")
    rows = {}
    for devices in options.devices:
        for batch in options.batch:
            case = f"{devices}, {batch}"
            rows[case] = measure(
                batch,
                devices,
                options.rounds,
                options.tokens,
                options.temperature,
                options.generate,
            )
            print(
                case,
                {name: round(row["ratio"], 3) for name, row in rows[case].items()},
                file=sys.stderr,
            )
    if options.record:
        record(Path(__file__).stem, rows)
    print(json.dumps(rows, indent=2) if options.json else markdown(rows))


if __name__ == "__main__":
    main()
