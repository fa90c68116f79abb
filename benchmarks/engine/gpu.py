"""The engine on one GPU, beside transformers' continuous batching: `make bench-gpu`, under ten minutes.

Needs torch, Triton, transformers and numpy, nothing else. The model has the shape of an 8B Llama and random weights,
which both sides share. Shares are of what this device did in the same run: a copy of gigabytes, and a large product.
Products with quantised weights are those of one of its layers, against the same in bf16.
The table is printed last, and written to results/gpu.json as the other figures are.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.engine.engine import Engine
from backend.engine.model_runner import BLOCK_SIZE, StepInput
from backend.engine.sequence import SamplingParams, Sequence
from backend.kernels.fp8_gemm import supports_fp8_gemm
from backend.kernels.quantized_matmul import QuantizedMatmul
from backend.kernels.quantized_weight import DeviceWeight, on_device
from backend.model_loader.weights import LayerWeights, Linear, Mlp, ModelWeights
from backend.models.config import ModelConfig
from backend.quantized_weights.fp8_scheme import Fp8Scheme
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from backend.quantized_weights.quantized_linear import Scheme
from backend.runners.cuda.runner import CudaRunner
from backend.runners.cuda.skinny_gemm import SkinnyGemmTable
from backend.speculation.speculator import AdaptiveSpeculator
from backend.speculation.step_costs import measure as measured_steps
from backend.text.detokenizer import Detokenizer, TokenBytes
from prefix_store.frames.segments import gather, scatter

RESULT = Path(__file__).resolve().parents[1] / "results" / "gpu.json"
LLAMA_8B = ModelConfig(
    model_type="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(),
)
CONTEXT = 2048
PROMPT, ANSWER = 128, 128
BATCHES = (32, 256)
PREDICTED_BATCHES = {1: 2.0, 32: 0.98}
"""And what predictions must reach against none."""
PREDICTABLE = 64.0
EDITED = 25
"""Tokens of a prediction of which one is another one than in the answer."""
PREFIX, QUESTION = 4096, 64
ROUNDS = 3
PRODUCT_ROWS = (1, 8, 32, 64, 256)
SCHEMES: tuple[Scheme, ...] = (IntScheme(4, 128), IntScheme(8), Nf4Scheme(), Fp8Scheme())
TIMES_BF16 = {("int4-g128", 1): 2.5, ("int4-g128", 64): 1.0, ("fp8", 256): 1.2}
"""What must be reached, by scheme and rows."""
COPIES = 4
"""Of a layer: 4 bits of them are several times what an H200 caches."""
_NO_TEXT = json.dumps({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}, "added_tokens": []})


@dataclasses.dataclass
class Row:
    """One line of the table; `least` is what must be reached."""

    what: str
    unit: str
    rounds: list[float]
    least: float | None = None

    @property
    def measured(self) -> float:
        return statistics.median(self.rounds)


def main() -> int:
    """Returns the exit status: 0 when everything was measured, whatever the figures say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LLAMA_8B.num_layers, help="fewer layers, to try the script out")
    parser.add_argument("--alone", action="store_true", help="leave transformers' part out")
    parser.add_argument("--products", action="store_true", help="only the products with quantised weights")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.engine.gpu: there is no CUDA device here", file=sys.stderr)
        return 1
    if options.products:
        print_table(quantised_products())
        return 0
    began = time.monotonic()
    config = dataclasses.replace(LLAMA_8B, num_layers=options.layers)
    rows = measure(config, with_transformers=not options.alone)
    if options.layers == LLAMA_8B.num_layers and not options.alone:
        save(rows, time.monotonic() - began)
    print_table(rows)
    return 0


