"""Chat templates in the manner of well-known models, short, for the tiny tokenizers."""

from test_tool_calls import TEMPLATES as WITH_TOOLS
from transformers import AutoTokenizer

from kvrag import InputError
from kvrag.prompt.template import PromptEncoder
from kvrag.testing.tokenizers import tiny_tokenizer

QWEN25 = (  # names its roles, and leaves out all others
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    '{% for c in m.tool_calls %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # an earlier answer's thoughts are left out; thinking can be switched off
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>assistant\n{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ said }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% elif m.role in ['system', 'user', 'tool'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA32 = (  # any role; trims; writes the date
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|im_start|>system\nToday: {{ date_string }}\n<|im_end|>{% for m in messages %}"
    "{% if 'tool_calls' in m %}<|im_start|>assistant\n{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "<|im_end|>{% elif m.role == 'tool' %}<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (  # the system message moves into the last user message
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% elif m.role == 'user' %}[INST] {% if loop.last and ns.system %}{{ ns.system }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
SHOUTING = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content | upper | tojson }}\n{% endfor %}"
)
TWICE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}Again: {{ messages[-1].content }}\n"

TEMPLATES = {
    **WITH_TOOLS,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3.2": LLAMA32,
    "mistral": MISTRAL,
    "shouting": SHOUTING,
    "twice": TWICE,
}
CUTTING = "{% for m in messages %}{{ m.role }}: {{ m.content[:20] }}\n{% endfor %}"


CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": '{"where": "box"}'},
}


def with_template(directory, template):
    """The tokenizer of a model, with one of the templates."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def encoder_of(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return PromptEncoder(tokenizer)


def outcome(action):
    """What an action returns, or why it is refused."""
    try:
        return action()
    except InputError as error:
        return error
