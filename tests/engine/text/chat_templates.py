"""Templates of the families that chatkv runs, and of the habits that break cached prefixes."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = '' %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 %}{% set content = system_message + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
WITHOUT_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}[INST]{{ message.role }}: {{ message.content }}[/INST]{% endfor %}"
    "{% if add_generation_prompt %}[INST]assistant: {% endif %}"
)
PLAIN = (
    "{% for message in messages %}{% if message.role == 'assistant' %}### Response:\n{{ message.content }}\n\n"
    "{% else %}### Instruction:\n{{ message.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
VICUNA = (
    "{% for message in messages %}{% if message.role == 'assistant' %} ASSISTANT: {{ message.content }}</s>"
    "{% else %}USER: {{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
BARE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }};"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)
THINKING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPLITTING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if '</think>' in message.content %}"
    "<think>\n{{ message.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "ARGUMENTS}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAPPING_TOOLS = TOOLS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
TEXT_TOOLS = TOOLS.replace("ARGUMENTS", "{{ '' + call.function.arguments }}")
EITHER_TOOLS = TOOLS.replace(
    "ARGUMENTS",
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
)
KEEPS_ANSWERS = {
    "chatml": CHATML,
    "trimming": TRIMMING,
    "llama2": LLAMA2,
    "without-system": WITHOUT_SYSTEM,
    "plain": PLAIN,
    "vicuna": VICUNA,
    "bare": BARE,
    "thinking": THINKING,
}
"""Turn k's prompt and answer begin turn k + 1's prompt. (Thinking: as long as no answer has a thought to strip.)"""