def measure(config: ModelConfig, with_transformers: bool) -> list[Row]:
    """All figures, in the order of the table."""
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    say(f"copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s")
    products = quantised_products()
    torch.manual_seed(0)
    peer = peer_model(config)
    say("model made")
    theirs = {batch: peer_tokens_per_second(peer, config, batch) for batch in BATCHES} if with_transformers else {}
    torch.cuda.empty_cache()
    num_blocks = max(BATCHES) * -(-(PROMPT + ANSWER) // BLOCK_SIZE) + 4 * CONTEXT // BLOCK_SIZE
    runner = CudaRunner(config, weights_of(peer), num_blocks, 4 * CONTEXT, max(BATCHES))
    runner.record(say)
    error = disagreement_with(peer, runner)
    say(f"logits differ from transformers' by {error:.2%}")
    rows = [
        Row("copy bandwidth, read and written", "TB/s", [bandwidth / 1e12]),
        Row("bf16 matrix product, 8192 cubed", "TFLOP/s", [rate / 1e12]),
        Row("relative difference of logits to transformers'", "share", [error]),
        decode_share(runner, bandwidth),
        prefill_share(runner, rate),
    ]
    for batch in BATCHES:
        ours = engine_tokens_per_second(runner, batch)
        rows.append(Row(f"{batch} sequences, {PROMPT} + {ANSWER} tokens: Keepgate's engine", "tokens/s", ours))
        if with_transformers:
            median = statistics.median(theirs[batch])
            rows.append(Row(f"{batch} sequences: transformers, continuous batching", "tokens/s", theirs[batch]))
            rows.append(Row(f"{batch} sequences: Keepgate over transformers", "ratio", [r / median for r in ours], 3.0))
    make_predictable(peer)
    rows += [predicted_output(runner, batch) for batch in PREDICTED_BATCHES]
    return rows + times_to_first_token(runner) + products


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 4 GiB."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    moved: float = 2.0 * source.nbytes
    return moved / device_seconds(lambda: target.copy_(source), 20)


def matmul_rate() -> float:
    """Floating-point operations per second of a bf16 product on random numbers."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    operations: float = 2.0 * size**3
    return operations / device_seconds(lambda: left @ right, 20)


def device_seconds(work: Callable[[], object], repetitions: int) -> float:
    """Median seconds of one repetition, by the device's clock."""
    events: Any = torch.cuda
    times = []
    for _ in range(5):
        work()
    for _ in range(repetitions):
        first, last = events.Event(enable_timing=True), events.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return float(statistics.median(times))


@torch.inference_mode()
def quantised_products() -> list[Row]:
    """Times of all matrices of one layer, from recordings over several copies in turn, and how much less than bf16."""
    c = LLAMA_8B
    attention, kept = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
    shapes = (
        (attention + kept, c.hidden_size),
        (c.hidden_size, attention),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    )
    weights = [torch.randn(shape) * 0.02 for shape in shapes]
    layers = [[Linear(weight.cuda().bfloat16(), None) for weight in weights] for _ in range(COPIES)]
    dense = [linear for layer in layers for linear in layer]
    best = SkinnyGemmTable.measure(dense)
    plain = {
        rows: layer_microseconds([functools.partial(best, linear=each) for each in dense], rows)
        for rows in PRODUCT_ROWS
    }
    table = [Row(f"layer's products, bf16, {rows} rows", "us", plain[rows]) for rows in PRODUCT_ROWS]
    del layers, dense
    for scheme in SCHEMES:
        scaled = isinstance(scheme, Fp8Scheme) and supports_fp8_gemm(torch.device("cuda"))
        one = [on_device(scheme.pack(weight), torch.device("cuda")) for weight in weights]
        products = [QuantizedMatmul(copied(each), None, scaled) for _ in range(COPIES) for each in one]
        for rows in PRODUCT_ROWS:
            times = layer_microseconds(products, rows)
            median = statistics.median(plain[rows])
            table.append(Row(f"layer's products, {scheme.name}, {rows} rows", "us", times))
            ratios, least = [median / each for each in times], TIMES_BF16.get((scheme.name, rows))
            table.append(Row(f"{scheme.name} over bf16, {rows} rows", "ratio", ratios, least))
            say(f"{scheme.name}, {rows} rows: {statistics.median(times):.1f} us, bf16 {median:.1f} us")
    return table


def copied(weight: DeviceWeight) -> DeviceWeight:
    """The same in other memory."""
    return dataclasses.replace(weight, words=weight.words.clone(), scales=weight.scales.clone())


def layer_microseconds(products: Iterable[Callable[[torch.Tensor], torch.Tensor]], rows: int) -> list[float]:
    """Of one layer, in some rounds: products of some copies of it are recorded and replayed together."""
    cuda: Any = torch.cuda  # its graphs have no types
    inputs = {LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size}
    x = {width: torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in inputs}
    widths = [LLAMA_8B.hidden_size] * 3 + [LLAMA_8B.intermediate_size]

    def multiply() -> None:
        for index, product in enumerate(products):
            product(x[widths[index % len(widths)]])

    multiply()
    torch.cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        multiply()
    return [1e6 * device_seconds(graph.replay, 20) / COPIES for _ in range(ROUNDS)]


def peer_model(config: ModelConfig) -> Any:
    """The model as transformers has it, with random weights, in bf16 on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hf = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM(hf)
            return model.eval()
    finally:
        torch.set_default_dtype(torch.float32)


def weights_of(peer: Any) -> ModelWeights:
    """The same tensors under our names."""

    def linear(module: Any) -> Linear:
        return Linear(module.weight.detach(), None)

    layers = []
    for layer in peer.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layers.append(
            LayerWeights(
                input_norm=layer.input_layernorm.weight.detach(),
                query=linear(attention.q_proj),
                key=linear(attention.k_proj),
                value=linear(attention.v_proj),
                query_norm=None,
                key_norm=None,
                output=linear(attention.o_proj),
                post_attention_norm=layer.post_attention_layernorm.weight.detach(),
                mlps=(Mlp(linear(mlp.gate_proj), linear(mlp.up_proj), linear(mlp.down_proj)),),
            )
        )
    return ModelWeights(
        peer.model.embed_tokens.weight.detach(),
        tuple(layers),
        peer.model.norm.weight.detach(),
        peer.lm_head.weight.detach(),
    )


def disagreement_with(peer: Any, runner: CudaRunner) -> float:
    """Relative difference of the logits of one prompt, computed whole there and in two chunks here."""
    tokens = np.random.default_rng(1).integers(0, runner.config.vocab_size, 300).astype(np.int32)
    with torch.no_grad():
        expected = peer(torch.from_numpy(tokens).long().cuda()[None]).logits[0].float()
    parts = []
    for start, end in ((0, 200), (200, 300)):
        step = batch_step([tokens[start:end]], start, every_row=True)
        parts.append(runner.run(step).logits.clone())
    return float((torch.cat(parts) - expected).norm() / expected.norm())


def decode_share(runner: CudaRunner, bandwidth: float) -> Row:
    """Bytes that a step of one sequence has to read, over its time, over what a copy reaches."""
    c = runner.config
    read = 2 * (linear_elements(c) + c.vocab_size * c.hidden_size)
    read += 2 * PROMPT * 2 * c.num_layers * c.num_kv_heads * c.head_dim
    runner.run(batch_step([np.zeros(PROMPT, dtype=np.int32)], 0))
    step = batch_step([np.ones(1, dtype=np.int32)], PROMPT)
    shares = [read / device_seconds(lambda: runner.run(step), 50) / bandwidth for _ in range(ROUNDS)]
    say(f"one sequence: {shares[0] * bandwidth / read:.0f} steps/s")
    return Row("decode of one sequence, share of the copy bandwidth", "share", shares, 0.75)


def prefill_share(runner: CudaRunner, rate: float) -> Row:
    """Operations of a prefill of four prompts, over its time, over what a product reaches."""
    c = runner.config
    prompts = np.random.default_rng(2).integers(0, c.vocab_size, (4, CONTEXT)).astype(np.int32)
    step = batch_step(list(prompts), 0)
    operations = 2.0 * linear_elements(c) * prompts.size
    # Scores and mixing: two products of head_dim for each pair of a row and what it sees, half of the square.
    operations += 4 * c.num_layers * c.num_heads * c.head_dim * (CONTEXT**2 / 2) * len(prompts)
    shares = [operations / device_seconds(lambda: runner.run(step), 5) / rate for _ in range(ROUNDS)]
    return Row(f"prefill of 4 x {CONTEXT} tokens, share of the product's rate", "share", shares, 0.5)


def times_to_first_token(runner: CudaRunner) -> list[Row]:
    """Of a prompt whose beginning is computed; or is in host memory and comes to the device layer by layer, or whole.

    Restores are timed from when the bytes are in staging memory; what one thread takes to copy them there, without a
    checksum, has a line of its own.
    """
    kv = runner.kv_blocks
    count = PREFIX // BLOCK_SIZE
    if kv is None or kv.most_at_once < count:
        say(f"no restores: the device's staging memory does not hold {count} blocks")
        return []
    tokens = np.random.default_rng(4).integers(0, runner.config.vocab_size, PREFIX + QUESTION).astype(np.int32)
    chunks = [(start, min(start + CONTEXT, PREFIX)) for start in range(0, PREFIX, CONTEXT)]
    question = batch_step([tokens[PREFIX:]], PREFIX)
    blocks = range(count)

    def compute() -> None:
        for start, end in chunks:
            runner.run(batch_step([tokens[start:end]], start))

    compute()
    outgoing = kv.outgoing(blocks)
    if outgoing is None:
        raise RuntimeError("the staging memory is in use before anything is copied out")
    frames = [np.empty(kv.layout.nbytes, np.uint8) for _ in blocks]
    for frame, segments in zip(frames, outgoing.ready(), strict=True):
        gather(segments, frame)
    outgoing.close()
    expected = int(runner.run(question).logits.argmax())
    computed, layered, whole, copied = (
        f"first token of {PREFIX} + {QUESTION}, prefix computed",
        f"first token of {PREFIX} + {QUESTION}, prefix restored layer by layer",
        f"first token of {PREFIX} + {QUESTION}, prefix restored before the step",
        f"{PREFIX} tokens from host memory to staging, one thread",
    )
    seconds: dict[str, list[float]] = {name: [] for name in (computed, layered, whole, copied)}
    for _ in range(ROUNDS + 1):
        for name in (layered, whole):
            incoming = kv.incoming(blocks)
            if incoming is None:
                raise RuntimeError("the staging memory of the last restore has not come back")
            began = time.monotonic()
            for frame, into in zip(frames, incoming.segments, strict=True):
                scatter(frame, into)
            seconds[copied].append(time.monotonic() - began)
            with torch.inference_mode():
                runner.decoder.memory[:, :, :count].zero_()
            torch.cuda.synchronize()
            began = time.monotonic()
            incoming.arrived(count)
            if name is whole:
                torch.cuda.synchronize()
            token = int(runner.run(question).logits.argmax())
            seconds[name].append(time.monotonic() - began)
            incoming.close()
            if token != expected:
                raise RuntimeError(f"the first token on a restored prefix is {token}, expected {expected}")
        began = time.monotonic()
        compute()
        int(runner.run(question).logits.argmax())
        seconds[computed].append(time.monotonic() - began)
    rows = [Row(name, "ms", [1e3 * each for each in values[1:]]) for name, values in seconds.items()]
    for row in rows:
        say(f"{row.what}: {row.measured:.1f} ms")
    return rows


def engine_tokens_per_second(runner: CudaRunner, batch: int) -> list[float]:
    """Generated tokens per second, prompts included in the time, through scheduler and sampler."""
    results = [answered(runner, prompts_for(runner.config, batch, attempt))[0] for attempt in range(ROUNDS + 1)]
    say(f"{batch} sequences: {results[-1]:.0f} tokens/s")
    return results[1:]


@torch.no_grad()
def make_predictable(peer: Any) -> None:
    """Sets embedding and head so that every token has one successor, far ahead of all others.

    With random weights the best token's lead is less than what another order of sums changes, so no answer would be
    that of a step with other rows, and no prediction of it right.
    """
    embedding = peer.model.embed_tokens.weight
    embedding.normal_(std=PREDICTABLE)  # the layers add some 15 to each number
    peer.lm_head.weight.copy_(embedding.roll(1, 0) / PREDICTABLE)


def predicted_output(runner: CudaRunner, batch: int) -> Row:
    """Tokens per second with predictions that differ in single tokens from the answers, over those without any."""
    costs = measured_steps(runner)
    speculator = AdaptiveSpeculator(costs)
    ratios = []
    for attempt in range(ROUNDS + 1):
        prompts = prompts_for(runner.config, batch, attempt)
        plain, answers = answered(runner, prompts)
        edited = [
            [token ^ 1 if place % EDITED == EDITED - 1 else token for place, token in enumerate(tokens)]
            for tokens in answers
        ]
        speed, drafted = answered(runner, prompts, speculator, edited)
        if drafted != answers:
            raise RuntimeError("predictions changed an answer")
        ratios.append(speed / plain)
    took = f"{1e3 * costs.drafted(batch + 16):.1f} ms with 16 tokens of drafts, {1e3 * costs.plain(batch):.1f} without"
    say(f"{batch} sequences with predictions: {ratios[-1]:.2f} times as fast; steps take {took}")
    what = f"{batch} sequences, output predicted but for one token of {EDITED}, over none predicted"
    return Row(what, "ratio", ratios[1:], PREDICTED_BATCHES[batch])


def answered(
    runner: CudaRunner,
    prompts: list[list[int]],
    speculator: AdaptiveSpeculator | None = None,
    predictions: list[list[int]] | None = None,
) -> tuple[float, list[list[int]]]:
    """Tokens per second of greedy answers to all prompts at once, and the answers."""
    table = TokenBytes(_NO_TEXT, runner.config.vocab_size)
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    engine = Engine(runner, len(prompts), None, speculator=speculator)
    sequences = [
        Sequence(index, tokens, params, Detokenizer(table), index, prediction=predictions[index] if predictions else ())
        for index, tokens in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    began = time.monotonic()
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    return len(prompts) * ANSWER / seconds, [sequence.tokens[sequence.num_prompt :] for sequence in sequences]


def peer_tokens_per_second(peer: Any, config: ModelConfig, batch: int) -> list[float]:
    """The same work by transformers' generate_batch."""
    import transformers

    make_config: Any = transformers.GenerationConfig
    generation = make_config(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"generation_config": generation, "progress_bar": False}
    if "persistent_manager" in inspect.signature(peer.generate_batch).parameters:
        # Its KV memory and recordings are made in the first round, which does not count, and kept.
        options["persistent_manager"] = True
    results = []
    for attempt in range(ROUNDS + 1):
        inputs = prompts_for(config, batch, attempt)
        began = time.monotonic()
        answers = peer.generate_batch(inputs=inputs, **options)
        seconds = time.monotonic() - began
        generated = sum(len(answer.generated_tokens) for answer in answers.values())
        if generated != batch * ANSWER:
            raise RuntimeError(f"transformers generated {generated} tokens, expected {batch * ANSWER}")
        results.append(generated / seconds)
        say(f"transformers, {batch} sequences: {results[-1]:.0f} tokens/s")
    if "persistent_manager" in options:
        peer.destroy_cached_continuous_batching_manager()
    return results[1:]


def prompts_for(config: ModelConfig, batch: int, seed: int) -> list[list[int]]:
    """Random prompts without a common prefix."""
    prompts: list[list[int]] = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, PROMPT)).tolist()
    return prompts


