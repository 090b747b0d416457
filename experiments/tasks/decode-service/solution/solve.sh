cat > /app/decode.py <<'PY'
"""Greedy decoding: one call feeds one more token to every text, and beginnings that prompts share are fed once."""

import json


def ask(**request):
    print(json.dumps(request), flush=True)
    return json.loads(input())


given = ask(ask="prompts")
prompts, count = [tuple(prompt) for prompt in given["prompts"]], given["tokens"]
states = {(): None}
following = {}


def feed(texts):
    """One call that lengthens texts which are known up to their last token."""
    answer = ask(ask="step", parts=[[states[text[:-1]], [text[-1]]] for text in texts])
    for text, (state, token) in zip(texts, answer["parts"]):
        states[text], following[text] = state, token


for length in range(1, max(map(len, prompts)) + 1):
    feed(sorted({prompt[:length] for prompt in prompts if len(prompt) >= length}))
texts = {prompt: prompt for prompt in prompts}
for step in range(count):
    texts = {prompt: text + (following[text],) for prompt, text in texts.items()}
    if step + 1 < count:
        feed([text for text in dict.fromkeys(texts.values()) if text not in states])
ask(ask="done", texts=[list(texts[prompt][len(prompt) :]) for prompt in prompts])
PY
