# All prompts in one call, each with a state of its own: few calls, and shared beginnings fed again and again.
cat > /app/decode.py <<'PY'
import json


def ask(**request):
    print(json.dumps(request), flush=True)
    return json.loads(input())


given = ask(ask="prompts")
parts, texts = [[None, prompt] for prompt in given["prompts"]], [[] for _ in given["prompts"]]
for _ in range(given["tokens"]):
    parts = [[state, [token]] for state, token in ask(ask="step", parts=parts)["parts"]]
    for text, (_, (token,)) in zip(texts, parts):
        text.append(token)
ask(ask="done", texts=texts)
PY
