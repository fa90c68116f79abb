"""Keepgate's backend: a decode engine behind an OpenAI-compatible server, reached by the gateway over HTTP.

Layers, from the top: commands, api and evaluation, responses and prefixes, requests, model, quantization, chat,
runners, engine, text, model_loader and kernels, checkpoints, quantized_weights, models, protocol, errors.
Uses prefix_store. Read engine/engine.py first, and api/openai_handlers.py for the path of a request.
"""
