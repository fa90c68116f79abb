"""Chat templates, tools and structured output of one model.

`prompt_renderer` turns messages into token ids; read it first. `output_constraint` turns ``response_format`` and
``tools`` into a grammar, which `grammar` compiles and follows token by token; `tool_parser` finds the calls in the
text of an answer. Uses `models` and `text`.
"""
