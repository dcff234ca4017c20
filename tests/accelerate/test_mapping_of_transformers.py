"""Models of transformers run from the checkpoints that it writes: the same outputs as by ``from_pretrained``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, init_empty_weights
from torch import Tensor, nn

import fastensor
from fastensor.errors import UnknownKeyError, UnsupportedContentError
from fastensor_accelerate import CheckpointMapping

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

pytestmark = [
    pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning"),
    pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers converts since version 5"),
]


def a_model(name: str, config: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


MODELS = {
    "ResNet": a_model(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "ViT": a_model("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, **ENCODER),
    "BERT": a_model("BertForMaskedLM", "BertConfig", vocab_size=64, **ENCODER),
    "GPT-2": a_model("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "T5": a_model("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=32, d_ff=64, num_layers=1),
    "Llama": a_model("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "tied Llama": a_model("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **DECODER),
    "Mixtral": a_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=3, **DECODER),
    "Qwen2-MoE": a_model("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **EXPERTS, **DECODER),
    "DeepSeek-V3": a_model(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **(DECODER | EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}


def trained(name: str) -> Any:
    """A model whose parameters and buffers are none that it begins with."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor += torch.rand_like(tensor) / 16
    return model


def empty(model: Any, *, tied: bool = True) -> Any:
    """As the documentation has it."""
    with init_empty_weights():
        found = type(model)(model.config).eval()
    if tied:
        found.tie_weights()
    return found


@torch.no_grad()
def logits(model: Any) -> Tensor:
    inputs: dict[str, Tensor] = {"input_ids": torch.arange(1, 9).view(1, 8)}
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    found: Tensor = model(**inputs).logits
    return found


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_from_pretrained(name: str, shards: str, tmp_path: Path) -> None:
    source = trained(name)
    source.save_pretrained(tmp_path, max_shard_size=shards)
    stock = type(source).from_pretrained(tmp_path).eval()
    expected = logits(stock)
    model = empty(source)
    with CheckpointMapping(tmp_path, model) as weights:
        cpu_offload(model, CPU, state_dict=weights)
        for _ in range(2):
            assert torch.equal(logits(model), expected)
    buffers = dict(stock.named_buffers())
    assert all(torch.equal(buffer, buffers[found]) for found, buffer in model.named_buffers())


def test_experts_are_those_of_from_pretrained(tmp_path: Path) -> None:
    """Each tensor, in the dtype of the model; read again, it is the same memory while it is in use."""
    source = trained("Mixtral")
    source.save_pretrained(tmp_path)
    stock = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = empty(source).to(torch.bfloat16)
    with CheckpointMapping(tmp_path, model) as weights:
        for name, tensor in stock.state_dict().items():
            found = weights[name]
            assert torch.equal(found.to(tensor.dtype), tensor)
            assert weights[name].data_ptr() == found.data_ptr()
            assert found.nbytes == found.untyped_storage().nbytes()
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" not in weights


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2-MoE"])
def test_a_state_dict_of_the_model_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    """As ``Accelerator.save_state`` writes it."""
    source = trained(name)
    fastensor.save(dict(source.state_dict()), tmp_path / "model.safetensors", durable=False)
    model = empty(source)
    with CheckpointMapping(tmp_path, model) as weights:
        cpu_offload(model, CPU, state_dict=weights)
        assert torch.equal(logits(model), logits(source))


def test_a_prefix_goes_before_names_are_converted(tmp_path: Path) -> None:
    source = trained("Mixtral")
    source.save_pretrained(tmp_path)
    state = fastensor.load(tmp_path / "model.safetensors")
    fastensor.save({f"old.{name}": tensor for name, tensor in state.items()}, tmp_path / "x.safetensors", durable=False)
    model = empty(source)
    with CheckpointMapping(tmp_path / "x.safetensors", model, prefix="old.") as weights:
        cpu_offload(model, CPU, state_dict=weights)
        assert torch.equal(logits(model), logits(source))


def test_a_base_model_takes_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    source = trained("BERT")
    source.save_pretrained(tmp_path)
    with init_empty_weights():
        model = transformers.BertModel(source.config, add_pooling_layer=False).eval()
    with CheckpointMapping(tmp_path, model) as weights, torch.no_grad():
        cpu_offload(model, CPU, state_dict=weights)
        tokens = torch.arange(1, 9).view(1, 8)
        assert torch.equal(model(tokens)[0], source.bert(tokens)[0])


@pytest.mark.parametrize(
    ("name", "ties"),
    [
        ("tied Llama", r"'lm_head\.weight' is not .* tied to 'model\.embed_tokens\.weight'"),
        ("T5", r"'encoder\.embed_tokens\.weight' is not .* tied to 'shared\.weight'"),
    ],
)
def test_weights_that_are_not_tied_yet(name: str, ties: str, tmp_path: Path) -> None:
    trained(name).save_pretrained(tmp_path)
    with pytest.raises(UnknownKeyError, match=rf"{ties}.*call model\.tie_weights\(\) before"):
        CheckpointMapping(tmp_path, empty(trained(name), tied=False))


def test_experts_that_are_missing(tmp_path: Path) -> None:
    """Of each matrix, one expert: they cannot be stacked with the others, or not to the shape of the model."""
    source = trained("Mixtral")
    source.save_pretrained(tmp_path)
    state = fastensor.load(tmp_path / "model.safetensors")
    lacking = {name: tensor for name, tensor in state.items() if "experts.1.w1" not in name}
    fastensor.save(lacking, tmp_path / "model.safetensors", durable=False)
    with pytest.raises(UnsupportedContentError, match=r"gate_up_proj'.*failed: .*save_original_format=False"):
        CheckpointMapping(tmp_path, empty(source))
    lacking = {name: tensor for name, tensor in state.items() if "experts.1." not in name}
    fastensor.save(lacking, tmp_path / "model.safetensors", durable=False)
    with pytest.raises(UnsupportedContentError, match=r"gate_up_proj' in the shape \[3, .* found \[2, "):
        CheckpointMapping(tmp_path, empty(source))


def test_the_mapping_does_not_keep_the_model(tmp_path: Path) -> None:
    source = trained("Mixtral")
    source.save_pretrained(tmp_path)
    model: nn.Module = empty(source)
    with CheckpointMapping(tmp_path, model) as weights:
        expected = source.state_dict()["model.layers.0.mlp.experts.down_proj"]
        del model
        assert torch.equal(weights["model.layers.0.mlp.experts.down_proj"], expected)
