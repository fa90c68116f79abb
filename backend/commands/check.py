"""``python -m backend.commands.check``: whether a model could be served here, and what would compute it.

``keepgate doctor`` runs it with the options of ``keepgate backend``. It prints a JSON object for each finding, with
``check``, ``status`` (ok, warning or problem), ``summary`` and ``advice``. No model is loaded, converted or fetched:
the kernels compute a small model with random weights, and are compared with torch as they are at each start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backend.commands.command_line import Parser, exit_on_broken_pipe
from backend.commands.serve import add_arguments
from backend.errors import BackendError, ModelError
from backend.model_loader.source import BUNDLED_MODEL, BUNDLED_NAME, MODEL_FILES, bundled_file, hub_directory
from backend.models.config import ModelConfig
from backend.models.json_file import read_json_object
from backend.models.sizes import Precision, count_parameters, kv_bytes_per_token, weight_bytes
from backend.quantized_weights.names import Quantization

if TYPE_CHECKING:
    from backend.engine.config import EngineConfig
    from backend.model_loader.weights import ModelWeights

_CPU_KV_BYTES = 512 * 2**20
_SMALL_KV_BYTES = 16 * 2**20
_CONTEXT = 64
_GIB = 2**30
_STORED_AS: dict[Quantization, Precision] = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8",
    "nf4": "nf4",
    "gptq-int4": "nf4",
    "awq-int4": "nf4",
    "mixed": "int4",
}
"""The precision that takes about as many bytes."""
_SMALL = ModelConfig(
    model_type="llama",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=_CONTEXT,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(0,),
)
"""A decoder as the fused step knows it."""


def run(words: Sequence[str]) -> int:
    """Prints the findings; returns the exit status: 2 if an argument is wrong."""
    parser = Parser(prog="keepgate backend", allow_abbrev=False)
    add_arguments(parser)
    arguments = parser.parse_args(words)
    _look(arguments, _say)
    return 0


Say = Callable[[str, str, str, str], None]
"""(check, status, summary, advice)"""


def _say(check: str, status: str, summary: str, advice: str = "") -> None:
    print(json.dumps({"check": check, "status": status, "summary": summary, "advice": advice}), flush=True)


@dataclass(frozen=True)
class _Model:
    """The shape of a model, and the bytes of its weights where its files have them in fewer bits than 16."""

    config: ModelConfig
    quantised_bytes: int | None = None


def _look(arguments: argparse.Namespace, say: Say) -> None:
    model: _Model | None = None
    try:
        model = _check_model(arguments, say)
    except (ModelError, OSError) as error:
        advice = "put its files right, or name another with --model: a folder in Hugging Face's layout, a .gguf file,"
        say("model", "problem", str(error), f"{advice} a hub id, or 'default'")
    if model is not None:
        _check_memory(arguments, model, say)
    _check_device(arguments, say)
    _check_kernels(arguments, None if model is None else model.config, say)


def _check_model(arguments: argparse.Namespace, say: Say) -> _Model | None:
    """Reads all of a model's files but its weights; None where its shape is not known. Raises ModelError."""
    name: str = arguments.model
    path = Path(name).expanduser()
    if name == BUNDLED_MODEL:
        file = bundled_file()
        config = _gguf_config(file)
        say("model", "ok", f"{BUNDLED_NAME}, which comes with Keepgate: {_shown(_size_of([file]))}", "")
        return _Model(config)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        config, size = _gguf_config(path), _size_of([path])
        say("model", "ok", f"{path}: {config.model_type}, {_shown(size)}; converted once, at its first start", "")
        return _Model(config, size)
    if path.is_dir():
        return _directory(path, say)
    if path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(f"model {name!r}: there is no such folder or file, and it is no hub id such as owner/name")
    try:
        folder = hub_directory(name, [*MODEL_FILES])
    except ModelError:
        say(
            "model",
            "warning",
            f"{name} is not in this machine's hub cache: the first start fetches it",
            f"fetch it now: `hf download {name}`; or name a folder with --model",
        )
        return None
    return _directory(folder, say)


