"""Write and load quantized checkpoints with the tools of others, for bench/formats.py: drive_formats.py JOBS RESULTS

JOBS is a JSON list. A job has a name, the function of TASKS, and its arguments:
    model: the folder of the original. folder: the checkpoint to write or to load. ids: tokens [n, length] (.npy).
    logits: where logits [n, length, vocabulary] go, float32 (.npy).
RESULTS gets a JSON line for each job: its name, and an error, which is empty if there was none. Models are in float32.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# GPTQModel makes thread pools for the cores beyond 2, and fails without any.
_CPUS = os.cpu_count() or 1
os.cpu_count = lambda: max(4, _CPUS)  # type: ignore[assignment]

# GPTQModel compiles its products with g++, which takes minutes and changes no result.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402

Job = Mapping[str, Any]


def _save_logits(model: Any, job: Job) -> None:
    ids = torch.from_numpy(np.load(job["ids"]))
    with torch.no_grad():
        rows = [model(input_ids=some[None]).logits[0].float().numpy() for some in ids]
    np.save(job["logits"], np.stack(rows))


def _open(folder: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def transformers_load(job: Job) -> None:
    """Load a checkpoint in transformers."""
    _save_logits(_open(job["folder"], device_map="cpu"), job)


def bitsandbytes_write(job: Job) -> None:
    """Write a checkpoint with bitsandbytes in transformers. options: arguments of BitsAndBytesConfig."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**job["options"])
    model = _open(job["model"], quantization_config=config, device_map="cpu")
    model.save_pretrained(job["folder"])
    _bitsandbytes_logits(model, job)


def bitsandbytes_load(job: Job) -> None:
    """Load a checkpoint of bitsandbytes in transformers."""
    _bitsandbytes_logits(_open(job["folder"], device_map="cpu"), job)


def _bitsandbytes_logits(model: Any, job: Job) -> None:
    """Save the logits of a plain model with the matrices that bitsandbytes dequantizes.

    The logits of its own products go to the file `products`.
    """
    import bitsandbytes as bnb

    _save_logits(model, {**job, "logits": job["products"]})
    plain = _open(job["model"])
    modules = dict(plain.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            modules[name].weight.data = bnb.functional.dequantize_4bit(
                module.weight.data, module.weight.quant_state
            ).float()
        elif isinstance(module, bnb.nn.Linear8bitLt):
            codes = module.weight.data if module.weight.CB is None else module.weight.CB
            scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
            modules[name].weight.data = bnb.functional.int8_vectorwise_dequant(codes, scales).float()
    _save_logits(plain, job)


def llmcompressor_write(job: Job) -> None:
    """Write a checkpoint with llm-compressor, and compute the logits of its own model. options: a config group."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    options = job["options"]
    if "scheme" in options:
        recipe = QuantizationModifier(targets="Linear", ignore=["lm_head"], **options)
    else:
        recipe = QuantizationModifier(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], **options}})
    model = oneshot(model=_open(job["model"]), recipe=recipe)
    _save_logits(model, job)
    model.save_pretrained(job["folder"], save_compressed=True)


def gptqmodel_write(job: Job) -> None:
    """Write a checkpoint with GPTQModel. options: arguments of its config.

    calibration: a file with sequences of tokens (.json).
    """
    from gptqmodel import GPTQModel
    from gptqmodel.quantization import AWQConfig, GPTQConfig

    options = dict(job["options"])
    method = options.pop("method", "gptq")
    make = {"awq": AWQConfig, "gptq": GPTQConfig}[method]
    # Its other ways to pack compile an extension first.
    config = make(device="cpu", offload_to_disk=False, pack_impl="original", **options)
    # It packs AWQ from 16 bits only.
    model = GPTQModel.load(job["model"], config, dtype=torch.float16 if method == "awq" else torch.float32)
    sequences = json.loads(Path(job["calibration"]).read_text())
    model.quantize([{"input_ids": s, "attention_mask": [1] * len(s)} for s in sequences], batch_size=1)
    model.save(job["folder"])


def gptqmodel_load(job: Job) -> None:
    """Load a checkpoint in GPTQModel, with its kernels in torch, which compute in float16 only.

    The logits are those of a plain model in float32 with the matrices that GPTQModel dequantizes. The logits of its
    own products go to the file `products`.
    """
    from gptqmodel import BACKEND, GPTQModel
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(job["folder"])
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    backend = BACKEND.AWQ_TORCH if method == "awq" else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16).model.eval()
    _save_logits(model, {**job, "logits": job["products"]})
    config = AutoConfig.from_pretrained(job["model"])
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    tensors = {name: x.float() for some in files for name, x in some.items() if name in plain.state_dict()}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            tensors[f"{name}.weight"] = _dequantized(module, method)
    left = plain.load_state_dict(tensors, strict=False)
    if set(left.missing_keys) - {"lm_head.weight"} or left.unexpected_keys:
        raise ValueError(f"tensors are missing: {left.missing_keys[:3]}")
    plain.tie_weights()
    _save_logits(plain, job)


def _dequantized(module: Any, method: str) -> torch.Tensor:
    """Return a module's matrix [out, in], with products of scales in float32."""
    module.scales = module.scales.float()
    if method == "gptq":
        return module.dequantize_weight().T.float()
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size).T.float()


def torchao_write(job: Job) -> None:
    """Write a checkpoint with torchao in transformers.

    options: name of the config, and its arguments, where types are given by name and groups by their size.
    """
    import torchao.quantization as ao
    from transformers import TorchAoConfig

    options = dict(job["options"])
    make = getattr(ao, options.pop("config"))
    for key, value in options.items():
        if key.endswith("dtype"):
            options[key] = getattr(torch, value)
        elif key.endswith("granularity"):
            options[key] = ao.granularity.PerGroup(value)
    config = TorchAoConfig(make(**options))
    model = _open(job["model"], quantization_config=config, device_map="cpu")
    _save_logits(model, job)
    model.save_pretrained(job["folder"])


TASKS: Mapping[str, Callable[[Job], None]] = {
    f.__name__: f for f in (
        transformers_load, bitsandbytes_write, bitsandbytes_load, llmcompressor_write, gptqmodel_write,
        gptqmodel_load, torchao_write,
    )
}  # fmt: skip


WRITES = frozenset(name for name in TASKS if not name.endswith("_load"))


def _write(job: Job) -> None:
    """Write a checkpoint under another name, so that it is complete or absent."""
    part = Path(job["folder"] + ".part")
    for folder in (part, Path(job["folder"])):
        shutil.rmtree(folder, ignore_errors=True)
    TASKS[job["do"]]({**job, "folder": str(part)})
    part.rename(job["folder"])


def main() -> None:
    jobs, results = (Path(a) for a in sys.argv[1:])
    with results.open("w") as out:
        for job in json.loads(jobs.read_text()):
            error = ""
            try:
                if job["do"] in WRITES:
                    _write(job)
                else:
                    TASKS[job["do"]](job)
            except Exception as e:
                traceback.print_exc()
                error = (str(e).strip().splitlines() or [""])[0][:200]
                error = f"{type(e).__name__}: {error}"
            out.write(json.dumps({"name": job["name"], "error": error}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
