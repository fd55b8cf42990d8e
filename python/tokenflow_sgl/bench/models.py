"""Small Llama-style models with random weights and a real tokenizer, made on first use.

Owns their shapes, their tokenizer and its training text. Does not own what they are served with. Invariant: the same
name and seed give the same bytes, and a directory that this module did not make is never written to.

    python -m tokenflow_sgl.bench.models small models/small
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

RECIPE_FILE = "tokenflow_model.json"
VOCAB = 1024
CONTEXT_TOKENS = 16384
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIALS = (PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """hidden and intermediate are widths, heads and kv_heads counts per layer."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


SHAPES = {
    "tiny": Shape(layers=2, hidden=128, intermediate=352, heads=4, kv_heads=2),
    "small": Shape(layers=4, hidden=256, intermediate=704, heads=4, kv_heads=2),
    "mid": Shape(layers=8, hidden=512, intermediate=1408, heads=8, kv_heads=4),
}


def ensure_model(name: str, directory: Path, *, seed: int = 0) -> bool:
    """Make model `name` in directory unless it is there already; True if it was made now.

    Raises ValueError for an unknown name, FileExistsError for a directory with anything else in it.
    """
    if name not in SHAPES:
        raise ValueError(f"model {name!r}: valid names are {', '.join(SHAPES)}")
    # With this file's digest, a model made by an older version of it is made anew.
    recipe: dict[str, Any] = {"name": name, "seed": seed, "maker": sha256(Path(__file__).read_bytes()).hexdigest()}
    if _is_ready(directory, recipe):
        return False
    if directory.exists() and any(directory.iterdir()) and not (directory / RECIPE_FILE).exists():
        raise FileExistsError(f"{directory} holds files that this script did not make; choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a run that was interrupted must not leave half a model that looks whole.
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_model(SHAPES[name], work, seed=seed)
        (work / RECIPE_FILE).write_text(json.dumps(recipe, indent=1) + "\n")
        work.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        try:
            os.rename(work, directory)
        except OSError:
            if not _is_ready(directory, recipe):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def _is_ready(directory: Path, recipe: dict[str, Any]) -> bool:
    path = directory / RECIPE_FILE
    return path.exists() and json.loads(path.read_text()) == recipe


def _write_model(shape: Shape, directory: Path, *, seed: int) -> None:
    from safetensors.torch import save_file

    tokenizer = train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = tokenizer.get_vocab(with_added_tokens=True)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    _write_json(directory / "config.json", _model_config(shape, ids))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]},
    )
    weights = make_weights(shape, silent=silent_tokens(tokenizer), seed=seed)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [token for token in SPECIALS if token not in (BOS, EOS, PAD)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }


def _model_config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "torch_dtype": "float32",
        "use_cache": True,
    }


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of VOCAB tokens: any text can be encoded, and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer=trainer)
    assert tokenizer.get_vocab_size() == VOCAB, (tokenizer.get_vocab_size(), VOCAB)
    return tokenizer