def _directory(folder: Path, say: Say) -> _Model:
    from backend.chat.tokenizer import ModelTokenizer
    from backend.checkpoints.quantized.registry import quantization_config
    from backend.checkpoints.tensor_store import TensorStore, model_files
    from backend.model_loader.weights import read_config

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json here; expected a directory in Hugging Face's layout")
    config = read_config(folder)
    count = len(list(TensorStore(folder).names()))
    tokenizer = ModelTokenizer.load(folder, config)
    size = _size_of(model_files(folder))
    chats = "" if tokenizer.chat_template is not None else "; no chat template: completions only"
    say("model", "ok", f"{folder}: {config.model_type}, {count} tensors, {_shown(size)}{chats}", "")
    is_quantised = quantization_config(read_json_object(folder / "config.json")) is not None
    return _Model(config, size if is_quantised else None)


def _size_of(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _shown(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / 2**20:.0f} MiB"


def _gguf_config(file: Path) -> ModelConfig:
    from backend.checkpoints.gguf.config import GgufMetadata, hf_config
    from backend.checkpoints.gguf.header import read_gguf
    from backend.models.hf_config import read_hf_config

    header = read_gguf(file)
    names = [tensor.name for tensor in header.tensors]
    return read_hf_config(hf_config(GgufMetadata(header.fields, names, str(file)), None), str(file))


def _check_memory(arguments: argparse.Namespace, model: _Model, say: Say) -> None:
    """Weights and KV memory against the memory of the machine or of the CUDA device."""
    config = model.config
    weights = model.quantised_bytes or weight_bytes(count_parameters(config), _precision(arguments, config))
    device, there = _memory_of_device(arguments)
    kv = arguments.kv_memory or (_CPU_KV_BYTES if device == "this machine" else 0)
    needed = weights + kv
    said = f"weights {weights / _GIB:.2f} GiB and KV blocks {kv / _GIB:.2f} GiB of {there / _GIB:.1f} GiB of {device}"
    advice = "quantise the weights (--quantization int8 or int4), lower --kv-memory, or choose a smaller model"
    if needed > there:
        say("engine memory", "problem", f"{said}: they do not fit", advice)
    elif needed > 0.9 * there:
        say("engine memory", "warning", f"{said}: little is left for steps and for other programs", advice)
    else:
        tokens = kv // kv_bytes_per_token(config, _precision(arguments, config), arguments.kv_dtype)
        say("engine memory", "ok", f"{said}" + (f": {tokens:,} tokens of context in all" if tokens else ""), "")


def _precision(arguments: argparse.Namespace, config: ModelConfig) -> Precision:
    if (stored := _STORED_AS.get(arguments.quantization)) is not None:
        return stored
    if arguments.dtype == "float32" or (arguments.dtype == "auto" and config.features_beyond_llama()):
        return "float32"
    return "bfloat16"


def _memory_of_device(arguments: argparse.Namespace) -> tuple[str, int]:
    import torch

    if arguments.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_device(arguments: argparse.Namespace, say: Say) -> None:
    import importlib.util

    import torch

    if not torch.cuda.is_available():
        if arguments.device == "cuda":
            built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
            advice = "install a driver and a CUDA build of torch (`nvidia-smi` shows the device), or set --device cpu"
            say("engine device", "problem", f"--device cuda: {built}", advice)
        return
    name = (
        f"{torch.cuda.get_device_name()}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    )
    if importlib.util.find_spec("triton") is None:
        advice = "install the extra: pip install 'keepgate[cuda]'"
        say("engine device", "warning", f"{name}, and Triton is not installed: the CPU would serve", advice)
        return
    say("engine device", "ok", f"{name}; {torch.cuda.mem_get_info()[0] / _GIB:.1f} GiB free", "")


def _check_kernels(arguments: argparse.Namespace, config: ModelConfig | None, say: Say) -> None:
    """Builds the kernels if need be, and lets them pass the self-test of each start on a small model."""
    from backend.quantization.selection.choice import ROUNDINGS, quantised
    from backend.runners.choice import choose_runner
    from backend.runners.errors import RunnerUnavailable
    from backend.runners.fused.build import load_fused_library
    from backend.runners.fused.layout import Kernels
    from backend.runners.fused.runner import FusedRunner, check_shape
    from backend.runners.torch.runner import TorchRunner

    said: list[str] = []
    engine = _small_engine(arguments)
    try:
        weights, _ = quantised(_random_weights(), engine.quantization if engine.quantization in ROUNDINGS else "none")
        runner = choose_runner(_SMALL, weights, engine, _CONTEXT, said.append)
    except BackendError as error:
        say("engine kernels", "problem", str(error), "correct the option that is named")
        return
    if isinstance(runner, TorchRunner):
        reason = next((sentence for sentence in reversed(said) if "torch" in sentence), "serving with torch, slower")
        say("engine kernels", "warning", reason, _advice(reason))
        return
    if not isinstance(runner, FusedRunner):
        say("engine kernels", "ok", f"{runner.name}: CUDA kernels, compiled, self-test passed", "")
        return
    if config is not None:
        try:
            check_shape(config)
        except RunnerUnavailable as refusal:
            say("engine kernels", "warning", f"{refusal}: torch serves this model, slower", _advice(str(refusal)))
            return
    built = "built now" if any("building" in sentence for sentence in said) else "built before"
    kernels = Kernels.of(load_fused_library(said.append)).instructions
    say("engine kernels", "ok", f"the C++ step ({runner.name}) with {kernels}, {built}, passes its self-test", "")


def _advice(reason: str) -> str:
    if "compiler" in reason or "CXX" in reason:
        return "install g++ (Debian: apt-get install g++), or name a compiler with CXX"
    if "refuses the source" in reason:
        return "an x86-64 processor lacks AVX2, FMA or F16C, or the compiler is older than GCC 9: update it"
    if "self-test" in reason:
        return "remove ~/.cache/keepgate/kernels and try again; if it fails again, report it with this line"
    return "it is right, and slower; models like Llama, Qwen and Mistral in --dtype auto run on the C++ step"


def _small_engine(arguments: argparse.Namespace) -> EngineConfig:
    from backend.engine.config import EngineConfig

    return EngineConfig(
        kv_memory=_SMALL_KV_BYTES,
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_dtype=arguments.kv_dtype,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
    )


def _random_weights() -> ModelWeights:
    import torch

    from backend.model_loader.weights import LayerWeights, Linear, Mlp, ModelWeights

    generator = torch.Generator().manual_seed(0)
    c = _SMALL

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(matrix(rows, columns), None)

    def layers() -> Iterator[LayerWeights]:
        for _ in range(c.num_layers):
            yield LayerWeights(
                input_norm=torch.ones(c.hidden_size),
                query=linear(c.num_heads * c.head_dim, c.hidden_size),
                key=linear(c.num_kv_heads * c.head_dim, c.hidden_size),
                value=linear(c.num_kv_heads * c.head_dim, c.hidden_size),
                query_norm=None,
                key_norm=None,
                output=linear(c.hidden_size, c.num_heads * c.head_dim),
                post_attention_norm=torch.ones(c.hidden_size),
                mlps=(
                    Mlp(
                        gate=linear(c.intermediate_size, c.hidden_size),
                        up=linear(c.intermediate_size, c.hidden_size),
                        down=linear(c.hidden_size, c.intermediate_size),
                    ),
                ),
            )

    return ModelWeights(
        embedding=matrix(c.vocab_size, c.hidden_size),
        layers=tuple(layers()),
        norm=torch.ones(c.hidden_size),
        head=matrix(c.vocab_size, c.hidden_size),
    )


if __name__ == "__main__":
    exit_on_broken_pipe()
    sys.exit(run(sys.argv[1:]))