def batch_step(chunks: list[np.ndarray[Any, np.dtype[np.int32]]], start: int, every_row: bool = False) -> StepInput:
    """A step of chunks of one length, each of a sequence that owns consecutive blocks."""
    count = len(chunks[0])
    blocks = (start + count - 1) // BLOCK_SIZE + 1
    tables = np.arange(len(chunks) * blocks, dtype=np.int32).reshape(len(chunks), blocks)
    positions = np.tile(np.arange(start, start + count), len(chunks))
    rows = np.repeat(np.arange(len(chunks)), count)
    starts = (np.arange(len(chunks) + 1) * count).astype(np.int32)
    return StepInput(
        token_ids=np.concatenate(chunks),
        positions=positions.astype(np.int32),
        slot_mapping=tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=starts,
        block_tables=tables,
        logits_rows=np.arange(len(positions), dtype=np.int32) if every_row else starts[1:] - 1,
    )


def linear_elements(config: ModelConfig) -> int:
    """Weights that every token is multiplied with in the layers, without the head."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def save(rows: list[Row], seconds: float) -> None:
    """Writes results/gpu.json in the form of the other figures (`figure.Measurement`)."""
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=RESULT.parents[2]).stdout.strip()
    import transformers
    import triton

    measurement = {
        "figure": {
            "figure": "gpu",
            "title": "One GPU, 8B Llama shape, random weights",
            "method": __doc__ or "",
            "rows": [
                {
                    "what": row.what,
                    "unit": row.unit,
                    "rounds": row.rounds,
                    "target": None if row.least is None else {"at": "least", "value": row.least, "aim": None},
                }
                for row in rows
            ],
        },
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or "unknown",
        "quick": False,
        "seconds": seconds,
        "machine": {"gpu": torch.cuda.get_device_name(), "system": f"{platform.system()} {platform.machine()}"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(measurement, indent=2) + "\n", encoding="utf-8")


def print_table(rows: list[Row]) -> None:
    """Medians, and what must be reached."""
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for row in rows:
        verdict = ""
        if row.least is not None:
            verdict = f"  at least {row.least:g}: {'met' if row.measured >= row.least else 'not met'}"
        print(f"{row.what:<66} {row.measured:>12,.4g} {row.unit:<9}{verdict}")


def say(sentence: str) -> None:
    """Progress, at once even through a pipe."""
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())
