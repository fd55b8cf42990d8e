"""GPUs and models: what comes with the package, what a config.json says, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tokenflow_sgl.sim.hardware import (
    HARDWARE_DIR,
    Model,
    list_hardware,
    list_models,
    load_hardware,
    load_model,
)

# As published on Hugging Face, without what the formulas do not look at.
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN25_32B = QWEN2_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
QWEN3_8B = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write_config(tmp_path, config):
    folder = tmp_path / "some-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_gpus_and_models_of_the_paper_and_of_the_calculator_are_there():
    assert list_hardware() == ("a100-80g", "a6000", "h100-80g", "h200", "rtx4090")
    assert list_models() == ("llama3-8b", "qwen2-7b", "qwen2.5-32b")


@pytest.mark.parametrize("name", list_hardware())
def test_every_number_of_a_gpu_names_its_source(name):
    gpu = load_hardware(name)
    assert gpu.name == name
    assert [field for field, _ in gpu.sources] == [
        *("memory_bytes", "memory_bytes_s", "flops_s", "pcie_generation", "pcie_bytes_s", "step_overhead_s"),
        *("mfu", "mbu"),
    ]
    assert all(len(source) > 20 for _, source in gpu.sources)


@pytest.mark.parametrize(
    ("name", "config", "params"),
    [
        ("llama3-8b", LLAMA3_8B, 8_030_261_248),
        ("qwen2-7b", QWEN2_7B, 7_615_616_512),
        ("qwen2.5-32b", QWEN25_32B, 32_763_876_352),
    ],
)
def test_a_packaged_model_is_what_its_config_json_says(tmp_path, name, config, params):
    packaged, read = load_model(name), load_model(write_config(tmp_path, config))
    assert packaged.params == params
    assert replace(read, name=name, source=packaged.source) == packaged
    assert read.name == "some-model"


def test_parameters_of_a_model_with_norms_on_queries_and_keys(tmp_path):
    # Qwen/Qwen3-8B has 8,190,735,360 parameters.
    assert Model.from_config_json(write_config(tmp_path, QWEN3_8B)).params == 8_190_735_360


def test_a_tied_output_head_is_stored_once_and_multiplied_with_all_the_same(tmp_path):
    tied = Model.from_config_json(write_config(tmp_path, LLAMA3_8B | {"tie_word_embeddings": True}))
    # 128,256 x 4,096 = 525,336,576 fewer.
    assert tied.params == 8_030_261_248 - 525_336_576
    assert tied.head_params == 525_336_576
    assert tied.body_params == load_model("llama3-8b").body_params == 8_030_261_248 - 2 * 525_336_576


def test_bytes_of_a_kv_token_and_of_the_weights():
    # 2 x layers x KV heads x 128 x 2 bytes.
    assert load_model("llama3-8b").kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072
    assert load_model("qwen2-7b").kv_bytes_per_token == 2 * 28 * 4 * 128 * 2 == 57_344
    assert load_model("qwen2.5-32b").kv_bytes_per_token == 2 * 64 * 8 * 128 * 2 == 262_144
    assert load_model("llama3-8b").weight_bytes == 16_060_522_496


def test_heads_without_groups_and_without_a_size_of_their_own_follow_from_the_rest(tmp_path):
    config = {key: value for key, value in LLAMA3_8B.items() if key != "num_key_value_heads"}
    model = Model.from_config_json(write_config(tmp_path, config | {"head_dim": None}))
    assert (model.kv_heads, model.head_dim) == (32, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": 8}, "num_local_experts: 8 is a mixture of experts"),
        ({"num_experts": 128}, "num_experts: 128 is a mixture of experts"),
        ({"n_routed_experts": 256}, "n_routed_experts: 256 is a mixture of experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: 512 is multi-head latent attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .* is quantized weights"),
        ({"vision_config": {"depth": 2}}, "vision_config: .* is a vision tower"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: True is an encoder and a decoder"),
        ({"sliding_window": 4096}, "sliding_window: 4096 is windowed attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window: 4096 is windowed attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: .'linear_attention'., valid"),
        ({"model_type": "gpt2"}, "model_type: 'gpt2', valid: llama, mistral, phi3, qwen2, qwen3"),
        ({"model_type": None}, "model_type: None, valid: llama"),
        ({"hidden_size": "4096"}, "hidden_size: '4096', valid: a whole number >= 1"),
        ({"num_key_value_heads": 5}, "kv_heads of some-model: 5, valid: a divisor of heads .32."),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1, valid: true, false"),
    ],
)
def test_a_config_json_that_the_formulas_would_misjudge_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        Model.from_config_json(write_config(tmp_path, LLAMA3_8B | change))


def test_experts_that_a_config_names_but_does_not_have_are_no_reason_to_refuse(tmp_path):
    config = LLAMA3_8B | {"num_experts": 0, "num_local_experts": 1, "vision_config": None, "is_encoder_decoder": False}
    assert Model.from_config_json(write_config(tmp_path, config)).params == 8_030_261_248


def test_a_config_json_without_a_field_names_it(tmp_path):
    config = {key: value for key, value in LLAMA3_8B.items() if key != "vocab_size"}
    with pytest.raises(ValueError, match="vocab_size: missing, valid: a whole number >= 1"):
        Model.from_config_json(write_config(tmp_path, config))


def test_files_that_are_not_there_or_not_readable_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"hardware: 'b200', valid: a100-80g, .* or a \.toml file"):
        load_hardware("b200")
    with pytest.raises(ValueError, match=r"model: 'gpt-5', valid: llama3-8b, .*config\.json"):
        load_model("gpt-5")
    with pytest.raises(ValueError, match=r"is not a file, valid: a config\.json or its folder"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match="not JSON"):
        load_model(tmp_path / "config.json")
    (tmp_path / "gpu.toml").write_text("name =")
    with pytest.raises(ValueError, match="not TOML"):
        load_hardware(tmp_path / "gpu.toml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("value = 0.80", "value = 1.2", "mbu of h200: 1.2, valid: above 0, up to 1"),
        ("value = 4.8e12", "value = 0", "memory_bytes_s of h200: 0.0, valid: a number > 0"),
        ("value = 4.8e12", "value = -1.0", "memory_bytes_s.value: -1.0, valid: a number >= 0"),
        ("value = 4.8e12", "", "memory_bytes_s.value: missing"),
        ("value = 4.8e12", "valeu = 1\nvalue = 4.8e12", "memory_bytes_s.valeu: 1, unknown key, valid: value, source"),
        ("value = 5", "value = 5.0", "pcie_generation.value: 5.0, valid: a whole number >= 1"),
        ("[mfu]", "[mfu_]", "mfu: missing, valid: a table"),
    ],
)
def test_a_gpu_file_with_a_bad_number_is_refused_by_name(tmp_path, old, new, words):
    text = (HARDWARE_DIR / "h200.toml").read_text()
    assert old in text
    (tmp_path / "own.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=words):
        load_hardware(tmp_path / "own.toml")


def test_a_gpu_of_ones_own_is_read_from_its_path(tmp_path):
    text = (HARDWARE_DIR / "h200.toml").read_text().replace('name = "h200"', 'name = "h200-nvl"')
    (tmp_path / "own.toml").write_text(text)
    assert load_hardware(tmp_path / "own.toml") == replace(load_hardware("h200"), name="h200-nvl")
