"""Greedy decoding, without a cache."""

import json


def ask(**request):
    print(json.dumps(request), flush=True)
    return json.loads(input())


given = ask(ask="prompts")
texts = []
for prompt in given["prompts"]:
    text = []
    for _ in range(given["tokens"]):
        answer = ask(ask="step", parts=[[None, prompt + text]])
        text.append(answer["parts"][0][1])
    texts.append(text)
ask(ask="done", texts=texts)