def silent_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that a greedy answer must not contain, sorted: special ones, pieces of a character, control characters.

    A detokenizer holds text back while it ends in a piece of a character, so a reader would see gaps that no scheduler
    made; and an answer that ends by chance has no known length.
    """
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCAB)]
    return [i for i, text in enumerate(texts) if text in SPECIALS or "\ufffd" in text or not _is_printable(text)]


def _is_printable(text: str) -> bool:
    return text != "" and text.replace("\n", "").replace("\t", "").isprintable()


def make_weights(shape: Shape, *, silent: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
    """float32 weights under Hugging Face's names for Llama.

    Rows of the output layer named in `silent` are zero: their logit is 0 and never the largest of VOCAB random ones.
    """
    import torch

    random = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (gain / math.sqrt(columns))

    kv_width = shape.hidden // shape.heads * shape.kv_heads
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, shape.hidden, generator=random)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = torch.ones(shape.hidden)
        weights[prefix + "self_attn.q_proj.weight"] = normal(shape.hidden, shape.hidden, _ATTENTION_GAIN)
        weights[prefix + "self_attn.k_proj.weight"] = normal(kv_width, shape.hidden, _ATTENTION_GAIN)
        weights[prefix + "self_attn.v_proj.weight"] = normal(kv_width, shape.hidden, _BRANCH_GAIN)
        weights[prefix + "self_attn.o_proj.weight"] = normal(shape.hidden, shape.hidden, _BRANCH_GAIN)
        weights[prefix + "post_attention_layernorm.weight"] = torch.ones(shape.hidden)
        weights[prefix + "mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[prefix + "mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[prefix + "mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate)
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    output = normal(VOCAB, shape.hidden, _LOGIT_GAIN)
    output[list(silent)] = 0.0
    weights["lm_head.weight"] = output
    return weights


# Chosen by greedy answers of 250 tokens: with half these gains the next token hardly depends on the context and answers
# are short loops; with twice these, attention swamps deep models into repeating, and rounding (prefill against decode)
# moves logits by 1e-4 in place of 1e-5, so that equal answers could not be asked of equal requests.
_ATTENTION_GAIN = 1.5
_BRANCH_GAIN = 0.7
_LOGIT_GAIN = 3.0

# Training text of the tokenizer: prose, chat, numbers, code and JSON, so that grammars have tokens to choose from.
_TEXT = """\
A server that streams text to people is not judged by how fast it can write, but by how the words arrive. A
reader takes in five or six words each second; a machine can write ten times as many. Whoever runs ahead of the
reader fills a buffer, and a full buffer is time that can be lent to somebody else. When many new readers come
at once, the ones who have much to read can wait a little, while those who have nothing yet are served first.
Nobody should notice that anything was paused: the page must not run dry, the first word must come soon, and
every word must come exactly once and in order.

Once upon a time there was a small harbour town between the mountains and the sea. Every morning the fishermen
went out before the sun was up, and every evening they came back with their boats full of silver fish. The
children waited on the old stone wall, counting the sails: one, two, three, four, five, six, seven, eight, nine,
ten. "How was the water today?" they would ask, and the answer was always the same: "Cold and deep, but kind."
In winter the storms kept everybody at home. Then they told each other stories about far countries, strange
animals, lost ships and the long way back.

The weather has been changing quickly this week. On Monday it was warm and dry, on Tuesday there was heavy rain,
and by Thursday the first snow had fallen on the hills. Please bring a coat, an umbrella and something to drink.
We will leave at 7:30 from the station and should be there around 11:45, although the train is sometimes 10 or
20 minutes late.

Question: What is the capital of France? Answer: The capital of France is Paris.
Question: Why is the sky blue? Answer: Because air scatters short waves of light more strongly than long ones.
Question: How many legs does a spider have? Answer: A spider has eight legs, an insect has six, and a dog has four.
Question: Can you help me to write a letter? Answer: Of course. Tell me who it is for, what it should say, and when.
Hello! How are you today? I am fine, thank you. What would you like to know? I'd like to learn about music, history and
computers. That's great, let's start with something simple. Don't worry if you don't understand everything at first.

To make bread you need flour, water, salt and a little yeast. Mix them well, let the dough rest for an hour,
shape it, and bake it until the crust is brown. To make tea, boil water, pour it over the leaves, and wait for
three minutes. First, open the window. Second, turn off the light. Third, lock the door behind you. Finally, put
the key in the box.

def count(words, limit=10):
    total = 0
    for word in words:
        if len(word) > limit or word == "":
            continue
        total += 1
    return total

class Queue:
    def __init__(self, size):
        self.items = []
        self.size = size

    def push(self, item):
        if len(self.items) >= self.size:
            raise ValueError("the queue is full")
        self.items.append(item)

import json, math, time
print(json.dumps({"name": "Ada", "age": 36, "city": "London", "tags": ["math", "code"], "active": true, "score": null}))
{"id": 1024, "price": 19.99, "items": [{"name": "pen", "count": 3}, {"name": "book", "count": 12}], "paid": false}
x = (a + b) * c - d / 2; y = x % 7; z = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]; assert x != y and y <= z[-1]
2024-01-15 08:30:00 info: 100 requests, 256 tokens, 512 pages, 1000 ms, 3.14159 s, 42%, #17, http://example.com/a?b=c&d=1
the of and to in a is that for it was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my
made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around another
came come work three word must because does part even
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the model is there, 2 when it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m tokenflow_sgl.bench.models", description="Make a model to serve.")
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    try:
        made = ensure_model(args.name, args.directory, seed=args.seed)
    except OSError as error:
        print(f"models: {error}", file=sys.stderr)
        return 2
    print(f"model {args.name} {'made in' if made else 'is ready in'} {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
