"""Make a folder that has every file and model that the docs name in commands: M, MODEL, FILES, TRACE.csv."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from cpu.encoder_models import tiny_embedder
from ridgeline.archs import family_of, spec_from_config
from ridgeline.archs.table import table_to_json
from ridgeline.load.heads import HeadFile, write_head
from ridgeline.load.safetensors import HostTensor
from ridgeline.spec import to_json
from ridgeline.spec.heads import MedusaSpec

REPOSITORY = Path(__file__).resolve().parents[2]
# In the docs, these names are placeholders for a model: a folder or a hub id.
MODELS = (
    "M", "MODEL", "SMALLER", "STUDENT", "DIR_OR_HUB_ID", "path-or-hub-id", "folder", "smol", "stories260K",
)  # fmt: skip
TEXTS = ("FILE", "FILE_OR_FOLDER", "book.txt", "tinystories.txt")
FOLDERS = ("FILES", "FILES_OR_FOLDERS")  # folders of texts
TRACES = ("TRACE.csv", "AzureLLMInferenceTrace_conv.csv")
HUB_ID, COMMIT = "Qwen/Qwen3-0.6B", "c" * 40  # a model in the hub's cache, as if it had been downloaded
SOURCES = ("bench", "csrc", "CMakeLists.txt")  # files of the repository, where some commands run

VOCABULARY, WIDTH, HEADS, LAYERS, MLP, CONTEXT = 320, 32, 2, 2, 64, 4096
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": MLP,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "dtype": "float32", "bos_token_id": 1,
    "eos_token_id": 2, "vocab_size": VOCABULARY,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def make_folder(folder: Path) -> Path:
    """Fill an empty folder, and make a hub's cache beside it; return the cache."""
    tiny = folder / "tiny"
    write_model(tiny)
    for name in MODELS:
        (folder / name).symlink_to(tiny)
    write_medusa(folder / "HEAD")
    write_adapter(folder / "ADAPTER")
    (folder / "ENCODER").mkdir()
    tiny_embedder(folder / "ENCODER")
    only_config = folder / "FOLDER_WITH_ONLY_A_CONFIG"
    only_config.mkdir()
    config = (tiny / "config.json").read_text()
    for path in (only_config / "config.json", folder / "config.json", folder / "SPEC.json"):
        path.write_text(config)
    spec = spec_from_config(CONFIG)
    described = {"spec": to_json(spec), "names": table_to_json(family_of(CONFIG).names, spec)}
    (folder / "new.json").write_text(json.dumps(described))
    for name in (*TEXTS, *(f"{name}/{i}.txt" for name in FOLDERS for i in range(6))):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"This is {name}. " + "Once upon a time there was a small file. " * 20)
    rows = [f"2023-11-16 18:15:{46 + i}.6805900,{20 + i},{4 + i}" for i in range(6)]
    for name in TRACES:
        (folder / name).write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    write_lines(folder / "TRACE.jsonl", [{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}])
    write_lines(folder / "prompts.jsonl", ["one", {"prompt": "two"}, {"prompt_token_ids": [5, 6, 7]}])
    write_lines(folder / "ids.jsonl", [{"prompt_token_ids": [5, 6, 7]}])
    body = {"model": "pocket", "prompt": "import", "max_tokens": 2}
    write_lines(
        folder / "requests.jsonl", [{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}]
    )
    (folder / "questions").mkdir()
    write_lines(folder / "questions" / "piqa.jsonl", [{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}])
    for name in ("mmlu", "mmlu.shots"):
        write_lines(folder / "questions" / f"{name}.jsonl", [{"question": "a", "choices": [*"bcde"], "answer": 0}])
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "keys.txt").write_text("secret\n")
    (folder / "card.toml").write_text("memory_gb = 96\nbandwidth_gb_per_s = 1800\n[tflops]\nbfloat16 = 250\n")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for name in SOURCES:
        (folder / name).symlink_to(REPOSITORY / name)
    cached = folder / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / COMMIT).symlink_to(tiny)
    return folder / "hub"


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_medusa(folder: Path) -> None:
    """Write random heads for the model."""
    spec = MedusaSpec(hidden_size=WIDTH, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, num_heads=2)
    rng = np.random.default_rng(1)
    weights = {w.name: HostTensor(rng.normal(0, 0.3, w.shape).astype(np.float32), "float32") for w in spec.weights()}
    write_head(folder, HeadFile(spec, weights), "medusa")


def write_model(folder: Path) -> None:
    """Write a random Llama of 27,000 parameters with a token for each byte, and a chat template."""
    folder.mkdir()
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    alphabet += [f"<{i}>" for i in range(len(alphabet), VOCABULARY)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(alphabet[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj": (MLP, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (WIDTH, MLP)}
        shapes |= {f"{at}{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    tensors = {f"model.{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_adapter(folder: Path) -> None:
    """Write an adapter of rank 2 for the docs' model, as peft writes it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    rng, module = np.random.default_rng(0), "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = {"A": (2, WIDTH), "B": (WIDTH, 2)}
    tensors = {f"{module}{k}.weight": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
