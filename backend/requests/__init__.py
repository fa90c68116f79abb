"""Turns decoded request bodies into sequences for the engine.

Every field of a body is declared in `backend.protocol`, and checked here: it is used or refused by name. `reader`
makes one reader for each endpoint; read it first. `chat` and `completions` return a `GenerationRequest`.

To add a field of a chat request: declare it in `backend.protocol.ChatRequest` and check it in
`ChatRequestReader.read`; one that completions have too in `CommonFields` and `sampling`. `SamplingParams` or
`GenerationRequest` carries it. Uses `chat`, `engine`, `models`, `text` and the package `prefix_store`.
"""
