"""Chat templates with tools for the small model, whose own has none: one for each way of writing calls."""

_TURNS = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- for call in m.tool_calls or [] %}CALL{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\nFunctions:' }}
    {%- for tool in tools %}{{ '\\n' + (tool.function | tojson) }}{% endfor %}
    {{- '\\nTo call one, write OPEN{"name": its name, "FIELD": an object}CLOSE<|im_end|>\\n' }}
{%- endif %}
"""


def _template(opening: str, closing: str, field: str = "arguments") -> str:
    call = (
        "{{ '" + opening + '{"name": "\' + call.function.name + \'", "' + field + "\": ' }}"
        "{{ call.function.arguments | tojson }}{{ '}" + closing + "' }}"
    )
    tools = _TOOLS.replace("OPEN", opening).replace("CLOSE", closing).replace("FIELD", field)
    return tools + _TURNS.replace("CALL", call)


def _named(call_id: str = "") -> str:
    """The name in plain text before the arguments, as newer Mistral models write it."""
    call = "{{ '[TOOL_CALLS]' + call.function.name + '" + call_id + "[ARGS]' }}{{ call.function.arguments | tojson }}"
    tools = _TOOLS.replace('OPEN{"name": its name, "FIELD": an object}CLOSE', "[TOOL_CALLS]its name[ARGS]an object")
    return tools + _TURNS.replace("CALL", call)


PLAIN = _TURNS.replace("CALL", "")
HERMES = _template("<tool_call>\\n", "\\n</tool_call>")
LIST = _template("<tool_call>[", "]</tool_call>")
MISTRAL = _template("[TOOL_CALLS] [", "]")
TIGHT = _template("[TOOL_CALLS][", "]")
NAMED = _named()
NAMED_WITH_ID = _named("[CALL_ID]' + call.id + '")
LLAMA3 = "{# <|python_tag|> marks code #}" + _template("", "", "parameters")
UNKNOWN = _template("CALL: ", "")
