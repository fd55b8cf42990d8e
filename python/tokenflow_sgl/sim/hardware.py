"""GPUs and models as numbers, each with its source, read from hardware/*.toml, models/*.toml and config.json files.

Owns the two file formats and what follows from a model's shape: parameters, weight and KV bytes in bf16. Computes no
time (timing.py does). Invariant: whatever is loaded is complete, in range and dense; what these formulas would
misjudge (experts, latent or windowed attention, quantized weights) is refused by name.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..workload.files import is_file, is_folder, read_utf8
from ..workload.tables import shown
from .fields import Fields

HARDWARE_DIR = Path(__file__).parent / "hardware"
MODEL_DIR = Path(__file__).parent / "models"
DTYPE_BYTES = 2  # bf16, weights and KV alike

# Decoders whose every layer is full attention with grouped heads and a gated MLP of three matrices.
MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_NOT_DENSE = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "quantization_config": "quantized weights",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "is_encoder_decoder": "an encoder and a decoder",
}
_HARDWARE_NUMBERS = (
    *("memory_bytes", "memory_bytes_s", "flops_s", "pcie_generation", "pcie_bytes_s"),
    *("step_overhead_s", "mfu", "mbu"),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and its link to host memory.

    memory_bytes: what the driver reports in all. memory_bytes_s, flops_s: peaks, dense bf16. pcie_bytes_s: usable, per
    direction. mfu, mbu: the share of the two peaks that kernels reach. step_overhead_s: what a step takes beyond its
    roofline: norms, sampling, launches. sources: (field, text) for each number.
    """

    name: str
    memory_bytes: int
    memory_bytes_s: float
    flops_s: float
    pcie_generation: int
    pcie_bytes_s: float
    step_overhead_s: float
    mfu: float
    mbu: float
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "memory_bytes_s", "flops_s", "pcie_generation", "pcie_bytes_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} of {self.name}: {value}, valid: a number > 0")
        for field in ("mfu", "mbu"):
            value = getattr(self, field)
            if not 0 < value <= 1:
                raise ValueError(f"{field} of {self.name}: {value}, valid: above 0, up to 1")
        if not (math.isfinite(self.step_overhead_s) and self.step_overhead_s >= 0):
            raise ValueError(f"step_overhead_s of {self.name}: {self.step_overhead_s}, valid: a number >= 0")


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a dense decoder. params: all parameters; tied_embeddings: the output head is the input table."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    params: int
    tied_embeddings: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "params"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"{field} of {self.name}: {value}, valid: a whole number >= 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads of {self.name}: {self.kv_heads}, valid: a divisor of heads ({self.heads})")
        if self.body_params <= 0:
            valid = f"more than the embeddings ({self.params - self.body_params})"
            raise ValueError(f"params of {self.name}: {self.params}, valid: {valid}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory, bf16."""
        return self.params * DTYPE_BYTES

    @property
    def head_params(self) -> int:
        """The output head: one multiplication per sequence of a step."""
        return self.vocab * self.hidden

    @property
    def body_params(self) -> int:
        """What every token is multiplied with: all but the embeddings."""
        return self.params - self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @classmethod
    def from_config_json(cls, path: str | Path) -> Model:
        """A model from its Hugging Face config.json, or from the folder that holds it. Raises ValueError."""
        path = Path(path)
        path = path / "config.json" if is_folder(path) else path
        if not is_file(path):
            raise ValueError(f"config.json: {shown(str(path))} is not a file, valid: a config.json or its folder")
        content = read_utf8(path, field="config.json")
        try:
            config = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON ({error}), valid: a Hugging Face config.json") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path}: {type(config).__name__}, valid: a JSON object")
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _dense_model(config, name, str(path))


