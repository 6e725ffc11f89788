"""Tiny models of transformers' architectures, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCAB, BATCH, LENGTH = 64, 4, 16

# What most configurations call the sizes, and what GPT-2's and its siblings do; of one that has no
# such field it isn't passed on.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64}


@dataclass(frozen=True)
class Architecture:
    """One model class.

    Attributes:
        name: as in the table.
        config: the configuration's class.
        model: the model's class.
        options: of the configuration, besides `SIZES`.
        inputs: what it is called with: "causal", "masked", "seq2seq", "image".
        experts: transformers' implementation of experts, where the default looks at values.
    """

    name: str
    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "causal"
    experts: str = ""

    def make(self) -> Any:
        """The model, always the same, in float32 and evaluation mode (no dropout)."""
        config_class = getattr(transformers, self.config)
        known = config_class()
        sizes = {name: value for name, value in SIZES.items() if _is_field(known, name)}
        config = config_class(**{**sizes, **self.options})
        torch.manual_seed(0)
        model: Any = getattr(transformers, self.model)(config)
        if self.experts:
            model.set_experts_implementation(self.experts)
        return model.float().eval()

    def batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Arguments on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        if self.inputs == "image":
            images = torch.randn(BATCH, 3, 16, 16, generator=generator)
            return {"pixel_values": images, "labels": torch.arange(BATCH)}
        tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
        if self.inputs == "seq2seq":
            labels = torch.randint(3, VOCAB, (BATCH, LENGTH // 2), generator=generator)
            return {"input_ids": tokens, "labels": labels}
        mask = torch.ones_like(tokens)
        if self.inputs == "masked":
            mask[0, LENGTH // 2 :] = 0  # a shorter row
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def _is_field(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return hasattr(config, name) and not (isinstance(found, property) and found.fset is None)


def causal(name: str, prefix: str, **options: Any) -> Architecture:
    return Architecture(name, f"{prefix}Config", f"{prefix}ForCausalLM", options)


ALL = (
    causal("Llama", "Llama"),
    causal("Mistral", "Mistral", sliding_window=8),
    causal("Qwen2", "Qwen2"),
    causal("Qwen3", "Qwen3"),
    causal("Gemma", "Gemma"),
    causal("Gemma 2", "Gemma2", sliding_window=8, query_pre_attn_scalar=8),
    causal("Phi", "Phi"),
    causal("Phi-3", "Phi3"),
    Architecture("GPT-2", "GPT2Config", "GPT2LMHeadModel", GPT),
    causal(
        "GPT-Neo",
        "GPTNeo",
        attention_types=[[["global", "local"], 1]],
        num_layers=2,
        num_heads=4,
        window_size=8,
    ),
    causal("GPT-J", "GPTJ", **GPT, rotary_dim=4),
    causal("GPT-NeoX", "GPTNeoX"),
    causal("OPT", "OPT", ffn_dim=64, word_embed_proj_dim=32),
    causal("BLOOM", "Bloom", n_layer=2, n_head=4),
    causal("Falcon", "Falcon", new_decoder_architecture=True, num_kv_heads=2),
    causal("OLMo 2", "Olmo2"),
    causal("StableLM", "StableLm"),
    causal("StarCoder2", "Starcoder2"),
    causal("Cohere", "Cohere"),
    causal("Granite", "Granite"),
    causal("SmolLM3", "SmolLM3"),
    Architecture(
        "Mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4},
        experts="batched_mm",
    ),
    Architecture("BERT", "BertConfig", "BertForMaskedLM", inputs="masked"),
    Architecture("RoBERTa", "RobertaConfig", "RobertaForMaskedLM", inputs="masked"),
    Architecture(
        "DistilBERT",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
        inputs="masked",
    ),
    Architecture(
        "T5",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        inputs="seq2seq",
    ),
    Architecture(
        "BART",
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "d_model": 32,
            **{
                f"{side}_{what}": n
                for side in ("encoder", "decoder")
                for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
            },
            "decoder_start_token_id": 2,
        },
        inputs="seq2seq",
    ),
    Architecture(
        "ViT",
        "ViTConfig",
        "ViTForImageClassification",
        {"image_size": 16, "patch_size": 4, "num_labels": BATCH},
        inputs="image",
    ),
)
BY_NAME = {architecture.name: architecture for architecture in ALL}
