"""Settings of the in-repo backend."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.settings.fields import TEN_YEARS, Codec, Count, File, PositiveSize, Size, Text, masked


class BackendSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the in-repo backend runs. All but `replicas` are options of `keepgate backend` of these names, None
    is the default.

    What is None of its prefix store is as prefix_defaults.py says; a `prefix_disk_size` of 0 is no disk tier.
    """

    replicas: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 1
    """Backends that run side by side, each an upstream of the same model with memory of its own. Prompts go to the one
    that has computed their beginning. Without `threads` they divide the cores."""
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, Meta(description="one of auto, cpu and cuda")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Meta(description="one of auto, float32, bfloat16 and float16"),
    ] = None
    quantization: Annotated[
        Literal["none", "auto", "int8", "int4", "fp8", "nf4", "gptq-int4", "awq-int4", "mixed"] | None,
        Meta(description="one of none, auto, int8, int4, fp8, nf4, gptq-int4, awq-int4 and mixed"),
    ] = None
    kv_dtype: Annotated[Literal["auto", "int8", "fp8"] | None, Meta(description="one of auto, int8 and fp8")] = None
    kv_memory: Annotated[PositiveSize | None, Meta(description="a size such as 512MiB, at least 1KiB")] = None
    max_batch: Count = None
    max_context: Count = None
    max_waiting: Count = None
    max_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=TEN_YEARS)] | None,
        Meta(description="seconds, more than 0 and at most ten years"),
    ] = None
    step_tokens: Count = None
    batching: Annotated[
        Literal["continuous", "dynamic", "static"] | None, Meta(description="one of continuous, dynamic and static")
    ] = None
    max_wait_ms: Annotated[
        Annotated[float, Meta(ge=0, le=TEN_YEARS)] | None, Meta(description="milliseconds, 0 or more")
    ] = None
    scheduling_policy: Annotated[Literal["fcfs", "priority"] | None, Meta(description="one of fcfs and priority")] = (
        None
    )
    threads: Count = None
    tensor_parallel: Count = None
    pipeline_parallel: Count = None
    speculation: Annotated[bool | None, Meta(description="true or false")] = None
    medusa: File = None
    draft_model: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="text that is not empty")] = None
    prefix_sharing: Annotated[bool | None, Meta(description="true or false")] = None
    prefix_memory: Annotated[PositiveSize | None, Meta(description="a size such as 512MiB, at least 1KiB")] = None
    prefix_memory_codec: Codec = None
    prefix_disk: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="the path of a folder")] = None
    prefix_disk_size: Annotated[Size | None, Meta(description="a size such as 4GiB, or 0 for none")] = None
    prefix_disk_codec: Codec = None
    prefix_mooncake: File = None
    prefix_mooncake_codec: Codec = None
    prefix_index: Annotated[
        Annotated[str, Meta(pattern=r"^(rediss?(\+(sentinel|cluster))?|unix)://.")] | None,
        Meta(description="a URL such as redis://127.0.0.1:6379/0 or unix:///run/redis.sock"),
    ] = None
    prefix_secret_file: File = None
    prefix_name: Annotated[Annotated[str, Meta(min_length=1)] | None, Meta(description="text that is not empty")] = None
    prefix_address: Annotated[
        Annotated[str, Meta(pattern="^https?://.")] | None, Meta(description="a URL such as http://10.0.0.7:8081")
    ] = None
    prefix_audit: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)] | None, Meta(description="a whole number, 0 or more and below 2147483648")
    ] = None
    public_prefix: Annotated[tuple[Text, ...], Meta(description="paths of files")] = ()
    chat_template: File = None
    strict_fields: Annotated[bool | None, Meta(description="true or false")] = None
    drop_images: Annotated[bool | None, Meta(description="true or false")] = None
    log_format: Annotated[Literal["human", "json"] | None, Meta(description="human or json")] = None
    traces_endpoint: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^/@\s?#]+(/[^@\s?#]*)?$")] | None,
        Meta(description="a URL such as http://127.0.0.1:4318, without credentials"),
    ] = None
    traces_file: File = None

    def __repr__(self) -> str:
        index = None if self.prefix_index is None else masked(self.prefix_index)
        fields = {**msgspec.structs.asdict(self), "prefix_index": index}
        return f"BackendSettings({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def options(self) -> list[str]:
        """The same as options of the command line."""
        words: list[str] = []
        for name, value in msgspec.structs.asdict(self).items():
            option = name.replace("_", "-")
            if name == "replicas":
                continue
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            elif isinstance(value, tuple):
                words += [f"--{option}={each}" for each in value]
            elif value is not None:
                words.append(f"--{option}={value}")
        return words