def _dense_model(config: dict[str, Any], name: str, where: str) -> Model:
    _refuse_what_is_not_dense(config, where)
    fields = Fields(config, f"{where}: ")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise fields.refuse("model_type", kind, f"{', '.join(MODEL_TYPES)} (dense, full attention, gated MLP)")
    layers, hidden = fields.integer("num_hidden_layers", at_least=1), fields.integer("hidden_size", at_least=1)
    heads = fields.integer("num_attention_heads", at_least=1)
    kv_heads = fields.integer("num_key_value_heads", at_least=1) if fields.is_given("num_key_value_heads") else heads
    head_dim = fields.integer("head_dim", at_least=1) if fields.is_given("head_dim") else hidden // heads
    intermediate, vocab = fields.integer("intermediate_size", at_least=1), fields.integer("vocab_size", at_least=1)
    tied = fields.flag_or("tie_word_embeddings", False)
    biased = fields.flag_or("attention_bias", False)
    queries, keys = heads * head_dim, kv_heads * head_dim
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * intermediate + 2 * hidden
    if kind == "qwen2" or biased:
        layer += queries + 2 * keys
    if kind != "qwen2" and biased:
        layer += hidden
    if kind == "qwen3":
        layer += 2 * head_dim
    if fields.flag_or("mlp_bias", False):
        layer += 2 * intermediate + hidden
    params = layers * layer + hidden + vocab * hidden * (1 if tied else 2)
    return Model(name, layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, params, tied, where)


def _refuse_what_is_not_dense(config: dict[str, Any], where: str) -> None:
    valid = "a dense decoder in bf16 with full attention"
    for key, what in _NOT_DENSE.items():
        value = config.get(key)
        if value and not (type(value) is int and value == 1):
            raise ValueError(f"{where}: {key}: {value!r} is {what}, valid: {valid}")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None:
        raise ValueError(f"{where}: sliding_window: {window!r} is windowed attention, valid: {valid}")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"{where}: layer_types: {shown(kinds)}, valid: a list of texts")
    if odd := sorted(set(kinds) - {"full_attention"}):
        raise ValueError(f"{where}: layer_types: {odd}, valid: {valid}")


def list_hardware() -> tuple[str, ...]:
    """Names of the GPUs that come with the package, sorted."""
    return tuple(sorted(path.stem for path in HARDWARE_DIR.glob("*.toml")))


def list_models() -> tuple[str, ...]:
    """Names of the models that come with the package, sorted."""
    return tuple(sorted(path.stem for path in MODEL_DIR.glob("*.toml")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A GPU by its name or by the path of a TOML file. Raises ValueError."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = HARDWARE_DIR / f"{name_or_path}.toml"
    fields = _toml(path, f"hardware: {shown(str(name_or_path))}, valid: {', '.join(list_hardware())} or a .toml file")
    name = fields.file_name("name")
    numbers: dict[str, float] = {}
    sources: list[tuple[str, str]] = []
    for field in _HARDWARE_NUMBERS:
        table = fields.table(field)
        if field in ("memory_bytes", "pcie_generation"):
            numbers[field] = table.integer("value", at_least=1)
        else:
            numbers[field] = table.number("value", at_least=0.0)
        sources.append((field, table.text("source")))
        table.done()
    fields.done()
    memory, generation = int(numbers.pop("memory_bytes")), int(numbers.pop("pcie_generation"))
    return Hardware(name, memory, pcie_generation=generation, sources=tuple(sources), **numbers)


def load_model(name_or_path: str | Path) -> Model:
    """A model by its name, by a TOML file, or by a config.json or the folder that holds one. Raises ValueError."""
    path = Path(name_or_path)
    if str(name_or_path) and (path.suffix == ".json" or is_folder(path)):  # "" would be the current folder
        return Model.from_config_json(path)
    if path.suffix != ".toml":
        path = MODEL_DIR / f"{name_or_path}.toml"
    valid = f"{', '.join(list_models())}, a .toml file, a config.json or its folder"
    fields = _toml(path, f"model: {shown(str(name_or_path))}, valid: {valid}")
    shape = {
        key: fields.integer(key, at_least=1)
        for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "params")
    }
    tied = fields.flag_or("tied_embeddings", False)
    model = Model(fields.file_name("name"), **shape, tied_embeddings=tied, source=fields.text("source"))
    fields.done()
    return model


def _toml(path: Path, missing: str) -> Fields:
    if not is_file(path):
        raise ValueError(missing)
    content = read_utf8(path, field="file")
    try:
        return Fields(tomllib.loads(content), f"{path.name}: ")
    except (ValueError, RecursionError) as error:  # of TOML, too many digits for Python, too deep
        raise ValueError(f"{path}: not TOML ({error}), valid: a TOML document") from error
