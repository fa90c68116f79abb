"""GGUF, the file format of llama.cpp: reads a file and writes it as a Hugging Face directory.

`convert.py` is the entry; read it first. `header.py` parses the file, `config.py` makes `config.json`, `tensors.py`
maps tensor names, `tokenizer.py` writes the tokenizer. `blocks.py` repacks quantised blocks: to add a type of ggml,
write a function there and enter it in the table at the end of the file. Uses `models`, `quantized` and
`quantized_weights`.
"""
