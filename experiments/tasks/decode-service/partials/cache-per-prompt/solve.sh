# Keeps the state of each prompt; shares nothing, one call per token.
cat > /app/decode.py <<'PY'
import json


def ask(**request):
    print(json.dumps(request), flush=True)
    return json.loads(input())


given = ask(ask="prompts")
texts = []
for prompt in given["prompts"]:
    state, feed, text = None, prompt, []
    for _ in range(given["tokens"]):
        state, token = ask(ask="step", parts=[[state, feed]])["parts"][0]
        text.append(token)
        feed = [token]
    texts.append(text)
ask(ask="done", texts=texts)
PY
