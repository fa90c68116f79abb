"""The HTTP server of one model.

`app` lists the endpoints and starts the engine; read it first. A request goes one way: a handler (`openai_handlers`)
reads the body (`http_body`), `backend.requests` makes a `GenerationRequest` of it, `generate` submits its sequences
to the engine, and `streaming` or `json_response` sends what `backend.responses` builds of the outputs. Uses `chat`,
`engine`, `prefixes`, `requests`, `responses`, the package `prefix_store` and the package `telemetry`.
"""
